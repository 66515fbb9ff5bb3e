"""At which steps a job leaves per-tensor evidence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile

from harness.model import CADENCE_OFF, POWERS_OF_TWO, Cadence


def sample_steps(cadence: Cadence, steps: int) -> tuple[int, ...]:
    """The sampled steps of a job of ``steps`` steps, in order; 0 is before training.

    Steps 1 and 2 tell a wrong gradient from what rounding makes of a right one; later samples say
    where a difference goes, so they may become rare.

    Raises:
        ValueError: the cadence is a word that is none.
    """
    if isinstance(cadence, tuple):
        # Without the initial weights there is no first update to compare.
        return tuple(step for step in sorted({0, *cadence}) if step <= steps)
    if cadence == CADENCE_OFF:
        return ()
    if cadence == POWERS_OF_TWO:
        rare: Iterator[int] = (2**power for power in count())
    elif isinstance(cadence, int):
        rare = count(cadence, cadence)
    else:
        raise ValueError(f"{cadence!r} is no cadence")
    later = takewhile(lambda step: step <= steps, rare)
    first = (step for step in (0, 1, 2) if step <= steps)
    return tuple(sorted({*first, *later}))
