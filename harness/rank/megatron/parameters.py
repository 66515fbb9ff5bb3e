"""This rank's parameters: canonical names, and which entries of the whole tensors it holds.

Names and whole tensors do not depend on the layout. Layers are numbered through all pipeline
stages, from 0. A tied output layer of the last stage has the name of the embedding, of which it is
a copy.

Which entries a rank holds stands in attributes that Megatron-Core's layers set: of a parameter
with ``tensor_model_parallel``, dimension ``partition_dim`` is divided by the tensor-parallel ranks,
in ``partition_stride`` pieces (a gated ``linear_fc1`` has two: each rank has rows of both
matrices). All others are held whole, but one: an attention's ``softmax_offset`` has an entry for
each head of the rank and no attribute that says so (Megatron-LM issue 7452, finding 8).

A rank holds some of the experts, which Megatron-Core numbers from 0 on every rank, and which here
have their numbers in the whole model. Their weights are divided by a group of their own
(``expert_tensor_parallel_size``).

Two weights are several matrices in one: ``linear_qkv`` has for each query group its queries, keys
and values (``Attention.get_query_key_value_tensors``), a gated ``linear_fc1`` the gate before the
other matrix (``MLP.forward``). They have a row for each matrix, and are stored so.

With a ``WeightMapping`` all of these have the names of another trainer's model. Where one of the
two rotates neighbouring rows of queries and keys and the other those of two halves, rows have the
other's order, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer

from converge_harness.rank.recorder.block_shard import BlockShard
from converge_harness.rank.recorder.placement import Held, HeldRun, Piece, Runs, local_shard
from converge_harness.rank.recorder.rows import Fused
from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.run_folder.weight_mapping import WeightMapping

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_OF_HEADS = ".softmax_offset"
"""The end of the name of parameters with an entry for each head, divided without being marked."""
_OF_EXPERTS = ".mlp.experts."
"""In the names of parameters of experts, shared ones excepted."""
_LOCAL_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)local_experts\.(\d+)")


class CanonicalPart(torch.nn.Module):
    """The modules of a ``GPTModel`` by canonical names; never called itself."""

    def __init__(self, gpt: Any, mapping: WeightMapping | None = None) -> None:
        super().__init__()
        self.mapping = mapping
        is_rotary = gpt.position_embedding_type == "rope"
        self.rotated = int(gpt.config.kv_channels * gpt.rotary_percent) if is_rotary else 0
        """Rows of queries and keys that are rotated, of each head: the first ones."""
        self.first_expert = min(
            (layer.mlp.local_expert_indices[0] for layer in gpt.decoder.layers if _routes(layer)),
            default=0,
        )
        """The number in the whole model of this rank's first expert."""
        if gpt.pre_process:
            self.embedding = gpt.embedding
        layers = {str(layer.layer_number - 1): layer for layer in gpt.decoder.layers}
        self.layers = torch.nn.ModuleDict(layers)
        if gpt.decoder.final_layernorm is not None:
            self.final_layernorm = gpt.decoder.final_layernorm
        if gpt.post_process:
            self.output_layer = gpt.output_layer

    def named_modules(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """As always, with the numbers that experts have in the whole model.

        The names of parameters and buffers follow from these.
        """
        for name, module in super().named_modules(*arguments, **named):
            yield _LOCAL_EXPERT.sub(self._number_of_expert, name), module

    def _number_of_expert(self, local: re.Match[str]) -> str:
        return str(self.first_expert + int(local[1]))

    def parameters_by_name(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.named_parameters():
            tied = name == _OUTPUT and getattr(parameter, "shared_embedding", False)
            yield self.named(_EMBEDDING if tied else name), parameter

    def named(self, name: str) -> str:
        """The name of a parameter, or of a matrix in one: the other trainer's, if it has one."""
        return (self.mapping and self.mapping.parameter(name)) or name


def pieces_of(parts: Sequence[CanonicalPart]) -> tuple[Piece, ...]:
    """Every trainable parameter of this rank."""
    return tuple(
        Piece(name, parameter, _held(name, parameter))
        for part in parts
        for name, parameter in part.parameters_by_name()
        if parameter.requires_grad
    )


def _held(name: str, parameter: torch.nn.Parameter) -> Held:
    local = tuple(parameter.shape)
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if _OF_EXPERTS in name
        else parallel_state.get_tensor_model_parallel_group()
    )
    ranks = group.size()
    whole = list(local)
    runs: list[Runs] = [(range(size),) for size in local]
    marked = getattr(parameter, "tensor_model_parallel", False)
    if ranks > 1 and (marked or name.endswith(_OF_HEADS)):
        dim = parameter.partition_dim if marked else 0  # type: ignore[attr-defined]
        pieces = parameter.partition_stride if marked else 1  # type: ignore[attr-defined]
        whole[dim] *= ranks
        runs[dim] = _divided(whole[dim], pieces, ranks, group.rank())
    return Held(tuple(whole), tuple(runs))


def _divided(size: int, pieces: int, ranks: int, rank: int) -> Runs:
    """Coordinates of a rank along a dimension of which each of some pieces is divided by ranks."""
    piece = size // pieces
    part = piece // ranks
    starts = (number * piece + rank * part for number in range(pieces))
    return tuple(range(start, start + part) for start in starts)


def fused_of(parts: Sequence[CanonicalPart]) -> dict[str, Fused]:
    """The parameters of this rank that are several matrices, by canonical name."""
    found: dict[str, Fused] = {}
    for part in parts:
        for number, layer in part.layers.items():
            found |= _fused_attention(part, f"layers.{number}.self_attention", layer.self_attention)
            if layer.config.gated_linear_unit:
                for name, mlp in feed_forwards(number, layer):
                    found |= _fused_gate(part, name, mlp)
    return found


def feed_forwards(number: str, layer: Any) -> Iterator[tuple[str, Any]]:
    """The feed-forward modules of a layer by canonical name: one, or this rank's experts."""
    name, mlp = f"layers.{number}.mlp", layer.mlp
    if not _routes(layer):
        yield name, mlp
        return
    experts = zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True)
    yield from ((f"{name}.experts.{place}", expert) for place, expert in experts)
    if mlp.shared_experts is not None:
        yield f"{name}.shared_experts", mlp.shared_experts


