"""Every operation in the first call of one module, with signed sums of its inputs and results.

``converge run --explain`` runs a failed set and its control again for this, to see which operation
of the first wrong module is to blame (``converge_harness.judge.operations``). A dispatch mode sees
operations as the module calls them, on DTensors too. Compiled code stays one whole that it does
not see. Sums are over what this rank holds, with signs by row and by column, so that exchanged
entries show as well: two ranks compare only if they hold tensors of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.bits import mixed
from converge_harness.rank.recorder.placement import local_tensor
from converge_harness.run_folder.operations import (
    GIVEN,
    MODEL,
    UNSEEN,
    ModuleCallDocument,
    OperationDocument,
    TensorDocument,
    write_operations,
)

MOST = 2000
"""Operations that are recorded: of a module, not of a large model."""
SUMS = 32
"""Signed sums of a tensor."""
_ROWS, _COLUMNS = 0xA11, 0xB22
_BLOCK = 1 << 22
"""Entries that are summed at a time: 32 MiB of working memory."""
_LONGEST = 60
"""Characters of a setting."""


class OperationSampler:
    """A rank's part of the operations of one module."""

    def __init__(self, module: str, folder: Path) -> None:
        """``module`` is a canonical name, or MODEL; ``folder`` is the run folder."""
        self._module = module
        self._folder = folder
        self._mode: _Seeing | None = None
        self._undo: list[Callable[[], None]] = []
        self._problem = ""
        self._found = False
        self._over = False

    def watch(
        self,
        parts: tuple[torch.nn.Module, ...],
        named: Callable[[torch.nn.Module], Iterator[tuple[str, torch.nn.Module]]],
        is_compiled: Callable[[torch.nn.Module], bool],
        is_idle: Callable[[], bool],
    ) -> None:
        """Look at the module's next call.

        ``named`` yields a part's modules by canonical name. ``is_idle`` says that a call is not one
        of training.
        """
        for part in parts:
            inside = dict(named(part))
            target = part if self._module == MODEL else inside.get(self._module)
            if target is None:
                continue
            self._found = True
            if is_compiled(target):
                self._problem = "it is compiled"
                return
            self._mode = _Seeing()
            prefix = "" if self._module == MODEL else f"{self._module}."
            for name, module in inside.items():
                if name.startswith(prefix) and not is_compiled(module):
                    self._follow(name, module)
            # The last of its hooks: all others count as the module's own.
            before = target.register_forward_pre_hook(
                lambda _, args, kwargs: self._begin(is_idle, (args, kwargs)), with_kwargs=True
            )
            after = target.register_forward_hook(
                lambda _, __, given: self._end(given), always_call=True
            )
            self._undo += [before.remove, after.remove]

    def _follow(self, name: str, module: torch.nn.Module) -> None:
        """Note while this module inside of the one that is looked at runs."""

        def enter(*_: Any) -> None:
            if self._mode is not None:
                self._mode.inside.append(name)

        def leave(*_: Any) -> None:
            if self._mode is not None and name in self._mode.inside:
                del self._mode.inside[self._mode.inside.index(name) :]

        before = module.register_forward_pre_hook(enter)
        after = module.register_forward_hook(leave, always_call=True)
        self._undo += [before.remove, after.remove]

    def _begin(self, is_idle: Callable[[], bool], arguments: Any) -> None:
        if self._mode is not None and not self._over and not is_idle():
            self._mode.begin(arguments)
            self._mode.__enter__()

    def _end(self, given: Any) -> None:
        mode = self._mode
        if mode is not None and mode.seeing and not self._over:
            self._over = True
            mode.__exit__(None, None, None)
            mode.end(given)

    def finish(self) -> None:
        """Stop looking, and write what was seen. No collective happens here."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if not self._found:  # another pipeline stage has it
            return
        mode = self._mode if self._mode is not None and self._over else None
        seen = mode or _Seeing()  # a new one has seen nothing
        document = ModuleCallDocument(
            module=self._module,
            problem="" if mode else self._problem or "it was not called",
            operations=seen.operations,
            left_out=seen.left_out,
            inputs=seen.inputs,
            outputs=seen.outputs,
        )
        write_operations(self._folder, world.rank(), document)


class _Seeing(TorchDispatchMode):
    """Records operations while it is entered."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seeing = False
        self.inside: list[str] = []
        """Names of the modules that run now, the outermost first."""
        self.operations: list[OperationDocument] = []
        self.left_out = 0
        self.inputs: list[TensorDocument] = []
        self.outputs: list[TensorDocument] = []
        self._makers: dict[int, tuple[torch.Tensor, int]] = {}
        """By ``id``, tensors and what made them; kept, so that no other gets their ``id``."""
        self._known: dict[int, tuple[int, TensorDocument]] = {}
        """By ``id``: the version of a tensor in ``_makers``, and its sums."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def begin(self, arguments: Any) -> None:
        self.seeing = True
        self.inputs = self._tensors(arguments, made_by=GIVEN)

    def end(self, given: Any) -> None:
        self.outputs = self._tensors(given)
        self._makers.clear()
        self._known.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # autograd saves results by it, or by hooks
            (kept,) = args
            result = func(*args, **kwargs)
            self._tensors(result, made_by=self._maker(kept))
            return result
        if len(self.operations) >= MOST:
            self.left_out += 1
            return func(*args, **kwargs)
        inputs = self._tensors((args, kwargs))
        settings = [
            *(_text(each) for each in tree_flatten(args)[0] if _is_setting(each)),
            *(f"{key}={_text(each)}" for key, each in kwargs.items() if _is_setting(each)),
        ]
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is None or schema.is_mutable:
            self._known.clear()  # versions are counted on only after this
        number = len(self.operations)
        self.operations.append(
            {
                "name": str(func),
                "module": self.inside[-1] if self.inside else "",
                "settings": settings,
                "inputs": inputs,
                "outputs": self._tensors(result, made_by=number),
            }
        )
        return result

    def _tensors(self, values: Any, made_by: int | None = None) -> list[TensorDocument]:
        """Of all tensors among values; ``made_by`` says what made them, if that is known now."""
        with torch.no_grad(), _disable_current_modes():
            return [
                self._tensor(leaf, made_by)
                for leaf in tree_flatten(values)[0]
                if isinstance(leaf, torch.Tensor)
            ]

    def _tensor(self, tensor: torch.Tensor, made_by: int | None) -> TensorDocument:
        self._makers[id(tensor)] = (tensor, self._maker(tensor) if made_by is None else made_by)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is None or known[0] != version or version < 0:
            known = (version, summed(tensor))
            self._known[id(tensor)] = known
        return {**known[1], "made_by": self._makers[id(tensor)][1]}

    def _maker(self, tensor: torch.Tensor) -> int:
        _, made_by = self._makers.get(id(tensor), (tensor, UNSEEN))
        return made_by


def summed(tensor: torch.Tensor) -> TensorDocument:
    """Kind, norm and signed sums of what this rank holds of a tensor."""
    local = local_tensor(tensor)
    kind = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
    try:
        norm, sums, not_finite = _sums(local.detach())
    except Exception:  # noqa: BLE001 (a kind of tensor that does not add up; training goes on)
        return {"kind": kind, "norm": 0.0, "sums": [], "not_finite": 0}
    return {"kind": kind, "norm": norm, "sums": sums, "not_finite": not_finite}


def _sums(local: torch.Tensor) -> tuple[float, list[float], int]:
    if local.is_complex():
        local = torch.view_as_real(local)
    columns = local.shape[-1] if local.dim() else 1
    rows = local.reshape(-1, columns) if local.numel() else local.new_zeros((1, 1))
    across = _signs(rows.shape[1], _COLUMNS, local.device)
    total = torch.zeros(SUMS, dtype=torch.float64, device=local.device)
    squares = torch.zeros((), dtype=torch.float64, device=local.device)
    not_finite = torch.zeros((), dtype=torch.int64, device=local.device)
    down = _signs(rows.shape[0], _ROWS, local.device)
    height = max(1, _BLOCK // rows.shape[1])
    for begin in range(0, rows.shape[0], height):
        block = rows[begin : begin + height].to(torch.float64)
        finite = block.isfinite()
        not_finite += (~finite).sum()
        block = torch.where(finite, block, 0.0)
        squares += block.square().sum()
        total += ((block @ across) * down[begin : begin + height]).sum(0)
    return float(squares.sqrt()), total.tolist(), int(not_finite)


def _signs(count: int, key: int, device: torch.device) -> torch.Tensor:
    """Shape (count, SUMS), float64."""
    bits = mixed(torch.arange(count, device=device), key)[:, None]
    return (1 - 2 * (bits >> torch.arange(SUMS, device=device)).bitwise_and(1)).to(torch.float64)


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _text(value: Any) -> str:
    return str(value)[:_LONGEST]
