"""The growth envelope: how far a signal may be from the control's, step by step.

Learnt from the control's A/A repeats, never narrower than the floating-point floor, and replaced
by a tolerance that the experiment file sets.

**Two curves alone** have no gradients, no audit, and no repeat that shows the noise. (A repeat that
is the same to the last bit does show it: there is none on this machine.) Correct runs on other
hardware, or with other kernels, diverge by rounding, and how much depends on the model, the data
and the length of the run: from 1e-7 to tens of percent at a step. So a difference between two
curves alone shows nothing by itself. Within the arithmetic's floor and the printed digits they are
the same; within a margin that somebody set they are equivalent; and a *gross* difference is not
rounding. Everything between is open, until repeats of the control, a tolerance or a margin show how
much correct runs differ here. One or two repeats that differ from it do not: limits learnt from so
few are so wide that nearly anything is inside.

A difference is gross if hardly any correct pair has it. Of 1,463 pairs of Megatron-LM's golden
curves (one test on other GPUs, or in another container, 2026) one was off by more than 90% in the
loss at a step (by 112%, a spike in a run of 3,000 points), and two by more than 10% in the mean of
the second half; torchtitan's published curves of CUDA and ROCm are off by up to 41% at a step, and
5% in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.curves import (
    CurvePair,
    common_steps,
    pair,
    relative_difference,
    rounding_share,
    second_half,
    signed_difference,
    unprinted,
)
from converge_harness.judge.compare.floors import (
    FIRST_STEPS,
    FLOORS,
    NORMS,
    ROUNDING,
    SPREAD_CEILING,
    WIDEST,
    WIDEST_NORM,
    coarser,
)
from converge_harness.judge.compare.limits import (
    FEWEST_REPEATS,
    SIGNAL_ALARMS,
    HasLimits,
    applicable,
    jumps,
    mean_multiple,
    multiples,
    widest_scale,
)
from converge_harness.judge.compare.tost import equivalence
from converge_harness.model import (
    Calibration,
    Evidence,
    Flags,
    Floats,
    Integers,
    Limit,
    Precision,
    SignalScale,
)
from converge_harness.wording import counted


class Lasting(NamedTuple):
    """The mean difference over the second half of a run; relative."""

    difference: float
    """Signed."""
    half_width: float
    """Of the interval around it; infinite for few steps."""
    limit: Limit
    of_repeats: float
    """The same of the control's repeats: root mean square."""
    repeats: int

    @property
    def is_outside(self) -> bool:
        """Whether the whole interval is above the limit."""
        return abs(self.difference) - self.half_width > self.limit.value