def _routes(layer: Any) -> bool:
    """Whether a layer has experts."""
    return isinstance(layer.mlp, MoELayer)


def _fused_attention(part: CanonicalPart, prefix: str, attention: Any) -> dict[str, Fused]:
    config = attention.config
    queries = config.num_attention_heads // config.num_query_groups
    pattern = (0,) * queries + (1, 2)
    order = _rotary_order(part, config)
    return {
        f"{prefix}.linear_qkv.{kind}": Fused(
            tuple(part.named(f"{prefix}.linear_{each}.{kind}") for each in "qkv"),
            config.kv_channels,
            pattern,
            {0: order, 1: order} if order else {},
        )
        for kind in _kinds(attention.linear_qkv)
    }


def _rotary_order(part: CanonicalPart, config: Any) -> tuple[int, ...]:
    """Where the other trainer has each row of a head's queries or keys; empty: at the same place.

    Pair i of the rows that are rotated together is 2i and 2i + 1 where they are neighbours, else i
    and i + half (``_rotate_half`` of Megatron-Core's ``rope_utils``).
    """
    mapping = part.mapping
    if mapping is None or mapping.rotary_interleaved == config.rotary_interleaved:
        return ()
    pairs = part.rotated // 2
    halves_of_pairs = (*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2))
    pairs_of_halves = (each for pair in range(pairs) for each in (pair, pair + pairs))
    rotated = halves_of_pairs if mapping.rotary_interleaved else tuple(pairs_of_halves)
    return (*rotated, *range(len(rotated), config.kv_channels))


def _fused_gate(part: CanonicalPart, prefix: str, mlp: Any) -> dict[str, Fused]:
    return {
        f"{prefix}.linear_fc1.{kind}": Fused(
            tuple(part.named(f"{prefix}.linear_{each}.{kind}") for each in ("gate", "up")),
            mlp.config.ffn_hidden_size,
            (0, 1),
        )
        for kind in _kinds(mlp.linear_fc1)
    }


def _kinds(linear: torch.nn.Module) -> list[str]:
    """The names of a linear layer's parameters that have a row for each of its outputs.

    The fused layers of Transformer Engine also hold the norm before them: ``layer_norm_weight``.
    """
    return [name for name, _ in linear.named_parameters() if name in ("weight", "bias")]


def module_names(parts: Sequence[CanonicalPart]) -> dict[str, str]:
    """The modules of this rank that another trainer has, too: its name, by canonical name."""
    return {
        name: other
        for part in parts
        for name, _ in part.named_modules()
        if (other := part.mapping and part.mapping.module(name))
    }


