"""Sums over tokens of every module's inputs and outputs, and of their gradients.

For each floating-point tensor that a module is called with or returns, a rank adds up its entries
over everything but the last dimension, and the squares of its entries likewise. Projections of the
two by random signs, divided by the number of entries, are means over tokens. A mean does not depend
on which rank has which tokens: data, context and sequence parallelism, microbatches and
accumulation leave it as it is, and so does a copy on every rank. Where it is known which row is of
which token, there is also the mean over those in one half of the vocabulary, which shows if tokens
are exchanged.

A plain tensor does not show which columns of the whole row a rank holds. So sums are projected
under two assumptions: the rank has the first columns, or tensor-parallel ranks have consecutive
blocks (of each fused matrix, see ``TrainerView.pieces``). Partial sums add up to the sums of the
whole tensor. The judge takes the assumption under which the tensor agrees with the control
(``converge_harness.judge.compare.activations``). Nothing is gathered.

A gradient is that of a tensor, from all its uses, and recorded where the tensor appears first:
separating the modules' contributions would add them in another order, and change bits. Training is
not changed in any bit.

A compiled module stays whole: it is looked at from outside. What activation checkpointing computes
again in the backward pass is not counted again. Nothing is recorded inside a CUDA graph.

Source of the idea to compare the modules of two runs in the order of their calls: TTrace (Cui et
al. 2025), which gathers whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.bits import mixed
from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.operations import OperationSampler
from converge_harness.rank.recorder.placement import local_tensor
from converge_harness.rank.recorder.trainer_view import TrainerView
from converge_harness.run_folder import arrays as contract
from converge_harness.run_folder.arrays import SIGNS, write_arrays
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import ACTIVATIONS

_COLUMNS = 3 + 6 * SIGNS
"""Of a row: entries, their squares, entries of half of the tokens, then projections of sums, of
sums over half of the tokens and of squares, each in two layouts of the last dimension."""
_PLACES = 2
"""Dimensions of token ids: batch and sequence."""
_KEY = 0x5EED
_BLOCK = 1 << 22
"""Entries that are summed at a time: 32 MiB of working memory, also for logits."""
BATCHES = 4
"""Frozen steps that are recorded; without frozen steps it is step 1."""

Row = tuple[str, str]
"""A module's canonical name, and one of its tensors: ``in.0``, ``in.mask``, ``out.0``."""


@dataclass
class _Seen:
    """What a rank knows of the rows beside their sums."""

    widths: dict[Row, int]
    same_as: dict[Row, Row]
    """The first row of the same tensor, which has its gradient; of tensors with a gradient."""
    unreadable: set[Row]
    """Tensors of other kinds than torch's ordinary ones, which do not add up."""
    flowing: set[Row]
    """Tensors to which a gradient should flow."""
    in_graph: bool = False
    """Whether some of the computation went into a CUDA graph, where nobody can look."""


