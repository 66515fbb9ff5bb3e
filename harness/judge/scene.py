"""What the signatures of causes look at, and how they put numbers into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.judge.case import Case
from harness.judge.envelope import Envelope
from harness.judge.factors import named_factor
from harness.model import Check, Floats, Integers, Outcome

CONSTANT = 1e-2
"""A ratio is called constant when no step is further than this from its median."""
NOTABLE_FACTOR = 5e-2
"""A constant ratio nearer to one than this is rather an incomplete gradient than a scale."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The checks' answers and the curves behind them."""

    case: Case
    checks: Mapping[str, Check]

    def outcome(self, name: str) -> Outcome:
        return self.checks[name].outcome

    def detail(self, name: str) -> str:
        return self.checks[name].detail

    def curve(self, signal: str) -> Envelope | None:
        """The recomputed signal, which no wrong metric can disturb, else the reported one."""
        envelopes = self.case.envelopes
        return envelopes.get(f"{signal}_recomputed") or envelopes.get(signal)

    def ratio(self, envelope: Envelope) -> tuple[Floats, Integers]:
        """Test over control per step; NaN where the control is zero or either is not finite."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = envelope.test / envelope.control
        return np.where(np.isfinite(ratio), ratio, np.nan), envelope.steps

    def factor(self, envelope: Envelope) -> str:
        """What an envelope's ratio equals, in words, with a leading comma; empty if nothing."""
        ratio, steps = self.ratio(envelope)
        name = named_factor(ratio, steps, self.case.test, self.case.control)
        return f", which equals {name}" if name else ""


def off_at_first_step(envelope: Envelope) -> bool:
    return not bool(envelope.difference[0] <= envelope.limit[0])


def is_constant(ratio: Floats) -> bool:
    """A factor that stays the same over at least three steps and is no rounding."""
    if ratio.size < 3 or not np.all(np.isfinite(ratio)):  # noqa: PLR2004 (the docstring's three)
        return False
    middle = float(np.median(ratio))
    steady = bool(np.all(np.abs(ratio - middle) <= CONSTANT * abs(middle)))
    return steady and abs(middle - 1) > NOTABLE_FACTOR


def ratio_words(envelope: Envelope, index: int) -> str:
    control = envelope.control[index]
    return f"{envelope.test[index] / control:.4g}" if control else "infinitely many"


def words_of(envelope: Envelope) -> str:
    """A signal's name as people say it."""
    reported = envelope.signal.removesuffix("_recomputed").replace("_", " ")
    return f"recomputed {reported}" if envelope.signal.endswith("_recomputed") else reported
