"""The audit of a program: of what it runs with, only what is visible from outside is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from converge_harness.model import (
    DATA_TYPES,
    GLOBAL_BATCH,
    LOCAL_BATCH,
    SEQ_LEN,
    InForce,
    Precision,
    SetSpec,
    Setting,
    ranks,
)


@dataclass(frozen=True, slots=True)
class ProgramAudit:
    """An audit (``Audit`` of the model) of a program that runs with the probe."""

    def not_in_force(self, spec: SetSpec, ran: InForce) -> Iterator[str]:
        """One clause per degree, size or switch that a program was called with and did not use.

        A value that could not be seen from outside the program (null) is not judged.
        """
        for dimension, degree in asdict(spec.parallelism).items():
            yield from _unlike(dimension, degree, ran.degrees.get(dimension))
        if ran.world_size not in (None, spec.parallelism.world_size):
            named = ranks(spec.parallelism.world_size)
            yield f"a world of {named} is named, {ran.world_size} were started"
        local, whole = spec.setting(LOCAL_BATCH), spec.setting(GLOBAL_BATCH, -1)
        dp = spec.parallelism.dp
        if isinstance(local, int) and isinstance(whole, int):
            whole = local * dp if whole == -1 else whole
            yield from _unlike("local_batch_size", local, ran.local_batch_size)
            yield from _unlike("global_batch_size", whole, ran.global_batch_size)
            accumulated, seen = whole // (local * dp), ran.gradient_accumulation_steps
            yield from _unlike("gradient_accumulation_steps", accumulated, seen)
        yield from _unlike(SEQ_LEN, spec.setting(SEQ_LEN), ran.seq_len)
        dtype, stored = spec.setting("training.dtype"), ran.param_dtype
        if stored is not None and not _is_of(dtype, stored.split("+")):
            named_as = (
                f"{dtype} is named" if dtype is not None else "is not named, which means float32"
            )
            yield (
                f"training.dtype {named_as}, {stored} is in force (it is that of parameters; "
                "training.mixed_precision_param is that of coarser arithmetic)"
            )

        for argument in ran.probing.switched_off:
            # One that all sets are given may be meant for some of them alone.
            if any(argument in _arguments(value) for value in spec.overrides.values()):
                yield f"{argument} is named, and the program switched it off (its log says why)"

    def not_named(self, spec: SetSpec, ran: InForce) -> Iterable[str]:
        return ()  # the techniques of programs are not known


def _arguments(value: Setting) -> Sequence[object]:
    """What a value of the train config hands to a program: a list, or a text that it may split."""
    return value if isinstance(value, list) else str(value).split()


def _is_of(named: object, seen: Sequence[str]) -> bool:
    """Whether parameters of these data types are of the named one, or some of a finer.

    Where none is named, of float32 or finer: a coarser type has wider limits, which nobody asked
    for. An unknown type counts as the coarsest.
    """
    order = list(Precision)
    coarsest = max((DATA_TYPES.get(each, order[-1]) for each in seen), key=order.index)
    if named is None:
        return coarsest is Precision.FP32
    return named in seen and DATA_TYPES.get(str(named)) is coarsest


def _unlike(what: str, named: object, seen: object) -> Iterator[str]:
    if named is not None and seen is not None and named != seen:
        yield f"{what} {named} is named, {seen} is in force"
