"""What a rank holds of a model that a DeepSpeed engine trains, by ZeRO 0 to 3.

DeepSpeed cuts a flattened parameter into runs of entries. Stages 1 and 2 concatenate all parameters
of a group and cut that into equal pieces, so a parameter may be in one or several ranks' pieces;
stage 3 cuts each parameter by itself and pads the last piece. Nothing here gathers a whole tensor:
stage 3 is read with DeepSpeed's functions for one rank's piece
(``deepspeed.utils.safe_get_local_fp32_param``, ``…_grad``, ``…_optimizer_state``); stages 1 and 2,
whose public functions gather, from the fragment that DeepSpeed attaches to each parameter
(``_hp_mapping``) and that those functions use.

Gradients are read when the engine starts its update: reduced, averaged over data-parallel ranks and
accumulated microbatches, unscaled, and not yet clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from converge_harness.probe.wrapping import Undo, Wrapped
from converge_harness.rank.recorder.fetched_shard import FetchedStates
from converge_harness.rank.recorder.flat_shard import FlatShard
from converge_harness.rank.recorder.names import canonical

FRAGMENTED = frozenset({"DeepSpeedZeroOptimizer", "BF16_Optimizer"})
"""Optimizers of stages 1 and 2, in which a parameter's piece is its ``_hp_mapping``."""
PARTITIONED = "DeepSpeedZeroOptimizer_Stage3"
UPDATE = "_take_model_step"
"""The engine's method that runs at the last microbatch of a step, once gradients are complete. Its
public ``step`` runs at every microbatch and may reduce first, and its optimizer runs after
clipping."""

REDUCED = "_epilogue_ran_this_backward"
"""Whether stage 3 has reduced gradients since the last update. Its buffers still have the unclipped
ones afterwards, which must not be mistaken for clipped ones."""


def wrapped_engine(engine: Any) -> Wrapped:
    """A ``deepspeed.DeepSpeedEngine`` as the probe needs it."""
    from deepspeed import __version__  # an engine exists, so it is imported

    stage = int(engine.zero_optimization_stage())
    parameters = [(canonical(name), value) for name, value in engine.module.named_parameters()]
    problems = _problems(engine, stage)
    held, copies = _Pieces(engine.optimizer).of(parameters, stage) if not problems else ((), ())
    unsharded = stage == 0
    return Wrapped(
        wrapping=f"ZeRO-{stage}",
        modules=(engine.module,),
        parameters=held,
        copies=copies,
        optimizers=(engine.optimizer,),
        kept_by=(engine.optimizer,)
        if unsharded
        else (FetchedStates(shard for _, shard in (*held, *copies)),),
        degrees={"dp_replicate" if unsharded else "dp_shard": int(engine.dp_world_size)},
        movable=unsharded and not problems,
        watch_clipping=lambda complete: _before_update(engine, complete),
        versions={"deepspeed": str(__version__)},
        problems=problems,
    )


def _problems(engine: Any, stage: int) -> tuple[str, ...]:
    """Sentences on why the entries that this rank holds cannot be determined."""
    kind = type(engine.optimizer).__name__
    known = {
        0: isinstance(engine.optimizer, torch.optim.Optimizer),
        3: kind == PARTITIONED,
    }.get(stage, kind in FRAGMENTED)
    needed = {UPDATE: engine, **({REDUCED: engine.optimizer} if kind == PARTITIONED else {})}
    degrees = {
        "expert parallelism": 2 if engine.has_moe_layers else 1,
        "pipeline parallelism": 2 if engine.pipeline_parallelism else 1,
        "tensor parallelism": max(int(engine.mp_world_size), int(engine.autotp_size())),
        "sequence parallelism": int(engine.sequence_parallel_size),
    }
    return (
        *(
            ()
            if known
            else (f"DeepSpeed's {kind} at ZeRO stage {stage} is not supported by the probe.",)
        ),
        *(
            f"A DeepSpeed engine with {name} is not supported by the probe: it cannot determine "
            "which entries of the whole model a rank holds."
            for name, degree in degrees.items()
            if degree > 1
        ),
        *(
            f"This DeepSpeed's {type(place).__name__} has no {name}, which the probe needs "
            "to know when gradients are complete."
            for name, place in needed.items()
            if not hasattr(place, name)
        ),
    )


def _before_update(engine: Any, complete: Callable[[], None]) -> Undo:
    """Call ``complete`` at every update, before the engine clips."""
    update = getattr(engine, UPDATE)

    def watched(*args: Any, **kwargs: Any) -> Any:
        complete()
        return update(*args, **kwargs)

    setattr(engine, UPDATE, watched)
    return lambda: delattr(engine, UPDATE)