@dataclass(frozen=True, slots=True, eq=False)
class Envelope(HasLimits):
    """One signal of a test set against its control; every array has one entry per step."""

    signal: str
    steps: Integers
    test: Floats
    control: Floats
    difference: Floats
    """Relative difference to the control."""
    limit: Floats
    learnt: Flags
    """Where the limit comes from the repeats and not from the floor."""
    floor_origin: str
    learnt_origin: str = ""
    unmeasured: str = ""
    """A clause on why it is not known how much correct runs differ, where there are only curves:
    then a difference above the limit is open, unless it is gross. Else empty."""
    tolerated: bool = False
    """Whether the limit is a tolerance that somebody set."""
    by_margin: bool = False
    """Whether somebody set a margin of the mean loss, which then decides open differences."""
    lasting: Lasting | None = None
    """Of a norm whose repeats show how much its mean differs, where there are only curves."""
    unprinted: int = 0
    """Steps at which a log prints 0.0000 or the like, and the other value may be the same."""

    @property
    def open(self) -> bool:
        """Whether it is outside of its limit where only a gross difference would be wrong."""
        return bool(self.unmeasured) and not self.tolerated and bool(self.outside.size)

    @property
    def curves(self) -> CurvePair:
        return CurvePair(self.steps, self.test, self.control)

    @property
    def outside(self) -> Integers:
        """Steps at which the difference is above the limit (written so that NaN is outside)."""
        return self.steps[~(self.difference <= self.limit)]

    @property
    def judged(self) -> Flags:
        """Steps that have a limit: not those at which repeats of the control differ too much."""
        return np.isfinite(self.limit)

    @property
    def onset(self) -> int | None:
        """The first step outside; None when there is none."""
        outside = self.outside
        return int(outside[0]) if outside.size else None

    @property
    def worst(self) -> int:
        """Index of the step whose difference is largest relative to its limit."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            excess = self.difference / self.limit
        return int(np.argmax(np.nan_to_num(excess, nan=0.0, posinf=math.inf)))

    def index_of(self, step: int) -> int:
        return int(np.searchsorted(self.steps, step))


def compare_signal(
    signal: str,
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None = None,
    tolerances: Mapping[str, float] | None = None,
    margin: float | None = None,
) -> Envelope | None:
    """Compare one signal of a test set with the control's.

    Returns None when the two have no step in common at which both left a value. Tolerances map
    signals to the largest relative difference allowed; a recomputed signal without one of its own
    takes that of the reported signal. ``margin`` is that of the mean loss, if somebody set one.
    Raises ValueError for a tolerance that is negative or not finite: it would pass everything or
    nothing.
    """
    calibration = applicable(calibration, test, control)
    curves = pair(test, control, signal)
    if not curves.steps.size:
        return None
    not_printed = unprinted(test, control, signal, curves)
    difference = np.where(not_printed, 0.0, relative_difference(curves.test, curves.control))
    tolerance = tolerance_for(signal, tolerances or {})
    alone = curves_alone(test, control)
    unmeasured = unmeasured_noise(calibration) if alone else ""
    if tolerance is not None:
        nowhere = np.zeros(curves.steps.size, dtype=np.bool_)
        printed = _printed(test, control, signal, curves)
        origin = "set in the file" + (_ROUNDED if np.any(printed) else "")
        limit = tolerance + printed
        made = Envelope(signal, *curves, difference, limit, nowhere, floor_origin=origin)
    else:
        enough = None if unmeasured else calibration
        made = _learnt(signal, test, control, enough, curves, difference)
    judges_mean = alone and signal in NORMS and tolerance is None and not unmeasured
    return replace(
        made,
        lasting=_lasting(made, test, control, calibration) if judges_mean else None,
        unmeasured=unmeasured,
        tolerated=tolerance is not None,
        by_margin=margin is not None,
        unprinted=int(np.count_nonzero(not_printed)),
    )


def limits(
    test: Evidence, control: Evidence, envelopes: Iterable[Envelope]
) -> Mapping[str, Floats]:
    """Signal to its limit at every step that both runs have, in order, for drawing.

    NaN at a step where one of them left no value, or that is not judged; signals that cannot be
    compared are left out.
    """
    common = common_steps(test.steps, control.steps).steps
    drawn = {}
    for envelope in envelopes:
        limit = np.full(common.size, math.nan)
        judged = np.where(envelope.judged, envelope.limit, math.nan)
        limit[np.searchsorted(common, envelope.steps)] = judged
        drawn[envelope.signal] = limit
    return drawn


class LearntLimit(NamedTuple):
    """A limit learnt from repeats, beside the one that holds without repeats."""

    signal: str
    step: int
    limit: float
    floor: float
    scale: float
    """How far the repeats are from the control there: root mean square."""
    repeats: int
    """From how many it was learnt."""


def furthest_learnt(
    precision: Precision, calibration: Calibration | None, envelopes: Iterable[Envelope]
) -> LearntLimit | None:
    """Where a learnt limit is the largest multiple of the floor that holds without repeats.

    ``precision`` is the control's, ``calibration`` that of the envelopes. None where no limit in
    use was learnt.
    """
    if calibration is None:
        return None
    found = []
    for envelope in envelopes:
        decides = np.flatnonzero(envelope.learnt & envelope.judged)
        if decides.size:
            floor = FLOORS[precision][envelope.signal].at(envelope.steps)
            at = int(decides[np.argmax((envelope.limit / floor)[decides])])
            times = float(envelope.limit[at] / floor[at])
            here = int(envelope.steps[at]), float(envelope.limit[at]), float(floor[at])
            scale = _scale_at(calibration.signals[envelope.signal], envelope.steps[at : at + 1])
            spread = float(scale[0]), calibration.taught_by
            found.append((times, LearntLimit(envelope.signal, *here, *spread)))
    return max(found)[1] if found else None


def tolerance_for(signal: str, tolerances: Mapping[str, float]) -> float | None:
    """The file's tolerance for a signal, checked; see :func:`compare_signal`."""
    value = tolerances.get(signal, tolerances.get(signal.removesuffix("_recomputed")))
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"tolerance of {signal} is {value}: it must be finite and at least 0")
    return value