def weights_of(pieces: Sequence[Piece]) -> list[tuple[str, BlockShard]]:
    """The values that the model computes with, before there is an optimizer."""
    return [(piece.name, _weight(piece)) for piece in pieces]


def _weight(piece: Piece, kind: type[BlockShard] = BlockShard) -> BlockShard:
    return kind(piece.held.whole, piece.held.runs, lambda: piece.parameter.data)


@dataclass(frozen=True, slots=True)
class Trained:
    """What of the parameters the recorder looks at."""

    shards: tuple[tuple[str, BlockShard], ...]
    """Entries whose reduced gradient and optimizer states are on this rank, in float32 if the
    optimizer keeps them so."""
    copies: tuple[tuple[str, BlockShard], ...]
    """What other ranks may have copies of."""


def optimizers_of(optimizer: Any) -> Sequence[Any]:
    """The optimizers that a ``ChainedOptimizer`` calls; with Megatron-FSDP there is only one."""
    found: Sequence[Any] = getattr(optimizer, "chained_optimizers", (optimizer,))
    return found


def trained_by(optimizer: Any, pieces: Sequence[Piece]) -> Trained:
    """What an optimizer of ``get_megatron_optimizer`` updates on this rank.

    Experts that are divided among ranks have an optimizer of their own. Without the distributed
    optimizer each updates every parameter that it has. With it each data-parallel rank has
    a run of the flattened parameter, which is up to three blocks. Gradients are read where DDP
    reduces them to, ``main_grad``, of which the reduce-scatter of the distributed optimizer leaves
    the rank's own run valid; once the optimizer has taken them, from where it clips them. With
    Megatron-FSDP the distributed optimizer has parameters of its own: these runs, as DTensors.

    Raises SettingError if no optimizer has a parameter that is to be trained. With the distributed
    optimizer of DDP that cannot be seen on one rank, because a parameter's runs may be on others.

    A rank's own runs have copies on tensor-parallel ranks and in other instances of the distributed
    optimizer, with gradients and states. The gathered weights have them everywhere, but with
    ``ddp.overlap_param_gather``: then other ranks' runs are the old ones between two steps.
    """
    found: list[tuple[str, BlockShard]] = []
    gathered = False
    for each in optimizers_of(optimizer):
        if isinstance(each, DistributedOptimizer):
            gathered = not each.ddp_config.overlap_param_gather
            sharded = each.ddp_config.use_megatron_fsdp
            found += (_fsdp_runs if sharded else _own_runs)(each, pieces)
        else:
            its = {id(main) for group in each.param_groups for main in group["params"]}
            found += [
                (piece.name, _updated(each, piece))
                for piece in pieces
                if id(_main_of(piece.parameter)) in its
            ]
    if not any(isinstance(each, DistributedOptimizer) for each in optimizers_of(optimizer)):
        _refuse_untrained(pieces, frozenset(name for name, _ in found))
    weights = [(piece.name, _weight(piece, _Gathered)) for piece in pieces] if gathered else []
    return Trained(tuple(found), (*found, *weights))


class _Gathered(BlockShard):
    """Weights of a model, beside the runs of them that the distributed optimizer updates."""

    @property
    def place(self) -> tuple[tuple[str, int], ...]:
        """Never that of a run, which may be of all entries, and has other copies."""
        return (*super().place, ("gathered", 0))


def _refuse_untrained(pieces: Sequence[Piece], trained: frozenset[str]) -> None:
    missing = sorted({piece.name for piece in pieces} - trained)
    if missing:
        message = (
            f"no optimizer has {', '.join(missing)}, so converge would not see what becomes of "
            "them: give them to the optimizer, or set their requires_grad to False"
        )
        raise SettingError(KeyProblem("optimizer", message))


def _updated(optimizer: Any, piece: Piece) -> BlockShard:
    parameter: Any = piece.parameter
    main = _main_of(parameter)
    return BlockShard(
        piece.held.whole,
        piece.held.runs,
        lambda: main.data,
        lambda: parameter.main_grad if main.grad is None else main.grad,
        lambda: optimizer.optimizer.state.get(main, {}),
    )


def _main_of(parameter: Any) -> Any:
    """What an optimizer without shards updates: in bf16 a copy in float32."""
    return getattr(parameter, "main_param", parameter)


