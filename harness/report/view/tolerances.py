"""What a report says about a control's calibration; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from converge_harness.judge import (
    CurveDifference,
    LearntLimit,
    RunComparison,
    rounding_of_experts,
    tokens_off,
    unmeasured_noise,
)
from converge_harness.model import (
    JUDGED_SIGNALS,
    Calibration,
    Check,
    Evidence,
    Judgement,
    Outcome,
    Precision,
    SignalScale,
    Verdict,
)
from converge_harness.report.sanitize import plain
from converge_harness.report.text import ABSENT, digits
from converge_harness.wording import control_called, counted

WIDE = 1000
"""A learnt limit above this multiple of the floor of its arithmetic gets a sentence."""
UNSTABLE = 50
"""Where the repeats themselves differ by more than this multiple of the floor, that is why a limit
is wide; below, it is because they are few: of 16 and more repeats a limit is about 20 times what
they differ by, of 3 up to 1,000 times and more (docs/curves.md)."""

MANY = 8
"""Of so many repeats a limit is 46 times what they differ by: they are not too few."""


@dataclass(frozen=True, slots=True)
class RepeatDistance:
    """How much one repeat differs from its control."""

    name: str
    kind: str
    """``rerun``, ``ulp.2`` …; empty for foreign curves."""
    identical: bool | None
    """Whether every judged signal is bit-identical; None when its curves are not available."""
    loss: float | None
    """Largest relative difference; None when not known."""
    grad_norm: float | None

    def distance(self, value: float | None) -> str:
        """One of its differences as a text."""
        return "bit-identical" if self.identical else digits(value)


@dataclass(frozen=True, slots=True)
class SignalGrowth:
    """How much repeats differ from their control in one signal: relative differences."""

    signal: str
    steps: tuple[int, int]
    """First and last step."""
    scale: tuple[float, float]
    """At the first and at the last step."""
    growth: float
    """Exponent of the best power law."""
    doubling_steps: float | None
    """Steps in which the scale doubles; None where no exponential fits better."""

    @property
    def doubling(self) -> str:
        """How fast the repeats diverge, as a text."""
        return ABSENT if self.doubling_steps is None else f"{digits(self.doubling_steps)} steps"


@dataclass(frozen=True, slots=True)
class CalibrationView:
    """Where the tolerances of one control come from."""

    control: str
    precision: str
    """Empty when not known, as for a run that left nothing."""
    repeats: tuple[RepeatDistance, ...] = ()
    taught_by: int = 0
    identity: str = ""
    """Of the control's job; empty for foreign curves."""
    signals: tuple[SignalGrowth, ...] = ()
    sampled_steps: tuple[int, ...] = ()
    """Steps at which limits of every tensor were learnt from the repeats."""
    problems: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One sentence on the repeats that limits were learnt from."""
        if not self.repeats:
            return "No repeats were made: the limits are fixed floors."
        repeats = counted(len(self.repeats), "repeat")
        if not self.taught_by:
            which = "is" if len(self.repeats) == 1 else "are all"
            return f"{repeats}, which {which} bit-identical to the control: the limits are floors."
        others = len(self.repeats) - self.taught_by
        identical = sum(repeat.identical is True for repeat in self.repeats)
        known = "" if identical == others else " or unusable"
        rest = f"; {others} bit-identical to the control{known}" if others else ""
        return f"Learnt from {self.taught_by} of {repeats} in {self.precision}{rest}."


def calibration_view(
    name: str,
    calibration: Calibration,
    differences: Mapping[str, Mapping[str, CurveDifference]],
    kinds: Mapping[str, str],
) -> CalibrationView:
    """What the calibration of a control was learnt from.

    ``differences`` are by name of the repeat and signal, for repeats whose curves are available;
    ``kinds`` by name of the repeat.
    """
    return CalibrationView(
        control=plain(name),
        precision=calibration.precision.value,
        repeats=tuple(
            _distance(repeat, kinds.get(repeat, ""), differences.get(repeat, {}))
            for repeat in calibration.repeats
        ),
        taught_by=calibration.taught_by,
        identity=calibration.identity or "",
        signals=tuple(_growth(signal, scale) for signal, scale in calibration.signals.items()),
        sampled_steps=tuple(sorted(step for step in calibration.tensors if step > 0)),
        problems=tuple(plain(problem) for problem in calibration.problems),
    )


def notes(
    verdicts: Sequence[Verdict],
    evidences: Mapping[str, Evidence],
    calibration_of: Mapping[str, Calibration | None],
    comparisons: Mapping[str, RunComparison],
) -> tuple[str, ...]:
    """Sentences on limits that are fixed floors, so that only gross errors show, and on wrong logs.

    ``calibration_of`` and ``comparisons`` are by name of the test set.
    """
    coarse: dict[tuple[Precision, Precision], None] = {}
    measured = [
        check.detail
        for verdict in verdicts
        for check in verdict.checks
        if check.name == "reference-sound"
        and verdict.name in comparisons
        and _says_whether_measured(check, comparisons[verdict.name])
    ]
    unmeasured: dict[str, str] = {}
    wide: dict[str, tuple[float, str]] = {}
    alone: dict[tuple[str, str], None] = {}
    for verdict in verdicts:
        compared = comparisons.get(verdict.name)
        if compared is None:
            continue
        test, control = compared.test.precision, compared.control.precision
        if test is not control:
            coarse[test, control] = None
            continue
        calibration = calibration_of.get(verdict.name)
        if compared.curves_alone and (why := unmeasured_noise(calibration, plain(verdict.control))):
            alone[why, _decides(compared)] = None
        elif calibration is None or not calibration.repeats:
            unmeasured[verdict.control] = "no repeat shows how much correct runs differ"
        elif not calibration.taught_by:
            if not calibration.problems:  # a repeat that crashed is not bit-identical
                identical = "its repeats are bit-identical to it and show no noise"
                unmeasured[verdict.control] = identical
        else:
            learnt = compared.furthest_learnt
            if learnt is not None and learnt.limit > WIDE * learnt.floor:
                times = learnt.limit / learnt.floor
                experts = rounding_of_experts(compared.control, compared.calibration)
                sentence = _wide(verdict.control, learnt, experts=experts)
                wide[verdict.control] = max(wide.get(verdict.control, (0.0, "")), (times, sentence))
    sentences = [
        f"Limits of sets against the {control_called(plain(name))} are fixed floors, fitted on "
        f"CPU debug models: {reason}."
        for name, reason in unmeasured.items()
    ]
    sentences.extend(sentence for _, sentence in wide.values())
    sentences += [f"{why[0].upper()}{why[1:]}: {decides}." for why, decides in alone]
    if coarse:
        pairs = " and ".join(f"{ours.value} against {theirs.value}" for ours, theirs in coarse)
        sentences.append(
            f"Limits of {pairs} are coarse: no repeat shows how much two precisions differ, so "
            "they are at least fixed floors, fitted on CPU debug models, and only gross errors "
            "show after the first step."
        )
    sentences.extend(
        f"Errors of low precision at the initial weights are {plain(each)}."
        for each in dict.fromkeys(measured)
    )
    return (*sentences, *_unasked(verdicts, comparisons), *_miscounted(verdicts, evidences))


def _decides(compared: RunComparison) -> str:
    """What decides about curves without repeats, in a clause: what the user gave, and rounding."""
    given = [
        f"the tolerance of {limit:g} decides about the {signal.replace('_', ' ')} of every step"
        for signal, limit in compared.tolerances.items()
        if signal in compared.shared_signals
    ]
    if compared.margin is not None:
        given.append(f"the margin of {compared.margin:g} decides about the mean loss")
        return f"{', '.join(given)}, and otherwise only a gross difference fails"
    without = "otherwise" if given else "without a margin or a tolerance"
    rounding = f"{without} only rounding passes, and only a gross difference fails"
    return "; ".join((*given, rounding))


def _says_whether_measured(check: Check, compared: RunComparison) -> bool:
    """Whether the check of the reference is about errors of low precision: not if all is float32.

    They were measured, or there is no reference to measure them from.
    """
    measured = check.outcome is Outcome.PASS and compared.errors is not None
    return measured or (check.outcome is Outcome.SKIPPED and compared.measure is None)


def _unasked(
    verdicts: Sequence[Verdict], comparisons: Mapping[str, RunComparison]
) -> Iterator[str]:
    """How far single steps are off where a margin of the mean loss decided."""
    for verdict in verdicts:
        compared = comparisons.get(verdict.name)
        if compared is None or verdict.judgement is not Judgement.PASS:
            continue
        off = [
            f"the {signal.replace('_', ' ')} by up to {digits(float(envelope.difference.max()))}"
            for signal, envelope in compared.envelopes.items()
            if envelope.open and envelope.by_margin
        ]
        if off:
            yield (
                f"Single steps of {plain(verdict.name)} are off, {' and '.join(off)}, by more than "
                "rounding: the margin is about the mean loss alone; --repeat or --tolerance would "
                "judge them."
            )


def _wide(control: str, learnt: LearntLimit, *, experts: bool) -> str:
    times = f"{learnt.limit / learnt.floor:,.0f} times the floor of its arithmetic"
    signal = learnt.signal.replace("_", " ")
    called = control_called(plain(control))
    if learnt.repeats < MANY and learnt.scale <= UNSTABLE * learnt.floor:
        return (
            f"{counted(learnt.repeats, 'repeat')} of the {called} differ by {digits(learnt.scale)} "
            f"in the {signal} at step {learnt.step}. So few do not exclude that a correct run is "
            f"off by {digits(learnt.limit)} there, {times}: with more repeats less passes."
        )
    why = "do its experts round to bfloat16" if experts else "is its training that unstable"
    return (
        f"The repeats of the {called} differ so much that they allow the {signal} to differ by "
        f"{digits(learnt.limit)} at step {learnt.step}, {times}: {why}, or are its repeats wrong?"
    )


def _miscounted(verdicts: Sequence[Verdict], evidences: Mapping[str, Evidence]) -> Iterator[str]:
    """Runs whose logs count tokens wrongly after a resume, in one sentence."""
    found = []
    for verdict in verdicts:
        test = evidences.get(verdict.name)
        off = tokens_off(test) if test is not None else {}
        steps = ", ".join(f"by {by:+,} from step {step} on" for step, by in off.items())
        if steps:
            found.append(f"{plain(verdict.name)} ({steps})")
    if found:
        yield (
            f"The trainer's own count of tokens is off in {', '.join(found)}: its checkpoint holds "
            "the count of one rank, and every rank of other degrees restores it as its own. "
            "Nothing else reads it: training itself does not change."
        )


def _growth(signal: str, scale: SignalScale) -> SignalGrowth:
    return SignalGrowth(
        signal=plain(signal),
        steps=(int(scale.steps[0]), int(scale.steps[-1])),
        scale=(float(scale.scale[0]), float(scale.scale[-1])),
        growth=scale.growth,
        doubling_steps=scale.doubling_steps,
    )


def _distance(name: str, kind: str, found: Mapping[str, CurveDifference]) -> RepeatDistance:
    largest = {signal: found[signal].largest for signal in JUDGED_SIGNALS if signal in found}
    known = [value for value in largest.values() if value is not None]
    return RepeatDistance(
        name=plain(name),
        kind=plain(kind),
        identical=not any(known) if known else None,
        loss=largest.get("loss"),
        grad_norm=largest.get("grad_norm"),
    )