_Named = tuple[tuple[str, Any], ...]


class _Pieces:
    """This rank's pieces of parameters, read from the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def of(self, parameters: list[tuple[str, Any]], stage: int) -> tuple[_Named, _Named]:
        """``Wrapped.parameters`` and ``Wrapped.copies``."""
        trained = [(name, value) for name, value in parameters if value.requires_grad]
        if stage == 0:
            return tuple(trained), tuple(parameters)
        if stage < 3:  # noqa: PLR2004 - the stage that partitions parameters
            held = tuple(
                (name, self._fragment(value))
                for name, value in trained
                if value._hp_mapping is not None
            )
            return held, tuple((name, _whole(value)) for name, value in parameters)
        pieces = [(name, value, *_partition(value)) for name, value in parameters]
        pieces = [piece for piece in pieces if piece[2] < piece[3]]
        held = tuple(
            (name, self._piece(value, start, stop))
            for name, value, start, stop in pieces
            if value.requires_grad
        )
        frozen = tuple(
            (name, _frozen(value, start, stop))
            for name, value, start, stop in pieces
            if not value.requires_grad
        )
        return held, (*held, *frozen)

    def _fragment(self, parameter: Any) -> FlatShard:
        """A piece in stages 1 and 2, always read anew: loading a checkpoint replaces fragments.

        The optimizer's own parameter of a group is this rank's flat piece of all its parameters.
        """
        address = parameter._hp_mapping.lp_fragment_address

        def states() -> Mapping[str, Any]:
            mapping = parameter._hp_mapping
            (flat,) = self.optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
            start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            return {
                key: value[start : start + numel] if _is_like(value, flat) else value
                for key, value in self.optimizer.optimizer.state.get(flat, {}).items()
            }

        def value() -> torch.Tensor:
            return parameter._hp_mapping.get_hp_fragment()

        def gradient() -> torch.Tensor | None:
            mapping = parameter._hp_mapping
            try:
                found = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
            except ValueError:  # between an update and the next reduction there is none
                return None
            flat = found.detach().reshape(-1)
            if flat.numel() != address.numel:  # bfloat16's optimizer keeps whole gradients
                flat = flat[address.start : address.start + address.numel]
            return self._unscaled(flat)

        return FlatShard(
            parameter.shape,
            address.start,
            address.start + address.numel,
            value=value,
            gradient=gradient,
            states=states,
        )

    def _piece(self, parameter: Any, start: int, stop: int) -> FlatShard:
        """A piece in stage 3; pieces are padded at their end."""
        from deepspeed.utils import (  # an engine exists, so it is imported
            safe_get_local_fp32_param,
            safe_get_local_grad,
            safe_get_local_optimizer_state,
        )

        def states() -> Mapping[str, Any]:
            group, _, _ = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            flat = self.optimizer.fp32_partitioned_groups_flat[group]
            return {
                key: safe_get_local_optimizer_state(parameter, key)[: stop - start]
                if _is_like(value, flat)
                else value
                for key, value in self.optimizer.optimizer.state.get(flat, {}).items()
            }

        def gradient() -> torch.Tensor | None:
            if not getattr(self.optimizer, REDUCED):
                return None
            return self._unscaled(safe_get_local_grad(parameter)[: stop - start])

        return FlatShard(
            parameter.ds_shape,
            start,
            stop,
            value=lambda: safe_get_local_fp32_param(parameter)[: stop - start],
            gradient=gradient,
            states=states,
        )

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient without the loss scale of float16 training."""
        scale = float(getattr(self.optimizer, "loss_scale", None) or 1.0)
        return gradient if scale == 1.0 else gradient / scale


def _partition(parameter: Any) -> tuple[int, int]:
    """First entry of this rank's piece of a stage 3 parameter, and one after its last."""
    size = int(parameter.ds_tensor.ds_numel)
    numel = int(parameter.ds_numel)
    start = size * dist.get_rank(group=parameter.ds_process_group)
    return min(start, numel), min(start + size, numel)


def _whole(parameter: Any) -> FlatShard:
    """The copy that the forward pass uses, in stages 1 and 2."""
    return FlatShard(parameter.shape, 0, parameter.numel(), value=lambda: parameter.data)


def _frozen(parameter: Any, start: int, stop: int) -> FlatShard:
    """A piece of a frozen parameter in stage 3."""
    return FlatShard(
        parameter.ds_shape, start, stop, value=lambda: parameter.ds_tensor[: stop - start]
    )


def _is_like(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape
