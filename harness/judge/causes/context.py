"""What the signatures of causes look at, and how they describe numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converge_harness.judge.causes.factors import NamedFactor, named_factor
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.floors import coarser
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.judge.comparison import RunComparison
from converge_harness.judge.degrees import ran_at
from converge_harness.model import Check, Floats, InForce, Integers, Outcome, Precision

CONSTANT = 1e-2
"""A ratio is called constant when no step is further from its median than this."""
NOTABLE_FACTOR = 5e-2
"""A constant ratio nearer to one than this is more likely an incomplete gradient than a scale."""
STEADIER = 0.1
"""Share of its distance from one by which a reported number's ratio nearer to one may change. A
norm of gradients that lack a part is off by half of that part's share in the squares, and from
batch to batch such a share changes by more; a constant that is added to a loss, as the loss falls.
Above ``NOTABLE_FACTOR`` a ratio may change by ``CONSTANT``, a fifth of that distance or less."""
FEWEST_STEADY = 8
"""Steps that such a ratio needs: over fewer ones a share may change as little by chance."""
_LEAST_SHOWN = 5e-3
"""A ratio nearer to one than this is printed with more digits."""
ABRUPT = 8.0
"""A difference that increases by more than this in one step begins there, instead of growing."""


@dataclass(frozen=True, slots=True)
class Context:
    """The checks' outcomes, and the curves and tensors behind them."""

    compared: RunComparison
    checks: Mapping[str, Check]

    def outcome(self, name: str) -> Outcome:
        """SKIPPED where the verdict does not ask the check at all."""
        check = self.checks.get(name)
        return check.outcome if check is not None else Outcome.SKIPPED

    def failed(self, *names: str) -> bool:
        return any(self.outcome(name) is Outcome.FAIL for name in names)

    def detail(self, name: str) -> str:
        return self.checks[name].detail

    def first_failure(self, *besides: str) -> int | None:
        """The first step at which any check failed but those named; None when no check did."""
        onsets = [
            check.onset
            for check in self.checks.values()
            if check.outcome is Outcome.FAIL and check.name not in besides
        ]
        return min((onset for onset in onsets if onset is not None), default=None)

    def curve(self, signal: str) -> Envelope | None:
        """The recomputed signal, which a wrong metric does not affect; else the reported one."""
        envelopes = self.compared.envelopes
        return envelopes.get(f"{signal}_recomputed") or envelopes.get(signal)

    def agrees(self, signal: str, step: int) -> bool | None:
        """Whether a curve is inside its limit at a step; None when it was not compared there."""
        envelope = self.curve(signal)
        index = envelope.index_of(step) if envelope is not None else 0
        if envelope is None or index >= envelope.steps.size or envelope.steps[index] != step:
            return None
        return bool(envelope.difference[index] <= envelope.limit[index])

    def off(self) -> list[Envelope]:
        """Curves outside their limits, the first to leave first."""
        off = [each for each in self.compared.envelopes.values() if each.onset is not None]
        return sorted(off, key=lambda each: each.onset or 0)

    def sample(self, step: int) -> TensorComparison | None:
        return next((each for each in self.compared.tensors if each.step == step), None)

    def ratio(self, envelope: Envelope) -> tuple[Floats, Integers]:
        """Test over control per step; NaN where the control is zero or either is not finite."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = envelope.test / envelope.control
        return np.where(np.isfinite(ratio), ratio, np.nan), envelope.steps

    def named(self, envelope: Envelope, since: int = 0) -> NamedFactor:
        """What an envelope's ratio equals, from entry number ``since`` on."""
        ratio, steps = self.ratio(envelope)
        return named_factor(ratio[since:], steps[since:], self.compared.test, self.compared.control)

    def factor(self, envelope: Envelope) -> str:
        """The same as a clause, with a leading comma; empty if it equals nothing."""
        text = self.named(envelope).text
        return f", which equals {text}" if text else ""

    @property
    def precision(self) -> Precision:
        """The coarser of the two."""
        return coarser(self.compared.test.precision, self.compared.control.precision)

    @property
    def in_force(self) -> InForce:
        """What was in force in the test set where it first failed; nothing when not known."""
        return ran_at(self.compared.test, self.first_failure() or 1)

    @property
    def degrees(self) -> Mapping[str, int | None]:
        return self.in_force.degrees

    def degree(self, name: str) -> int:
        """A parallelism degree of the test set where it first failed; 1 when it is not known."""
        return self.degrees.get(name) or 1


def off_at_first_step(envelope: Envelope) -> bool:
    return not bool(envelope.difference[0] <= envelope.limit[0])


def is_constant(ratio: Floats) -> bool:
    """A factor that stays the same over at least three steps and is not rounding."""
    if ratio.size < 3 or not np.all(np.isfinite(ratio)):  # noqa: PLR2004 (the docstring's three)
        return False
    middle = float(np.median(ratio))
    steady = bool(np.all(np.abs(ratio - middle) <= CONSTANT * abs(middle)))
    return steady and abs(middle - 1) > NOTABLE_FACTOR


def is_one_factor(ratio: Floats) -> bool:
    """The same of a number that a run reports: however near to one, if it hardly changes."""
    if is_constant(ratio):
        return True
    if ratio.size < FEWEST_STEADY or not np.all(np.isfinite(ratio)):
        return False
    middle = float(np.median(ratio))
    distance = abs(middle - 1)
    return distance > 0 and bool(np.all(np.abs(ratio - middle) <= STEADIER * distance))


def begins(envelope: Envelope, index: int) -> bool:
    """Whether the difference begins at a step, rather than grows to its limit there."""
    before = float(envelope.difference[:index].max(initial=0.0))
    quiet = max(before, float(envelope.limit[index]))
    return not bool(envelope.difference[index] <= ABRUPT * quiet)


def ratio_text(envelope: Envelope, index: int) -> str:
    control = float(envelope.control[index])
    return digits(float(envelope.test[index]) / control) if control else "infinitely many"


def digits(ratio: float) -> str:
    """A ratio in four digits, or in as many as show how far from one it is."""
    off = abs(ratio - 1)
    if not 0 < off < _LEAST_SHOWN:
        return f"{ratio:.4g}"
    return f"{ratio:.{1 - math.floor(math.log10(off))}f}".rstrip("0")


def signal_name(envelope: Envelope) -> str:
    """A signal's name in a sentence."""
    reported = envelope.signal.removesuffix("_recomputed").replace("_", " ")
    return f"recomputed {reported}" if envelope.signal.endswith("_recomputed") else reported


def loss_agrees(context: Context, step: int) -> str:
    """``while the loss agrees to 1e-08``, with a leading comma; empty when it was not compared."""
    loss = context.curve("loss")
    if loss is None or not context.agrees("loss", step):
        return ""
    difference = loss.difference[loss.index_of(step)]
    same = f"agrees to {difference:.1g}" if difference else "is the same"
    return f", while the loss {same}"