def _learnt(
    signal: str,
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None,
    curves: CurvePair,
    difference: Floats,
) -> Envelope:
    """Limits from floor, calibration and the rounding of the sources."""
    precision = coarser(test.precision, control.precision)
    by_repeats = calibration is not None and calibration.taught_by > 0
    known = calibration.signals.get(signal) if calibration and by_repeats else None
    same_regime = test.precision is control.precision
    table = ROUNDING if known is not None and same_regime else FLOORS
    # From the same weights a token near a tie hardly moves the loss itself.
    jump = jumps(curves.steps, test, control, calibration, first=1.0)
    limit = np.minimum(jump * table[precision][signal].at(curves.steps), WIDEST[signal])
    floor_origin = f"floor of {precision.value} arithmetic"
    learnt, learnt_origin = np.zeros(curves.steps.size, dtype=np.bool_), ""
    if calibration is not None and known is not None:
        scale = jump * _scale_at(known, curves.steps)
        spread = _multiples(curves.steps, calibration) * scale
        ceiling = np.full(spread.shape, WIDEST[signal])
        if signal in NORMS:
            # There one correct run in 100 is above the ceiling by chance.
            chaotic = scale > widest_scale(WIDEST[signal], calibration.taught_by)
            # A repeat out of line is no reason to PASS (repeats-sound is INVALID then), but also
            # none to FAIL a set that is no further off than it.
            widest = np.inf if calibration.problems else WIDEST_NORM
            ceiling[chaotic & (curves.steps > FIRST_STEPS)] = widest
        spread = np.minimum(spread, ceiling)
        learnt = spread > limit
        limit = np.maximum(limit, spread)
        if not calibration.problems:
            # Several repeats show that the control does not reproduce itself there: see calibrate.
            wide = known.steps[~(known.scale <= SPREAD_CEILING[signal])]
            limit = np.where(curves.steps >= wide[0], np.inf, limit) if wide.size else limit
        repeats = counted(calibration.taught_by, "repeat")
        times = f"{jump.max():.0f} x the " if np.any(jump > 1) else ""
        learnt_origin = (
            f"{times}spread of {repeats}, at 1 false alarm in {1 / SIGNAL_ALARMS:,.0f} runs"
        )
    printed = _printed(test, control, signal, curves)
    if np.any(printed):
        limit = limit + printed
        floor_origin += _ROUNDED
        learnt_origin += _ROUNDED if learnt_origin else ""
    return Envelope(signal, *curves, difference, limit, learnt, floor_origin, learnt_origin)


LASTING = 1e-3
"""A mean norm may differ by as much as a mean loss does without a margin that somebody set."""
LASTING_ALPHA = 1e-3
"""How often noise of single steps, larger than the repeats', is taken for a lasting difference."""


def _lasting(
    made: Envelope, test: Evidence, control: Evidence, calibration: Calibration | None
) -> Lasting | None:
    """How far the mean of a norm is off, where repeats that differ show how far it may be.

    Limits of single steps are a hundred times what a few repeats differ by, or more; one mean is
    one look. A learning rate that is 1% off shows in no step of a bf16 run, and in this.
    """
    known = calibration.signals.get(made.signal) if calibration else None
    half = second_half(made.curves)
    if calibration is None or known is None or known.lasting is None or not half.steps.size:
        return None
    if test.precision is not control.precision or half.steps[-1] > known.steps[-1]:
        return None  # how a mean grows after the last step of the repeats is not known
    not_printed = unprinted(test, control, made.signal, half)
    difference = np.where(not_printed, 0.0, signed_difference(half))
    learnt = mean_multiple(calibration.taught_by) * known.lasting
    limit, repeats = max(LASTING, learnt), calibration.taught_by
    if not np.isfinite((*difference, limit)).all() or not made.judged[-half.steps.size :].all():
        return None
    origin = f"means of {counted(repeats, 'repeat')}" if learnt > LASTING else "as for a mean loss"
    printed = float(np.mean(_printed(test, control, made.signal, half)))
    found = equivalence(difference, limit, LASTING_ALPHA, rounding=printed)
    return Lasting(found.mean, found.half_width, Limit(limit, origin), known.lasting, repeats)


