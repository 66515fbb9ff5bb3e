"""What cannot run together although ``harness/rules`` has no rule for it, each with its source.

A rule speaks of a job beside its control; a fact of what a trainer's release refuses, or silently
makes another run of. Facts are asked only when sets are proposed: a set that somebody writes by
hand is checked by the trainer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from harness.model import SetSpec, Technique

TITAN_02, TITAN_03 = "titan_0_2", "titan_0_3"
SPLIT_BACKWARD = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"})
"""Schedules that split the backward pass."""


class Fact(NamedTuple):
    says: str
    source: str
    """File and function of the release that it was read in."""
    holds: Callable[[SetSpec, str], bool]
    """Whether a set, in a dialect, is kept from running by it."""


def _shards_over_cp(spec: SetSpec, _dialect: str) -> bool:
    return _is_ddp(spec) and spec.parallelism.cp > 1


def _ddp_beside_others(spec: SetSpec, dialect: str) -> bool:
    degrees = spec.parallelism
    return dialect == TITAN_02 and _is_ddp(spec) and degrees.tp * degrees.pp > 1


def _compiled_split_backward(spec: SetSpec, dialect: str) -> bool:
    return (
        dialect == TITAN_02
        and spec.pipeline_schedule in SPLIT_BACKWARD
        and Technique.COMPILE in spec.techniques
    )


def _no_float8_tp(spec: SetSpec, dialect: str) -> bool:
    return dialect == TITAN_03 and Technique.FLOAT8_TP in spec.techniques


def _no_experts(spec: SetSpec, _dialect: str) -> bool:
    model = spec.train_config.module or spec.setting("model.name")
    return spec.parallelism.ep > 1 and model == "llama3"


def _is_ddp(spec: SetSpec) -> bool:
    return spec.parallelism.dp_replicate > 1 and spec.parallelism.dp_shard == 1


FACTS = (
    Fact(
        "context parallelism shards parameters over its ranks, so DDP with it is HSDP",
        "torchtitan distributed/parallel_dims.py, fsdp_enabled",
        _shards_over_cp,
    ),
    Fact(
        "torchtitan 0.2 takes DDP with no other parallelism",
        "torchtitan 0.2.2 models/llama3/infra/parallelize.py, parallelize_llama",
        _ddp_beside_others,
    ),
    Fact(
        "schedules that split the backward pass refuse stages made by torch.compile",
        "torch 2.13 distributed/pipelining/schedules.py, _check_torch_compile_compatibility; "
        "torchtitan 0.2.2 wraps every block",
        _compiled_split_backward,
    ),
    Fact(
        "torchtitan 0.3 has no Float8 TP styles: float8_tp needs a base config of 0.2",
        "harness/rank/titan_0_3/config.py, _techniques",
        _no_float8_tp,
    ),
    Fact(
        "Llama 3 has no experts that ep could spread",
        "torchtitan models/llama3",
        _no_experts,
    ),
)


def facts_against(spec: SetSpec, dialect: str) -> Iterator[Fact]:
    """Every fact that keeps a set from running as named."""
    return (fact for fact in FACTS if fact.holds(spec, dialect))
