"""Values of an experiment file that have a small language of their own: repeats and cadences."""

from __future__ import annotations

import re

from pydantic_core import PydanticCustomError, PydanticKnownError

from harness.model import CADENCE_OFF, POWERS_OF_TWO, Cadence, Repeat, RepeatKind

SEEDED = re.compile(r"(?P<kind>[^.]*)\.(?P<seed>.*)", re.DOTALL)
KINDS = tuple(kind.value for kind in RepeatKind)
SEED = re.compile(r"[1-9][0-9]{0,5}")
CADENCES = (POWERS_OF_TWO, CADENCE_OFF)
MAX_STEP = 2**53


def repeat_of(written: object) -> Repeat:
    """``"ulp"`` or ``"ulp.2"`` (KIND.SEED, seed >= 1) as a ``Repeat``.

    Raises pydantic's errors, which become problems of the file.
    """
    if not isinstance(written, str):
        raise PydanticKnownError("string_type")
    seeded = SEEDED.fullmatch(written)
    kind, seed = (seeded["kind"], seeded["seed"]) if seeded else (written, "1")
    if kind not in KINDS:
        raise PydanticCustomError("choice", "is not known", {"valid": KINDS})
    if not SEED.fullmatch(seed):
        raise PydanticCustomError(
            "seed", "must end in a seed from 1 to 999999, as {example}", {"example": f"{kind}.2"}
        )
    return Repeat(RepeatKind(kind), int(seed))


def cadence_of(written: object) -> Cadence:
    """At which steps per-tensor evidence is taken, as the model has it.

    Raises pydantic's errors, which become problems of the file.
    """
    if isinstance(written, str):
        if written not in CADENCES:
            raise PydanticCustomError("choice", "is not known", {"valid": CADENCES})
        return written
    if isinstance(written, int) and not isinstance(written, bool):
        if written < 1:
            raise PydanticCustomError("cadence", 'must be 1 or more ("off" for none)')
        return written
    if isinstance(written, list) and written:
        return _listed(written)
    raise PydanticCustomError(
        "cadence",
        'must be "{words}", a number of steps or a list of steps',
        {"words": '", "'.join(CADENCES)},
    )


def _listed(written: list[object]) -> tuple[int, ...]:
    steps = [step for step in written if isinstance(step, int) and not isinstance(step, bool)]
    if len(steps) < len(written) or not all(0 <= step <= MAX_STEP for step in steps):
        raise PydanticCustomError("cadence", "must be steps, whole numbers from 0 up")
    if len(set(steps)) < len(steps):
        raise PydanticCustomError("repetition", "names something twice")
    return tuple(sorted(steps))
