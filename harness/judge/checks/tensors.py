"""Tiers 1 and 2, tensor by tensor: gradients, updates, replicas, and post-step state.

The first two steps belong to tier 1, where only rounding may differ; later samples to tier 2,
where the limits have grown as the repeats' differences did.

Post-step state lies between gradient and weight: how gradients were clipped, the optimizer's state,
and buffers. A mistake there stays hidden for long: AdamW is invariant to the scale of a gradient,
and lost moments are rebuilt within some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.floors import FIRST_STEPS, GRADIENT_FLOORS, coarser
from converge_harness.judge.compare.post_step_state import (
    Clipping,
    PostStepDifference,
    buffers,
    clippings,
    counters,
    states,
    unseen,
)
from converge_harness.judge.compare.sketches import Renamed
from converge_harness.judge.compare.tensors import (
    MOST_DEVIATIONS,
    Comparisons,
    TensorComparison,
    TensorDifferences,
    is_uncounted,
)
from converge_harness.judge.degrees import ran_at
from converge_harness.judge.soundness import replicas_differ
from converge_harness.model import Deviation, Evidence, Limit, Outcome, SetSpec, Tier
from converge_harness.wording import counted, plural

NAMED = 3
"""How many tensors a detail names."""


@check(Tier.FIRST_STEP)
def renamed_parameters_agree(
    test: Evidence, control: Evidence, renamed: Renamed | None
) -> CheckResult:
    """Parameters that the two releases name differently have the control's norm, all together.

    These parameters, which sketches cannot compare, were loaded or trained differently. Gradients
    of single renamed parameters are not compared.
    """
    if renamed is None:
        return passed("every parameter has its name in the control")
    precision = coarser(test.precision, control.precision)
    limits = GRADIENT_FLOORS[precision].at(renamed.steps)
    difference = np.maximum(renamed.parameters, renamed.gradients)
    outside = np.flatnonzero(~(difference <= limits))
    worst = int(outside[0]) if outside.size else int(np.argmax(difference / limits))
    return CheckResult(
        Outcome.FAIL if outside.size else Outcome.PASS,
        f"{len(renamed.ours)} parameters here ({renamed.ours[0]} …) for {len(renamed.theirs)} in "
        f"the control ({renamed.theirs[0]} …), compared as one at step {renamed.steps[worst]}",
        measured=float(difference[worst]),
        limit=Limit(float(limits[worst]), f"floor of {precision.value} arithmetic"),
        unit="relative",
        steps=(int(renamed.steps[0]), int(renamed.steps[-1])),
        onset=int(renamed.steps[worst]) if outside.size else None,
    )


@check(Tier.FIRST_STEP)
def same_initial_parameters(tensors: Comparisons) -> CheckResult:
    """Training begins with the control's weights.

    The checkpoint was loaded wrongly: layers swapped, a stage left out, weights initialised again.
    """
    return _all_inside(tensors, lambda c: c.initial, "parameter")


@check(Tier.FIRST_STEP)
def gradients_first_steps(tensors: Comparisons) -> CheckResult:
    """Every parameter's gradient agrees with the control's at the first two steps.

    A gradient that is scaled, partly reduced or wrong in direction, whatever the loss says.
    """
    return _all_inside(_first(tensors), lambda c: c.gradients, "gradient")


@check(Tier.FIRST_STEP)
def updates_first_steps(tensors: Comparisons) -> CheckResult:
    """Every parameter moves as in the control at the first two steps.

    The optimizer got other gradients, other settings or other state, or does not reach a tensor.
    """
    return _all_inside(_first(tensors), lambda c: c.updates, "update")


@check(Tier.FIRST_STEP)
def gradients_finite(test: Evidence, control: Evidence) -> CheckResult:
    """No gradient has a NaN or an infinity that the control's does not have.

    Clipping or a loss scaler may discard such a step, and nothing else shows it.
    """
    theirs = {sample.step: sample for sample in control.samples}
    looked = 0
    for sample in test.samples:
        if sample.gradients is None or sample.step not in theirs:
            continue
        looked += 1
        of_control = theirs[sample.step].gradients
        clean = of_control is None or not of_control.not_finite.any()
        wrong = [
            index
            for index in np.flatnonzero(sample.gradients.not_finite)
            if not is_uncounted(test, sample.step, sample.names[index])
        ]
        if wrong and clean:
            count = int(sample.gradients.not_finite[wrong[0]])
            return CheckResult(
                Outcome.FAIL,
                f"{count} entries of the gradient of {sample.names[wrong[0]]} are not finite at "
                f"step {sample.step}",
                measured=float(sample.gradients.not_finite.sum()),
                unit="entries",
                onset=sample.step,
            )
    return passed() if looked else skipped("no per-tensor evidence on one side")


@check(Tier.FIRST_STEP)
def replicas_agree(test: Evidence, spec: SetSpec | None) -> CheckResult:
    """Ranks that hold the same shard of a tensor hold the same bits.

    Copies diverge unnoticed: the loss of each of them looks right for thousands of steps.
    """
    if not test.replicas:
        detail = "nothing compared the replicas"
        asked = spec is not None and test.sample_steps
        return invalid(detail) if asked else skipped(detail)
    compared = sum(sum(sample.compared.values()) for sample in test.replicas)
    unseen = _uncompared(test) if spec is not None else None
    if unseen is not None:
        return invalid(f"{test.name} has replicas, and none was compared at step {unseen}", unseen)
    steps = (test.replicas[0].step, test.replicas[-1].step)
    flaw = replicas_differ(test)
    if flaw:
        return CheckResult(
            Outcome.FAIL,
            f"{test.name} {flaw.what}",
            measured=float(max(sample.count for sample in test.replicas)),
            unit="tensors",
            steps=steps,
            onset=flaw.step,
        )
    return CheckResult(
        Outcome.PASS,
        f"{compared} comparisons of shards that several ranks hold"
        if compared
        else "no shard has a copy",
        measured=0.0,
        unit="tensors",
        steps=steps,
    )


@check(Tier.ENVELOPE)
def gradients_envelope(tensors: Comparisons) -> CheckResult:
    """Every parameter's gradient stays inside its growth envelope at the later samples.

    Some part of the model is no longer trained as in the control.
    """
    return _all_inside(_later(tensors), lambda c: c.gradients, "gradient")


@check(Tier.ENVELOPE)
def updates_envelope(tensors: Comparisons) -> CheckResult:
    """Every parameter moves as in the control, within its growth envelope, at the later samples.

    Some part of the model is no longer trained as in the control.
    """
    return _all_inside(_later(tensors), lambda c: c.updates, "update")


CHECKS: tuple[Question, ...] = (
    same_initial_parameters,
    renamed_parameters_agree,
    gradients_first_steps,
    updates_first_steps,
    gradients_finite,
    replicas_agree,
    gradients_envelope,
    updates_envelope,
)


def _uncompared(test: Evidence) -> int | None:
    """The first sample in which copies that must be there (DDP, HSDP) were not compared."""
    for sample in test.replicas:
        if (ran_at(test, sample.step).degrees.get("dp_replicate") or 1) == 1:
            continue
        kinds = ("parameter", "gradient") if sample.step else ("parameter",)
        if not all(sample.compared.get(kind) for kind in kinds):
            return sample.step
    return None


def _first(tensors: Comparisons) -> Comparisons:
    return tuple(comparison for comparison in tensors if comparison.step <= FIRST_STEPS)


def _later(tensors: Comparisons) -> Comparisons:
    return tuple(comparison for comparison in tensors if comparison.step > FIRST_STEPS)


def _all_inside(
    tensors: Iterable[TensorComparison],
    kind: Callable[[TensorComparison], TensorDifferences | None],
    noun: str,
) -> CheckResult:
    """FAIL at the first sample with a tensor outside; else PASS with the one nearest its limit."""
    both = [(comparison, found) for comparison in tensors if (found := kind(comparison))]
    if not both:
        return skipped("no per-tensor evidence on one side")
    looked = [(comparison, found) for comparison, found in both if np.isfinite(found.limit).any()]
    if not looked:
        return skipped(f"no {noun} could be judged{_unjudged([found for _, found in both])}")
    steps = (looked[0][0].step, looked[-1][0].step)
    for comparison, found in looked:
        if found.outside.size:
            return _outside(comparison, found, noun, steps)
    comparison, found = max(looked, key=lambda pair: _nearness(pair[1]))
    index = found.worst
    unjudged = _unjudged([found for _, found in both])
    return CheckResult(
        Outcome.PASS,
        f"nearest to its limit is {comparison.names[index]} at step {comparison.step}{unjudged}",
        measured=float(found.difference[index]),
        limit=found.limit_at(index),
        unit="relative",
        steps=steps,
    )


def _outside(
    comparison: TensorComparison, found: TensorDifferences, noun: str, steps: tuple[int, int]
) -> CheckResult:
    deviations = comparison.deviations(found)
    count, index = found.outside.size, int(found.outside[0])
    others = f", of {len(comparison.names)} parameters" if count > 1 else ""
    return CheckResult(
        Outcome.FAIL,
        f"{counted(count, noun)} differ{'s' * (count == 1)} at step "
        f"{comparison.step}{others}: {_named(deviations, count)}",
        measured=float(found.difference[index]),
        limit=found.limit_at(index),
        unit="relative",
        steps=steps,
        onset=comparison.step,
        deviations=deviations,
    )


def _named(deviations: tuple[Deviation, ...], count: int) -> str:
    parts = [f"{each.tensor} by {each.measured:.2g}" for each in deviations[:NAMED]]
    return ", ".join(parts) + (" …" if count > NAMED else "")


def _unjudged(looked: Sequence[TensorDifferences]) -> str:
    """How many tensors are not judged at some step, and why."""
    chaotic, lost = 0, 0
    for found in looked:
        unlimited = ~np.isfinite(found.limit)
        because = np.zeros_like(unlimited) if found.chaotic is None else found.chaotic
        chaotic = max(chaotic, int(np.count_nonzero(because)))
        lost = max(lost, int(np.count_nonzero(unlimited & ~because)))
    text = f"; {chaotic} differ as much between repeats of the control" if chaotic else ""
    return f"{text}; {lost} may be lost in the spacing of the stored parameters" if lost else text


def _nearness(found: TensorDifferences) -> float:
    limit = float(found.limit[found.worst])
    return float(found.difference[found.worst]) / limit if limit else 0.0


_NOTHING = "no such evidence on one side"


@check(Tier.FIRST_STEP)
def clipping_first_steps(tensors: Comparisons, test: Evidence, control: Evidence) -> CheckResult:
    """Gradients are clipped as in the control at the first two steps, all by one factor.

    Clipping uses another norm, another largest norm, or leaves parameters out.
    """
    return _clipped(tensors, _first(tensors), test, control)


@check(Tier.ENVELOPE)
def clipping_envelope(tensors: Comparisons, test: Evidence, control: Evidence) -> CheckResult:
    """Gradients are clipped as in the control at the later samples, all by one factor.

    Clipping is switched off, or begins to use another norm.
    """
    return _clipped(tensors, _later(tensors), test, control)


@check(Tier.FIRST_STEP)
def optimizer_steps(tensors: Comparisons) -> CheckResult:
    """The optimizer has counted as many updates of every parameter as the control's has.

    Its state was lost or initialised again, or it skipped an update or made one too many.
    """
    return _state_inside(
        [("", each) for each in counters(tensors)], "counter", "updates", "counts are exact"
    )


@check(Tier.FIRST_STEP)
def optimizer_state_first_steps(
    tensors: Comparisons, test: Evidence, control: Evidence
) -> CheckResult:
    """The optimizer's moments have the control's norms at the first two steps.

    The optimizer got other gradients, or averages them differently.
    """
    found = [pair for pair in states(tensors, test, control) if pair[1].step <= FIRST_STEPS]
    return _state_inside(found, "state", "relative", _STATE_LIMIT)


@check(Tier.ENVELOPE)
def optimizer_state_envelope(
    tensors: Comparisons, test: Evidence, control: Evidence
) -> CheckResult:
    """The optimizer's moments have the control's norms at the later samples.

    Moments were lost, exchanged or never loaded.
    """
    found = [pair for pair in states(tensors, test, control) if pair[1].step > FIRST_STEPS]
    return _state_inside(found, "state", "relative", _STATE_LIMIT)


@check(Tier.FIRST_STEP)
def buffers_first_steps(tensors: Comparisons, test: Evidence, control: Evidence) -> CheckResult:
    """Every buffer agrees with the control's at the first two steps.

    A table was computed differently, or a buffer that should be updated (a router's biases) is not.
    """
    found = [each for each in buffers(tensors, test, control) if each.step <= FIRST_STEPS]
    return _state_inside([("", each) for each in found], "buffer", "relative", _BUFFER_LIMIT)


@check(Tier.ENVELOPE)
def buffers_envelope(tensors: Comparisons, test: Evidence, control: Evidence) -> CheckResult:
    """Every buffer agrees with the control's at the later samples.

    A buffer was lost, or is no longer updated.
    """
    found = [each for each in buffers(tensors, test, control) if each.step > FIRST_STEPS]
    return _state_inside([("", each) for each in found], "buffer", "relative", _BUFFER_LIMIT)


_STATE_LIMIT = "a multiple of the gradients' own limit"
_BUFFER_LIMIT = "floor of buffers"

POST_STEP_CHECKS: tuple[Question, ...] = (
    clipping_first_steps,
    optimizer_steps,
    optimizer_state_first_steps,
    buffers_first_steps,
    clipping_envelope,
    optimizer_state_envelope,
    buffers_envelope,
)


def _clipped(
    tensors: Comparisons, asked: Comparisons, test: Evidence, control: Evidence
) -> CheckResult:
    """FAIL at the first step asked that is clipped wrongly; else PASS with the nearest to a limit.

    INVALID for a run of torchtitan that recorded less than its control.
    """
    steps_asked = {each.step for each in asked}
    found = [each for each in clippings(tensors, test, control) if each.step in steps_asked]
    # The framework of another program may not expose its clipped gradients.
    ours = test.in_force is not None and not test.in_force.probing.wrapping
    gone = unseen(asked) if ours else ""
    if gone and not any(each.wrong for each in found):
        return invalid(gone)
    if not found:
        return skipped(_NOTHING)
    steps = (found[0].step, found[-1].step)
    wrong = next((each for each in found if each.wrong), None)
    each = wrong or max(found, key=_clipping_excess)
    odd = float(each.deviation.max()) / each.deviation_limit >= each.off / each.common_limit
    measured = float(each.deviation.max()) if odd else each.off
    limit = Limit(
        each.deviation_limit if odd else each.common_limit,
        "rounding" if odd else "rounding of the norm",
    )
    if wrong is None:
        detail = f"nearest to its limit at step {each.step}"
        return CheckResult(Outcome.PASS, detail, measured, limit, "relative", steps)
    index = each.odd
    factors = sorted({f"{each.factors[place]:.4g}" for place in index})
    listed = ", ".join(factors[:NAMED]) + (" …" if len(factors) > NAMED else "")
    detail = (
        f"at step {each.step} clipping multiplies {len(index)} of {len(each.names)} gradients by "
        f"{listed} and the others by {each.common:.4g}"
        if index
        else f"at step {each.step} clipping multiplies gradients by {each.common:.6g}, where their "
        f"norm asks for {each.expected:.6g}"
    )
    furthest = sorted(index, key=lambda place: -each.deviation[place])[:MOST_DEVIATIONS]
    deviations = tuple(
        Deviation(each.names[place], each.step, float(each.deviation[place]), each.deviation_limit)
        for place in furthest
    )
    return CheckResult(
        Outcome.FAIL, detail, measured, limit, "relative", steps, each.step, deviations
    )


def _clipping_excess(each: Clipping) -> float:
    return max(float(each.deviation.max()) / each.deviation_limit, each.off / each.common_limit)


def _state_inside(
    found: Iterable[tuple[str, PostStepDifference]], noun: str, unit: str, origin: str
) -> CheckResult:
    """FAIL at the first step with something outside; else PASS with what is nearest its limit."""
    listed = list(found)
    if not listed:
        return skipped(_NOTHING)
    steps = (listed[0][1].step, listed[-1][1].step)
    first = next(((name, each) for name, each in listed if each.outside), None)
    name, each = first or max(listed, key=lambda pair: _state_excess(pair[1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.nan_to_num(each.difference / each.limit, nan=0.0)
    index = each.outside[0] if each.outside else int(np.argmax(excess))
    what = f"{name} of {each.names[index]}" if name else each.names[index]
    measured, limit = float(each.difference[index]), Limit(float(each.limit[index]), origin)
    if first is None:
        detail = f"nearest to its limit is {what} at step {each.step}"
        return CheckResult(Outcome.PASS, detail, measured, limit, unit, steps)
    count = len(each.outside)
    verb = "differs" if count == 1 else "differ"
    noun = plural(count, noun) + (f" {name}" if name else "")
    by = (
        "which is gone, or zero on one side alone"
        if not np.isfinite(measured)
        else f"by {measured:.3g}"
    )
    detail = (
        f"{count} of {len(each.names)} {noun} {verb} at step {each.step}: {each.names[index]} {by}"
    )
    deviations = tuple(
        Deviation(
            each.names[place], each.step, float(each.difference[place]), float(each.limit[place])
        )
        for place in each.outside[:MOST_DEVIATIONS]
    )
    return CheckResult(Outcome.FAIL, detail, measured, limit, unit, steps, each.step, deviations)


def _state_excess(each: PostStepDifference) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nan_to_num(each.difference / each.limit, nan=0.0).max())
