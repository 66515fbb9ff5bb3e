"""How a control's numbers changed between two of its runs: a pure function of both.

A baseline that no longer matches does not prove a bug, and blessing it again does not disprove one.
It is the same bits, other rounding, or other training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from converge_harness.judge.calibration import growth_law
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.sketches import shared_samples
from converge_harness.judge.verdict import judge
from converge_harness.model import (
    JUDGED_SIGNALS,
    Calibration,
    Evidence,
    Judgement,
    Sameness,
    SetSpec,
)

_EXACT = (*JUDGED_SIGNALS, "lr", "tokens")


@dataclass(frozen=True, slots=True)
class SignalChange:
    """One signal of the later run against the earlier one."""

    signal: str
    first: int | None
    """The first step at which it differs at all; None: nowhere."""
    onset: int | None
    """The first step at which it differs by more than its limit."""
    step: int
    """Where its difference is largest relative to its limit."""
    difference: float
    """There, relative."""
    limit: float
    growth: str
    """How the difference grows: ``step^0.5``, ``doubles every 3 steps``; empty: no law fits."""


@dataclass(frozen=True, slots=True)
class RunChange:
    """What changed, and from which step on."""

    sameness: Sameness
    sentence: str
    onset: int | None = None
    """The first step that is off by more than rounding."""
    signals: tuple[SignalChange, ...] = field(default=())
    """Those that differ anywhere."""


def classify(
    after: Evidence,
    before: Evidence,
    calibration: Calibration | None,
    *,
    spec: SetSpec | None = None,
    before_spec: SetSpec | None = None,
) -> RunChange:
    """Compare a control with the run that it is to replace.

    ``calibration`` comes from repeats of the earlier run; without any, a change counts as
    rounding if it is within the fixed floors of the arithmetic. What cannot be compared, or remains
    open, is different: only a change that was shown to be harmless is called harmless.
    """
    same = [*_other_numbers(after, before)]
    if not same:
        return RunChange(Sameness.BITWISE, "every number that both runs recorded is the same")
    verdict, compared = judge(
        after, before, calibration, spec=spec, control_spec=before_spec, own_start=True
    )
    signals = tuple(_signal_changes(compared.learnt_envelopes)) if compared.envelopes else ()
    if verdict.judgement is Judgement.PASS:
        return RunChange(
            Sameness.ROUNDING,
            f"{_listed(same)} differ by no more than repeats of the control do"
            if calibration is not None and calibration.taught_by
            else f"{_listed(same)} differ by no more than the floors of the arithmetic",
            signals=signals,
        )
    how = verdict.cause or "the two runs cannot be compared"
    unsettled = verdict.judgement is not Judgement.FAIL
    sentence = (
        f"{verdict.judgement.value}, so not shown to be rounding: {how}" if unsettled else how
    )
    return RunChange(Sameness.DIFFERENT, sentence, verdict.onset_step, signals)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _other_numbers(after: Evidence, before: Evidence) -> Iterator[str]:
    """Names of the kinds of numbers that are not all the same."""
    if not np.array_equal(after.steps, before.steps):
        yield "steps"
    if after.batch_digests != before.batch_digests:
        yield "samples"
    for signal in _EXACT:
        ours, theirs = after.signals.get(signal), before.signals.get(signal)
        if (ours is None) != (theirs is None):
            yield signal
        elif ours is not None and theirs is not None:
            values = np.array_equal(ours.values, theirs.values, equal_nan=True)
            if not values or not np.array_equal(ours.present, theirs.present):
                yield signal
    shared = shared_samples(after, before)
    if len(shared) < max(len(after.samples), len(before.samples)):
        yield "sampled parameters"
        return
    for what in ("parameters", "gradients"):
        pairs = [(getattr(ours, what), getattr(theirs, what)) for ours, theirs in shared]
        if not all(
            ours is theirs is None
            or (
                ours is not None
                and theirs is not None
                and np.array_equal(ours.sketch, theirs.sketch, equal_nan=True)
                and np.array_equal(ours.norm, theirs.norm, equal_nan=True)
            )
            for ours, theirs in pairs
        ):
            yield f"sampled {what}"


def _signal_changes(envelopes: Iterable[Envelope]) -> Iterator[SignalChange]:
    for envelope in envelopes:
        differing = np.flatnonzero(envelope.test != envelope.control)
        if not differing.size:
            continue
        worst = envelope.worst
        yield SignalChange(
            signal=envelope.signal,
            first=int(envelope.steps[differing[0]]),
            onset=envelope.onset,
            step=int(envelope.steps[worst]),
            difference=float(envelope.difference[worst]),
            limit=float(envelope.limit[worst]),
            growth=_growth(envelope),
        )


def _growth(envelope: Envelope) -> str:
    """The law of the difference's running maximum: single steps cross zero."""
    with np.errstate(invalid="ignore"):
        highest = np.maximum.accumulate(envelope.difference)
    exponent, doubling = growth_law(envelope.steps, highest)
    if doubling is not None:
        return f"doubles every {doubling:.2g} steps"
    return f"step^{exponent:.2g}" if exponent else ""