def _own_runs(
    optimizer: DistributedOptimizer, pieces: Sequence[Piece]
) -> list[tuple[str, BlockShard]]:
    known: Mapping[Any, Piece] = {piece.parameter: piece for piece in pieces}
    groups = (
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
        *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
    )
    found: list[tuple[str, BlockShard]] = []
    for parameters, mains in groups:
        for parameter, main in zip(parameters, mains, strict=True):
            run = optimizer._get_model_param_range_map(parameter)["param"]
            blocks = _blocks(
                known[parameter],
                slice(run.start, run.end),
                partial(_value_of, main),
                partial(_taken_or_reduced, main, parameter, slice(run.start, run.end)),
                partial(_states_of, optimizer, main),
            )
            found += [(known[parameter].name, block) for block in blocks]
    return found


def _value_of(main: torch.Tensor) -> torch.Tensor:
    return main.data


def _taken_or_reduced(main: torch.Tensor, parameter: Any, run: slice) -> torch.Tensor:
    taken = main.grad
    reduced: torch.Tensor = parameter.main_grad.view(-1)[run]
    return reduced if taken is None else taken


def _states_of(optimizer: Any, main: torch.Tensor) -> Mapping[str, Any]:
    found: Mapping[str, Any] = optimizer.optimizer.state.get(main, {})
    return found


def _fsdp_runs(
    optimizer: DistributedOptimizer, pieces: Sequence[Piece]
) -> list[tuple[str, BlockShard]]:
    """What Megatron-FSDP's ``optimizer_named_parameters`` hold.

    Placements of these DTensors do not say which rows a rank has: they are divided where a bucket's
    shards end, and Megatron-FSDP keeps the run beside each.
    """
    known = {id(piece.parameter): piece for piece in pieces}
    mains = [main for group in optimizer.param_groups for main in group["params"]]
    _refuse_untrained(pieces, frozenset(known[id(main.orig_param)].name for main in mains))
    found: list[tuple[str, BlockShard]] = []
    for main in mains:
        piece = known[id(main.orig_param)]
        blocks = _blocks(
            piece,
            main.megatron_fsdp_slice,
            partial(local_shard, main),
            partial(_local_gradient, main),
            partial(_local_states, optimizer, main),
        )
        found += [(piece.name, block) for block in blocks]
    return found


def _local_gradient(main: torch.Tensor) -> torch.Tensor | None:
    return None if main.grad is None else local_shard(main.grad)


def _local_states(optimizer: Any, main: torch.Tensor) -> Mapping[str, Any]:
    return {
        name: local_shard(value) if isinstance(value, torch.Tensor) else value
        for name, value in _states_of(optimizer, main).items()
    }


def _blocks(
    piece: Piece,
    run: slice,
    value: Callable[[], torch.Tensor],
    gradient: Callable[[], torch.Tensor | None],
    states: Callable[[], Mapping[str, Any]],
) -> Iterator[BlockShard]:
    """A run of a flattened parameter's entries, as blocks of the whole tensor."""
    start, stop = run.start, run.stop
    rows, columns = _as_matrix(tuple(piece.parameter.shape))
    for part, block in HeldRun((rows, columns), start, stop).matrices(rows, columns):
        runs = [
            _chosen(held, chosen[0])
            for held, chosen in zip(piece.held.runs, block.runs, strict=False)
        ]
        yield BlockShard(
            piece.held.whole,
            runs,
            _cut(value, part),
            _cut_gradient(gradient, part),
            _states(states, stop - start, part),
        )


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A parameter's shape as rows and columns; Megatron's dense layers have no others."""
    rows, *others = shape
    return rows, (others[0] if others else 1)


def _chosen(held: Runs, chosen: range) -> Runs:
    """The coordinates at some positions of those that are held, along one dimension."""
    found, first = [], 0
    for run in held:
        part = run[max(0, chosen.start - first) : max(0, chosen.stop - first)]
        if len(part):
            found.append(part)
        first += len(run)
    return tuple(found)


def _cut(fetch: Callable[[], torch.Tensor], part: slice) -> Callable[[], torch.Tensor]:
    return lambda: fetch().view(-1)[part]


def _cut_gradient(
    fetch: Callable[[], torch.Tensor | None], part: slice
) -> Callable[[], torch.Tensor | None]:
    def cut() -> torch.Tensor | None:
        found = fetch()
        return None if found is None else found.view(-1)[part]

    return cut


def _states(
    fetch: Callable[[], Mapping[str, Any]], entries: int, part: slice
) -> Callable[[], Mapping[str, Any]]:
    def cut() -> Mapping[str, Any]:
        return {
            name: value.view(-1)[part] if _is_of_entries(value, entries) else value
            for name, value in fetch().items()
        }

    return cut


def _is_of_entries(value: Any, entries: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == entries
