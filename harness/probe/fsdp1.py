"""FSDP 1 (``FullyShardedDataParallel``): what a rank holds of each parameter.

FSDP 1 flattens and concatenates the parameters of a wrapped module, and gives every rank a run of
the result: of each parameter a rank has a run of entries, or nothing. With ``use_orig_params`` the
program's own parameters are views of that run, for which the optimizer keeps its states; otherwise
the optimizer has one flat parameter per wrapped module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter

from converge_harness.probe.wrapping import Held, Wrapped
from converge_harness.rank.recorder.fetched_shard import FetchedStates
from converge_harness.rank.recorder.flat_shard import FlatShard
from converge_harness.rank.recorder.names import canonical


def is_wrapped(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def wrapped_fsdp1(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Wrapped:
    """A partly or fully wrapped model; unshards nothing."""
    handles = [
        (name, module._handle)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]
    shards: list[tuple[str, FlatShard]] = []
    trainable: list[tuple[str, Held]] = []
    managed: set[int] = set()
    problems: list[str] = []
    for prefix, handle in handles:
        flat = handle.flat_param
        managed |= {id(each) for each in (*(flat._params or ()), *(flat._shared_params or ()))}
        for name, shard, trains, problem in _of_handle(prefix, handle, optimizers):
            shards.append((name, shard))
            trainable += [(name, shard)] if trains else []
            problems += [problem] if problem else []
    others = [
        (canonical(name), parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in managed and not isinstance(parameter, FlatParameter)
    ]
    trainable += [(name, parameter) for name, parameter in others if parameter.requires_grad]
    sharded = [handle.process_group.size() for _, handle in handles if handle.uses_sharded_strategy]
    return Wrapped(
        wrapping="FSDP1",
        modules=(model,),
        parameters=tuple(trainable),
        copies=(*shards, *others),
        optimizers=tuple(optimizers),
        kept_by=(FetchedStates(shard for _, shard in shards), *optimizers),
        degrees={"dp_shard": max(sharded, default=1)},
        movable=True,
        watch_clipping=lambda seen: _watch_clipping(model, seen),
        problems=tuple(problems),
    )


def _of_handle(
    prefix: str, handle: Any, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, FlatShard, bool, str]]:
    """For each part of a flat parameter: name, shard, whether it trains, why it cannot be read."""
    flat = handle.flat_param
    originals = flat._params or [None] * len(flat._fqns)
    in_order = flat._contiguities
    for number, info in enumerate(flat._shard_param_infos):
        if not info.in_shard:
            continue
        name = canonical(".".join(part for part in (prefix, flat._fqns[number]) if part))
        run = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
        original = originals[number]
        fetch = _of_flat(flat, run, optimizers)
        if handle._use_orig_params:
            fetch = _of_original(original, optimizers)
        shard = FlatShard(
            flat._shapes[number], info.intra_param_start_idx, info.intra_param_end_idx + 1, *fetch
        )
        trains = (original if handle._use_orig_params else flat).requires_grad
        problem = "" if in_order[number] else f"{name}: FSDP 1 flattens it in another order"
        yield name, shard, trains, problem


_Fetch = tuple[
    Callable[[], torch.Tensor],
    Callable[[], "torch.Tensor | None"],
    Callable[[], Mapping[str, Any]],
]
"""The value, the gradient and the optimizer's states of a shard."""


def _of_original(original: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer]) -> _Fetch:
    return (
        lambda: original,
        lambda: original.grad,
        lambda: _kept(optimizers, original),
    )


def _of_flat(flat: torch.Tensor, run: slice, optimizers: Sequence[torch.optim.Optimizer]) -> _Fetch:
    def states() -> Mapping[str, Any]:
        return {
            name: value[run] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in _kept(optimizers, flat).items()
        }

    return (
        lambda: flat.detach()[run],
        lambda: None if flat.grad is None else flat.grad[run],
        states,
    )


def _kept(
    optimizers: Sequence[torch.optim.Optimizer], parameter: torch.Tensor
) -> Mapping[str, Any]:
    found: list[Mapping[str, Any]] = [
        optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state
    ]
    return found[0] if found else {}


def _watch_clipping(model: torch.nn.Module, seen: Callable[[], None]) -> Callable[[], None]:
    """Watch FSDP 1's own clipping, a method of the wrapped modules."""
    watched = [each for each in model.modules() if isinstance(each, FullyShardedDataParallel)]

    def watch(module: FullyShardedDataParallel) -> None:
        clip = module.clip_grad_norm_

        def shown(*args: Any, **kwargs: Any) -> Any:
            seen()
            return clip(*args, **kwargs)

        module.clip_grad_norm_ = shown

    def undo() -> None:
        for module in watched:
            del module.clip_grad_norm_

    for module in watched:
        watch(module)
    return undo