_ROUNDED = ", and the rounding of the log"


def _printed(test: Evidence, control: Evidence, signal: str, curves: CurvePair) -> Floats:
    """What the rounding of both sources adds to a limit: nothing where a zero was printed."""
    share = rounding_share(test, control, signal, curves)
    return np.where(np.isfinite(share), share, 0.0)


def _multiples(steps: Integers, calibration: Calibration) -> Floats:
    looks = np.arange(1, steps.size + 1)
    return multiples(looks, SIGNAL_ALARMS, calibration.taught_by)


def _scale_at(known: SignalScale, steps: Integers) -> Floats:
    """The scale at each step; between calibrated steps the next one's, after the last its own.

    A run longer than the calibration is extrapolated by the law that fits it.
    """
    index = np.minimum(np.searchsorted(known.steps, steps), known.steps.size - 1)
    scale = known.scale[index]
    last = int(known.steps[-1])
    beyond = np.maximum(steps, last)
    if known.doubling_steps is not None:
        grown = 2.0 ** ((beyond - last) / known.doubling_steps)
    else:
        grown = (beyond / max(last, 1)) ** max(known.growth, 0.0)
    return np.asarray(scale * grown, dtype=np.float64)


class Gross(NamedTuple):
    """A difference above this is gross; relative to the smaller value."""

    step: float
    """At a single step."""
    lasting: float
    """Of the mean over the second half of the run."""


GROSS: Mapping[str, Gross] = {"loss": Gross(0.9, 0.1), "grad_norm": Gross(9.0, 0.5)}
"""The loss by 90%, so that a factor of 2 is gross however it is printed, or 10% in the mean; the
grad norm, which spikes and which noise moves more, by a factor of 10, or 50% in the mean."""
SMALL = 0.1
"""Share of a signal's first value. Below it differences are relative to that share: a loss near
zero, of memorised data, may differ by any factor."""


def unmeasured_noise(calibration: Calibration | None, control: str = "the control") -> str:
    """Why repeats do not show by how much correct curves differ, in a clause; empty if they do."""
    if calibration is None or not calibration.repeats:
        return f"no repeat of {control} shows how much correct runs differ"
    if 0 < calibration.taught_by < FEWEST_REPEATS:
        few = counted(calibration.taught_by, "repeat")
        differ = "differs" if calibration.taught_by == 1 else "differ"
        return f"{few} that {differ} from {control} cannot show how much correct runs differ"
    return ""


def curves_alone(test: Evidence, control: Evidence) -> bool:
    """Whether both runs left only their curves."""
    return all(
        evidence.in_force is None
        and not evidence.samples
        and "loss_recomputed" not in evidence.signals
        and "grad_norm_recomputed" not in evidence.signals
        for evidence in (test, control)
    )


def gross_steps(signal: str, curves: CurvePair) -> Integers:
    """The steps at which two curves are grossly different; shape (any number of steps,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(curves.test - curves.control) / _scale(curves)
    # Written so that NaN is gross.
    return curves.steps[~(off < GROSS[signal].step)]


def lasting_difference(curves: CurvePair) -> float:
    """How much the means over the second half differ, relative as at steps; 0 without steps."""
    half = second_half(curves)
    if not half.steps.size:
        return 0.0
    scale = _scale(curves)[curves.steps.size // 2 :]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(abs(np.mean((half.test - half.control) / scale)))


def _scale(curves: CurvePair) -> Floats:
    """What a difference is relative to, step by step; only 0 where both start from 0."""
    if not curves.steps.size:
        return np.empty(0)
    first = SMALL * max(abs(float(curves.test[0])), abs(float(curves.control[0])))
    smaller = np.minimum(np.abs(curves.test), np.abs(curves.control))
    return np.maximum(np.maximum(smaller, first), np.finfo(np.float64).tiny)