class ActivationSampler:
    """A rank's part of the activations of some batches; the writer also writes the file."""

    def __init__(
        self,
        view: TrainerView,
        frozen: int,
        folder: Path | None,
        operations: OperationSampler | None = None,
    ) -> None:
        """``frozen`` is the number of frozen steps; ``folder`` is None except on the writer."""
        self._operations = operations
        self._parts = view.model_parts
        self._tp_rank = view.tp_rank
        self._tp_size = view.tp_group.size() if view.tp_group is not None else 1
        self._pieces = view.pieces
        self._names = view.module_names
        self._device = view.device
        self._folder = folder
        self.tokens: torch.Tensor | None = None
        """Token ids that modules work on now, shape (batch, sequence); None if unknown."""
        self.paused = False
        """Set while modules are called that are not part of training."""
        self._left = max(1, min(frozen, BATCHES))
        self._signs: dict[tuple[int | None, int, int], torch.Tensor] = {}
        self._halved: tuple[torch.Tensor, int] | None = None
        """The token ids that ``_halves`` is of, as they were then: most tensors of a batch have the
        same rows, and a program may copy every batch into one buffer.
        """
        self._halves: dict[torch.Size, torch.Tensor | None] = {}
        self._forward: dict[Row, torch.Tensor] = {}
        self._backward: dict[Row, torch.Tensor] = {}
        self._batches: list[tuple[dict[Row, torch.Tensor], dict[Row, torch.Tensor]]] = []
        self._tensors: dict[tuple[Any, int], tuple[Row, Any]] = {}
        """This batch's tensors (what computed them, and which result) with their first rows."""
        self._undo: list[Callable[[], None]] = []
        self._began = False
        """On every rank alike, also on one without modules."""
        self._seen = _Seen({}, {}, set(), set())

    def begin(self) -> None:
        """Look at every module from now on."""
        if not self._began:
            self._began = True
            for part in self._parts:
                for name, module in self._named(part):
                    self._watch(name, module)
            if self._operations:
                self._operations.watch(self._parts, self._named, is_compiled, self._is_idle)
                self._undo.append(self._operations.finish)

    def _named(self, part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules of a part, by the names under which they are compared."""
        for name, module in _outermost(part):
            yield self._names.get(name, name), module

    def end_batch(self) -> bool:
        """A batch is over; whether it was the last one. No collective happens here."""
        if self._began:
            self._batches.append((self._forward, self._backward))
            self._forward, self._backward = {}, {}
            self._tensors.clear()
            self._halved = None
            self._left -= 1
        return not self._left

    def finish(self) -> None:
        """Stop looking, add up what all ranks saw, and write it. Collective over the world."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        everyones = world.everyones(self._seen)
        unreadable = set[Row]().union(*(each.unreadable for each in everyones))
        flowing = set[Row]().union(*(each.flowing for each in everyones))
        widths: dict[Row, int] = {}
        for seen in everyones:
            for row, width in seen.widths.items():
                if row not in unreadable:
                    widths[row] = max(width, widths.get(row, 0))
        shape = len(self._batches), 2, len(widths), _COLUMNS
        table = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for batch, directions in enumerate(self._batches):
            for direction, found in enumerate(directions):
                for place, row in enumerate(widths):
                    if row in found:
                        table[batch, direction, place] = found[row]
        table = world.add_up_(table).cpu()
        # A gradient that never came is zero, unlike one that nobody looked at.
        expected = torch.tensor([row in flowing for row in widths], dtype=torch.bool)
        table[:, 1, :, 0][expected & (table[:, 1, :, 0] == 0)] = 1.0
        self._batches.clear()
        if self._folder is not None and widths and not any(each.in_graph for each in everyones):
            same_as = {row: first for each in everyones for row, first in each.same_as.items()}
            self._write(self._folder, widths, same_as, table.numpy())

    def _write(
        self, folder: Path, widths: dict[Row, int], same_as: dict[Row, Row], table: np.ndarray
    ) -> None:
        places = {row: place for place, row in enumerate(widths)}
        arrays = contract.activations(
            modules=[module for module, _ in widths],
            tensors=[tensor for _, tensor in widths],
            widths=list(widths.values()),
            same_as=[places.get(same_as.get(row, row), place) for row, place in places.items()],
            forward=table[:, 0],
            backward=table[:, 1],
        )
        write_arrays(folder / ACTIVATIONS, arrays)

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is None:
            if isinstance(module, torch.nn.Embedding):
                looks_up = module.register_forward_pre_hook(self._look_up)
                self._undo.append(looks_up.remove)
            before = module.register_forward_pre_hook(
                lambda _, args, kwargs: self._inputs(name, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(lambda _, __, given: self._outputs(name, given))
            self._undo += [before.remove, after.remove]
            return

        # Hooks would be compiled into it.
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._inputs(name, args, kwargs, compiled=True)
            given = compiled(*args, **kwargs)
            self._outputs(name, given)
            return given

        module._compiled_call_impl = watched
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))

    def _look_up(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Token ids are what an embedding is asked for."""
        ids = args[0] if args else None
        if not self._is_idle() and isinstance(ids, torch.Tensor) and ids.dim() == _PLACES:
            self.tokens = ids

    def _inputs(self, name: str, args: Any, kwargs: Any, *, compiled: bool = False) -> None:
        if not self._is_idle():
            leaves, _ = tree_flatten((args, kwargs))
            for place, leaf in zip(_argument_names(args, kwargs, leaves), leaves, strict=True):
                # A weight that is handed over (Megatron-Core's tied embedding) is no activation:
                # its gradient is of all its uses on the rank, so it depends on the layout.
                if not isinstance(leaf, torch.nn.Parameter):
                    self._tensor((name, f"in.{place}"), leaf, compiled=compiled)

    def _outputs(self, name: str, given: Any) -> None:
        if not self._is_idle():
            for place, leaf in enumerate(tree_flatten(given)[0]):
                self._tensor((name, f"out.{place}"), leaf)

    def _tensor(self, row: Row, leaf: object, *, compiled: bool = False) -> None:
        """Record a tensor, and its gradient once that is complete.

        ``compiled`` says that compiled code gets it: with a hook it would be another input.
        """
        if not isinstance(leaf, torch.Tensor):
            return
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return
        if self._is_by_token(leaf):
            return
        self._add(self._forward, row, leaf, self.tokens)
        node = leaf.grad_fn
        if not leaf.requires_grad or not torch.is_grad_enabled() or (compiled and node is None):
            return
        tensor = (id(leaf) if node is None else node, leaf.output_nr)
        # Kept until its gradient is complete, so that nothing else gets its place in memory.
        first, _ = self._tensors.setdefault(tensor, (row, leaf if node is None else node))
        self._seen.same_as.setdefault(row, first)
        if first != row:
            return
        self._seen.flowing.add(row)
        complete = self._once(row, tensor)
        if node is None:
            self._undo.append(leaf.register_hook(complete).remove)
        else:  # what is compiled later asks a tensor for its hooks, not its node
            number = leaf.output_nr
            node.register_prehook(lambda gradients: complete(gradients[number]))

    def _once(self, row: Row, tensor: tuple[Any, int]) -> Callable[[torch.Tensor | None], None]:
        """What to call with a gradient; only the first call counts.

        A zero-bubble schedule runs a node for inputs, and again for weights.
        """
        batch, tokens = self._backward, self.tokens
        waiting = True

        def complete(gradient: torch.Tensor | None) -> None:
            nonlocal waiting
            if waiting and gradient is not None and batch is self._backward:
                waiting = False
                self._tensors.pop(tensor, None)
                self._add(batch, row, gradient, tokens)

        return complete

    def _is_idle(self) -> bool:
        """Whether what runs now is not counted.

        It is not part of training, computed again in the backward pass, compiled, or captured in a
        CUDA graph.
        """
        training = any(part.training for part in self._parts)
        again = torch._C._current_graph_task_id() != -1
        if self.paused or not training or again or torch.compiler.is_compiling():
            return True
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._seen.in_graph = True
            return True
        return False

    def _is_by_token(self, tensor: torch.Tensor) -> bool:
        """Whether the last dimension is one of tokens, which ranks share out: a mask, scores."""
        if tensor.dim() == 1:
            return True
        length = None if self.tokens is None else self.tokens.shape[-1]
        return tensor.dim() > 1 and not tensor.requires_grad and tensor.shape[-1] == length

    def _add(
        self,
        into: dict[Row, torch.Tensor],
        row: Row,
        tensor: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> None:
        try:
            # Selective checkpointing, a dispatch mode, would treat these operations as the model's:
            # it stores their results, and returns them when the model computes again.
            with _disable_current_modes():
                self._add_up(into, row, tensor, tokens)
        except Exception:  # noqa: BLE001 (looking must never end training)
            self._seen.unreadable.add(row)

    @torch.no_grad()
    def _add_up(
        self,
        into: dict[Row, torch.Tensor],
        row: Row,
        tensor: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> None:
        local, start, width = self._part(tensor.detach())
        self._seen.widths[row] = max(width, self._seen.widths.get(row, 0))
        if not local.numel():
            return
        columns = local.shape[-1]
        half = self._half(local.shape[:-1], tokens)
        sums, some = _sums(local.reshape(-1, columns), half)
        found = sums.new_empty(_COLUMNS)
        found[:3] = sums.new_tensor([local.numel(), 0, some])
        torch.sum(sums[2], 0, out=found[1])
        torch.mm(sums, self._signs_of(row, start, columns), out=found[3:].view(len(sums), -1))
        into[row] = into[row] + found if row in into else found

    def _half(self, shape: torch.Size, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Mask of the rows whose token is in one half of the vocabulary.

        ``shape`` is the tensor's without its last dimension. None where it is unknown which row is
        of which token. Sums over this half change if tokens are exchanged; sums over all do not.
        """
        if tokens is None:
            return None
        if tokens.is_inference():  # nobody counts its changes
            return self._find_half(shape, tokens)
        now = (tokens, tokens._version)
        if self._halved is None or self._halved[0] is not tokens or self._halved[1] != now[1]:
            self._halved = now
            self._halves = {}
        if shape not in self._halves:
            self._halves[shape] = self._find_half(shape, tokens)
        return self._halves[shape]

    def _find_half(self, shape: torch.Size, tokens: torch.Tensor) -> torch.Tensor | None:
        odd = (mixed(local_tensor(tokens).long(), _KEY) & 1).bool()
        batch, length = odd.shape
        if len(shape) < _PLACES or batch not in shape[:_PLACES]:
            return None
        batch_first = shape[0] == batch  # Megatron-Core has the sequence before the batch
        here = shape[1 if batch_first else 0]
        if here != length and self._tp_size > 1 and here * self._tp_size == length:
            odd = odd.chunk(self._tp_size, dim=1)[self._tp_rank]  # sequence parallelism
        if not batch_first:
            odd = odd.T
        if shape[:_PLACES] == odd.shape:
            places = odd.reshape(*odd.shape, *[1] * (len(shape) - _PLACES))
        elif batch_first and len(shape) > _PLACES and shape[2] == length:  # heads before positions
            places = odd[:, None].reshape(batch, 1, length, *[1] * (len(shape) - _PLACES - 1))
        else:
            return None
        return places.expand(shape).reshape(-1)

    def _part(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None, int]:
        """This rank's part, where it begins in a row of the whole tensor, and a row's length.

        A plain tensor does not say where it begins: None, and the length of what is here.
        """
        start: int | None = None
        width = tensor.shape[-1] if tensor.dim() else 1
        if isinstance(tensor, DTensor):
            last = tensor.dim() - 1
            cuts = [
                dim
                for dim, placement in enumerate(tensor.placements)
                if isinstance(placement, Shard) and placement.dim in (last, -1)
            ]
            if len(cuts) > 1:
                raise TypeError("rows are cut along several mesh dimensions")
            start = 0
            for dim in cuts:
                parts = tensor.device_mesh.size(dim)
                start = tensor.device_mesh.get_local_rank(dim) * -(-width // parts)
        tensor = local_tensor(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return (tensor if tensor.dim() else tensor[None]), start, width

    def _signs_of(self, row: Row, start: int | None, columns: int) -> torch.Tensor:
        """Signs of this rank's columns in two layouts: shape (columns, 2 * SIGNS), float64.

        Without a ``start``, the second is as if the tensor-parallel ranks had a row's parts.
        """
        module, tensor = row
        pieces = self._pieces.get(module, 1) if tensor.startswith("out.") else 1
        key = (start, columns, pieces)
        if key not in self._signs:
            first = self._table(start or 0, columns)
            second = first if start is not None else self._divided(columns, pieces)
            self._signs[key] = torch.cat([first, second], dim=1)
        return self._signs[key]

    def _divided(self, columns: int, pieces: int) -> torch.Tensor:
        """Signs of this rank's columns, if the tensor-parallel ranks have a row's parts."""
        part = columns // pieces
        starts = (part * (piece * self._tp_size + self._tp_rank) for piece in range(pieces))
        return torch.cat([self._table(each, part) for each in starts])

    def _table(self, start: int, columns: int) -> torch.Tensor:
        """Signs of the entries of a row from ``start`` on: shape (columns, SIGNS), float64."""
        index = torch.arange(start, start + columns, device=self._device)
        bits = mixed(index, _KEY)[:, None] >> torch.arange(SIGNS, device=self._device)
        return (1 - 2 * bits.bitwise_and(1)).to(torch.float64)


def _sums(rows: torch.Tensor, half: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Sums over rows: of all, of those in the half, of squares; and the entries in the half.

    Shape (3, columns), float64.
    """
    columns = rows.shape[-1]
    # Sums over a block are exact enough in float32, and take a sixth of the time of float64.
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(3, columns, dtype=torch.float64, device=rows.device)
    chosen = 0
    for begin in range(0, len(rows), max(1, _BLOCK // columns)):
        block = rows[begin : begin + max(1, _BLOCK // columns)].to(dtype)
        sums[0] += block.sum(0)
        sums[2] += block.square().sum(0)
        if half is not None:
            some = block.index_select(0, half[begin : begin + len(block)].nonzero().view(-1))
            sums[1] += some.sum(0)
            chosen += some.numel()
    return sums, chosen


def activation_samples(
    view: TrainerView, job: RankJob, folder: Path | None
) -> ActivationSampler | None:
    """What to record of the modules' first batches; None where nothing is.

    ``folder`` is None except on the writer.
    """
    if not view.shows_modules or 1 not in job.sample_steps:
        return None
    one = job.operations_of
    operations = OperationSampler(one, job.run_folder) if one else None
    return ActivationSampler(view, job.frozen, folder, operations)


def _outermost(part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model by canonical name, except the model itself.

    Of a module and its wrappers only the outermost; nothing inside of a compiled one.
    """
    names: set[str] = set()
    whole: list[str] = []
    for full, module in part.named_modules():
        name = canonical(full)
        if any(full.startswith(prefix) for prefix in whole):
            continue
        scripted = isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        if scripted or is_compiled(module):
            whole.append(f"{full}." if full else "")
        if scripted:
            continue
        if name and name not in names:
            names.add(name)
            yield name, module


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module run compiled code, in which nobody can look at other modules."""
    compiled_call = getattr(module, "_compiled_call_impl", None)
    return compiled_call is not None or isinstance(module, torch._dynamo.OptimizedModule)


def _argument_names(args: Any, kwargs: Any, leaves: Sequence[object]) -> list[str]:
    """A name for each leaf of the arguments: its position, or its keyword."""
    names = [str(place) for place in range(len(tree_flatten(args)[0]))]
    for keyword, value in kwargs.items():
        inner = len(tree_flatten(value)[0])
        names += [keyword if inner == 1 else f"{keyword}.{place}" for place in range(inner)]
    return names if len(names) == len(leaves) else [str(place) for place in range(len(leaves))]
