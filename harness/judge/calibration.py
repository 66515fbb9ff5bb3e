"""How much correct runs differ, estimated from A/A repeats of a control.

The scale of a signal at a step is the root mean square of the repeats' relative differences to the
control, smoothed over nearby steps (a handful of repeats crosses zero now and then) and never
falling: what rounding did once, it may do again.

A repeat is the control's own set-up, so it has to pass every check of a test set, and more: it has
the control's samples, tokens and learning rates, and starts from its weights (:func:`flaw_of`).
What correct repeats still differ by is rounding, about as much in each of them. A repeat that
differs by far more is an outlier (:func:`outlier_among`), whatever the reason: limits learnt from
it would accept a test set with the same fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from converge_harness.judge.checks.comparability import probed_alike, same_lr, same_tokens
from converge_harness.judge.checks.first_step import (
    gradients_present,
    reported_grad_norm_is_recomputed,
    reported_loss_is_recomputed,
)
from converge_harness.judge.checks.integrity import same_parameters
from converge_harness.judge.checks.question import Question
from converge_harness.judge.checks.resume import badly_continued
from converge_harness.judge.compare.activations import learnt_noise
from converge_harness.judge.compare.curves import (
    common_steps,
    difference_beyond_print,
    pair,
    relative_difference,
    second_half,
    signed_difference,
)
from converge_harness.judge.compare.experts import SAME_TOKENS, is_of_one_expert
from converge_harness.judge.compare.floors import (
    FIRST_STEPS,
    FLOORS,
    ROUNDING,
    SAME_WEIGHTS,
    SIGN_STEPS,
    SMALLEST_BFLOAT16,
    SPACING_FLOAT32,
    SPREAD_CEILING,
    TENSOR_ROUNDING,
    storage,
)
from converge_harness.judge.compare.limits import experts_round
from converge_harness.judge.compare.sketches import (
    gradient_difference,
    rows_difference,
    shared_samples,
    update,
    update_difference,
)
from converge_harness.judge.compare.tensors import lost_in_storing
from converge_harness.judge.compare.tost import end_level
from converge_harness.judge.comparison import compare_runs
from converge_harness.judge.in_force import unlike_a_repeat
from converge_harness.judge.soundness import (
    disordered,
    missing_values,
    non_finite,
    other_data,
    other_means,
    other_steps,
    ranks_disagree,
    replayed_otherwise,
    replicas_differ,
    resumed,
    unfinished,
    unsampled,
)
from converge_harness.model import (
    JUDGED_SIGNALS,
    Calibration,
    Evidence,
    Floats,
    Integers,
    Outcome,
    Precision,
    RepeatKind,
    SignalScale,
    TensorSample,
    TensorScale,
)
from converge_harness.wording import control_called

NEARBY = 0.25
"""Steps within a quarter of t before and after t are near t."""

_ROUNDED = (None, RepeatKind.ULP, RepeatKind.ROUNDING)
"""Repeats that are rounded otherwise in the first batch; others repeat its sums."""


def calibrate(control: Evidence, repeats: Sequence[Evidence]) -> Calibration:
    """Estimate from repeats of a control; what makes a repeat unusable is in ``problems``.

    A repeat that is bit-identical to the control (a plain rerun of a deterministic set-up) proves
    that the set-up is deterministic and shows no scale: it is not counted.
    """
    vetted = [(repeat, flaw_of(repeat, control)) for repeat in repeats]
    usable = _usable(vetted, control)
    distances = tensor_differences(control, usable)
    outlier = outlier_among(control, usable, distances)
    learnt = _learn(control, vetted, distances, outlier)
    as_dealt = [each for each in vetted if each[0].repeat != RepeatKind.PERMUTE]
    alike = _usable(as_dealt, control)
    if len(as_dealt) == len(vetted) or not alike:
        return learnt
    distances = tensor_differences(control, alike)
    if outlier is not None or not begin_alike(control, usable):
        outlier = outlier_among(control, alike, distances)
    return replace(learnt, alike=_learn(control, as_dealt, distances, outlier))


def _usable(vetted: Sequence[tuple[Evidence, str]], control: Evidence) -> list[Evidence]:
    """The repeats that have no flaw and differ from the control."""
    return [repeat for repeat, flaw in vetted if not flaw and _differs(repeat, control)]


def _learn(
    control: Evidence,
    vetted: Sequence[tuple[Evidence, str]],
    distances: TensorDistances,
    outlier: Outlier | None,
) -> Calibration:
    """From repeats with their flaws; ``distances`` are those of the repeats that count."""
    repeats = [repeat for repeat, _ in vetted]
    problems = [flaw for _, flaw in vetted if flaw]
    usable = _usable(vetted, control)
    if outlier is not None:
        whose = "the control" if outlier.name == control.name else "the repeat"
        problems.append(f"{whose} {outlier.name} is out of line: {outlier.what}")
    signals = {}
    for signal in JUDGED_SIGNALS:
        learnt = _signal_scale(signal, control, usable)
        if learnt is None:
            continue
        signals[signal] = learnt
        too_wide = learnt.steps[~(learnt.scale <= SPREAD_CEILING[signal])]
        if too_wide.size and not leaps(signal, control, usable):
            problems.append(
                f"the {control_called(control.name)} does not reproduce itself: {signal} of its "
                f"repeats differs by {learnt.scale[-1]:.2g}, from step {too_wide[0]} on by too "
                "much to judge with"
            )
    return Calibration(
        control=control.name,
        identity=control.identity,
        precision=control.precision,
        repeats=tuple(repeat.name for repeat in repeats),
        taught_by=len(usable),
        signals=signals,
        tensors=_tensor_scales(distances),
        modules=learnt_noise(control, [each for each in usable if each.repeat in _ROUNDED]),
        sources=tuple(repeat.source for repeat in repeats),
        problems=tuple(problems),
    )


def _differs(repeat: Evidence, control: Evidence) -> bool:
    curves = (pair(repeat, control, signal) for signal in JUDGED_SIGNALS)
    return any(not np.array_equal(curve.test, curve.control) for curve in curves)


def _signal_scale(signal: str, control: Evidence, usable: Sequence[Evidence]) -> SignalScale | None:
    curves = [pair(repeat, control, signal) for repeat in usable]
    curves = [curve for curve in curves if curve.steps.size]
    if not curves:
        return None
    # Usable repeats have the control's steps; one that lacks a value somewhere lacks the step.
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = common_steps(steps, curve.steps).steps
    if not steps.size:
        return None
    with np.errstate(over="ignore"):  # a difference that overflows is infinite
        squares = [
            relative_difference(curve.test[there], curve.control[there]) ** 2
            for curve in curves
            for there in [np.isin(curve.steps, steps)]
        ]
    scale = _smooth(np.mean(squares, axis=0), steps)
    growth, doubling = growth_law(steps, scale)
    differences = [signed_difference(second_half(curve)) for curve in curves]
    lasting = _typical([float(np.mean(difference)) for difference in differences])
    ending = None if lasting is None else _typical(list(map(end_level, differences)))
    return SignalScale(steps, scale, growth, doubling, lasting, ending)


def _typical(levels: Sequence[float]) -> float | None:
    """Root mean square; None where a level is NaN, or its square overflows."""
    with np.errstate(over="ignore"):
        size = float(np.sqrt(np.mean(np.square(levels))))
    return size if np.isfinite(size) else None


def _smooth(mean_square: Floats, steps: Integers) -> Floats:
    """Root of the mean over nearby steps, then the running maximum."""
    total = np.concatenate([[0.0], np.cumsum(mean_square)])
    low = np.searchsorted(steps, np.ceil(steps * (1 - NEARBY)), side="left")
    high = np.searchsorted(steps, np.floor(steps * (1 + NEARBY)), side="right")
    with np.errstate(invalid="ignore"):
        near = (total[high] - total[low]) / np.maximum(high - low, 1)
    # After a step with an infinite difference (from a control of 0) all differences are infinite.
    near = np.where(np.isnan(near), np.inf, near)
    # Differences of a running sum can round to a little below zero.
    return np.asarray(np.maximum.accumulate(np.sqrt(np.maximum(near, 0.0))), dtype=np.float64)


def growth_law(steps: Integers, scale: Floats) -> tuple[float, float | None]:
    """Exponent of the best power law, and the doubling time if an exponential fits better."""
    known = (scale > 0) & (steps > 0) & np.isfinite(scale)
    if np.count_nonzero(known) < 3 or np.unique(scale[known]).size < 2:  # noqa: PLR2004
        return 0.0, None  # three points are needed to see a law, and a constant does not grow
    logarithm = np.log(scale[known])
    when = steps[known].astype(np.float64)
    (power, _), power_off = _line(np.log(when), logarithm)
    (rate, _), exponential_off = _line(when, logarithm)
    doubles = exponential_off < power_off and rate > 0
    return float(power), float(np.log(2) / rate) if doubles else None


def _line(x: Floats, y: Floats) -> tuple[Floats, float]:
    """Slope and intercept of a least-squares line, and the sum of its squared residuals."""
    coefficients = np.polyfit(x, y, 1)
    return coefficients, float(np.sum((np.polyval(coefficients, x) - y) ** 2))


def _tensor_scales(found: TensorDistances) -> dict[int, TensorScale]:
    """Per sampled step, the RMS over repeats of every parameter's relative differences."""
    gradients = {step: list(each.values()) for step, each in found.gradients.items()}
    updates = {step: list(each.values()) for step, each in found.updates.items()}
    return {
        step: TensorScale(
            known,
            _root_mean_square(gradients.get(step)),
            _root_mean_square(updates.get(step)),
            _spread(_of_many_tokens(gradients.get(step), step, known)),
            _spread(_of_many_tokens(updates.get(step), step, known)),
        )
        for step, known in found.names.items()
    }


def _of_many_tokens(
    differences: Sequence[Floats] | None, step: int, names: Sequence[str]
) -> Sequence[Floats] | None:
    """Without single experts after the first step.

    A repeat in which one of them gets other tokens, or none, is far off there alone, and must not
    widen the limits of all other tensors.
    """
    if differences is None or step <= SAME_TOKENS:
        return differences
    kept = np.array([not is_of_one_expert(name) for name in names], dtype=bool)
    return [each[kept] for each in differences]


def _root_mean_square(differences: Sequence[Floats] | None) -> Floats | None:
    """Over the repeats; a tensor that stayed quiet by chance counts as a tenth of the median."""
    if not differences:
        return None
    size = np.sqrt(np.mean(np.square(differences), axis=0))
    return np.asarray(np.maximum(size, QUIET * np.median(size)), dtype=np.float64)


def _spread(differences: Sequence[Floats] | None) -> float | None:
    """Each repeat against the root mean square of the others; see ``TensorScale``."""
    if differences is None or len(differences) < 2:  # noqa: PLR2004 (one has no others)
        return None
    squares = np.square(differences)
    # A tensor that only some repeats moved is off by an infinite factor, and says nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        others = (squares.sum(axis=0) - squares) / (len(squares) - 1)
        above = np.log(squares / others) / 2
    above = above[(squares > others) & (squares > 0)]
    # Only excess counts: a quiet repeat is no reason to allow more.
    return float(np.sqrt(np.mean(above**2))) if above.size else 0.0


SIGNAL_OUTLIER = 10.0
"""How many times as far from the control as the others a repeat may be in a signal, as the root
mean square over all steps. Measured between correct repeats of one kind: at most 2.5, and 4.2 where
training is chaotic (tied weights at a rate of 4e-3 in bf16 mixed)."""
SIGNAL_OUTLIER_OF_ANOTHER_KIND = 30.0
"""The same against the furthest repeat of other kinds: two permuted repeats cannot hide behind each
other. Measured: 9, again with tied weights in bf16 mixed, and 2.7 elsewhere."""
ENOUGH_OF_A_KIND = 2
"""With so many others of its own kind, a repeat is compared with these alone: two wrong ones of
three cannot hide each other, and kinds may differ by more than a fault makes. Measured: with Float8
all-gather of torchtitan 0.2.2 three ``rounding`` repeats were 37 times as far off as two
``permute``."""
BEYOND_OTHER_KINDS = 3.0
"""An outlier among its own kind must also be further off than the lower median of the other kinds,
by this factor: a permuted repeat that happens to give each rank its old samples differs by nothing
at first, and the next one by a million times that."""
TENSOR_OUTLIER = 100.0
"""The same of a gradient, or of an update after the first, at one step. Measured: at most 13."""
LONE_OUTLIER = 100.0
"""How far the only repeat that differs may be from the control in a signal, in multiples of the
floor of its arithmetic: it has no others to compare with. Measured between correct runs of 16 and
20 steps: at most 2 for the loss and 12 for norms. A loss that is 0.5% off throughout is 200 times
that or more, up to 1,000 steps."""
FEWEST_THAT_LEAP = 2
"""Repeats whose norms are far off: one may be broken, two show that training is that sensitive."""
QUIET = 0.1
"""Least difference of a tensor, in medians of all: a few repeats may by chance not move it."""

_AS_OF_A_TEST_SET: tuple[Question, ...] = (
    same_tokens,
    same_lr,
    probed_alike,
    same_parameters,
    gradients_present,
    reported_loss_is_recomputed,
    reported_grad_norm_is_recomputed,
)
"""Checks of test sets that a repeat has to pass, or skip because there is nothing to compare."""


def flaw_of(repeat: Evidence, control: Evidence) -> str:
    """Why a run, looked at alone, cannot be used as a repeat of a control; empty when it can."""
    # A run that could not be read has neither: the checks below say why.
    if repeat.steps.size and repeat.identity is not None and repeat.repeat is None:
        return f"{repeat.name} is given as a repeat, but its job.json says that it is not one"
    if repeat.in_force is not None and control.in_force is not None:
        keys = unlike_a_repeat(repeat.in_force, control.in_force, control.keys.of_repeats)
        if keys:
            return f"{repeat.name} is not a repeat of {control.name}: {', '.join(keys[:3])} differ"
    flaw = resumed(repeat) or unfinished(repeat) or badly_continued(repeat, other=control)
    flaw = flaw or disordered(repeat) or non_finite(repeat) or replayed_otherwise(repeat)
    flaw = flaw or missing_values(repeat, _left_by(control))
    flaw = flaw or ranks_disagree(repeat) or replicas_differ(repeat)
    flaw = flaw or other_steps(repeat, control) or other_means(repeat, control)
    flaw = flaw or other_data(repeat, control)
    flaw = flaw or (unsampled(repeat) if control.samples else None)
    if flaw:
        return f"the repeat {repeat.name} {flaw.what}"
    return _fails(repeat, control) or _other_start(repeat, control)


class Outlier(NamedTuple):
    """A repeat, or the control itself, that is far from all the others."""

    name: str
    what: str
    """A clause that says by how much, and in what."""


def outlier_among(
    control: Evidence, repeats: Sequence[Evidence], distances: TensorDistances
) -> Outlier | None:
    """The run that is furthest out of line; None when all are in line.

    ``repeats`` are those that ``flaw_of`` finds nothing wrong with, and that differ from the
    control; ``distances`` are theirs. Each is compared with the lower median of the others of its
    kind, so that one of three cannot hide behind another, and, less sharply, with the furthest of
    the other kinds. The control is out of line when its repeats agree with each other far better
    than with it. One that has no others is compared with the floor of its arithmetic.
    """
    if len(repeats) == 1:
        return _far_alone(control, repeats[0])
    last = _last_calm_step(control, repeats)
    found = [*_by_signal(control, repeats, last), *_by_tensor(control, repeats, distances, last)]
    return max(found, key=lambda each: each[0])[1] if found else None


def _far_alone(control: Evidence, repeat: Evidence) -> Outlier | None:
    """The only repeat that differs, where it does by far more than rounding does."""
    found = []
    for signal in JUDGED_SIGNALS:
        size = _distance(repeat, control, signal)
        limit = LONE_OUTLIER * FLOORS[control.precision][signal].first
        if experts_round(control):
            limit = max(limit, FLOORS[Precision.BF16][signal].first)
        if size is not None and size > limit:
            what = (
                f"its {signal} differs from the control's by {size:.2g}, over {limit:.2g}, more "
                "than rounding explains, and no other repeat differs that could show "
                "whether training is that sensitive: add one"
            )
            found.append((size / limit, what))
    return Outlier(repeat.name, max(found)[1]) if found else None


def begin_alike(control: Evidence, repeats: Sequence[Evidence]) -> bool:
    """Whether permuted repeats begin as near the control as the others, in every signal.

    Then both kinds differ by the same rounding, and a repeat that is in line with all of them is
    correct, however much the few of one kind differ later: tied weights in bf16 mixed jump by 2e-3
    of the loss, in each repeat at another step. Where samples in one tensor affect each other's
    rounding (Float8), permuted repeats begin far off, and say nothing about the others. The first
    steps come before training amplifies anything.
    """
    for signal in JUDGED_SIGNALS:
        least = ROUNDING[control.precision][signal].first
        sizes = [(each.repeat, _distance(each, control, signal, FIRST_STEPS)) for each in repeats]
        own, permuted = (
            [size for kind, size in sizes if (kind == RepeatKind.PERMUTE) is asked and size]
            for asked in (False, True)
        )
        usual = max(sorted(own)[(len(own) - 1) // 2] if own else 0.0, least)
        if max(permuted, default=0.0) > BEYOND_OTHER_KINDS * usual:
            return False
    return True


def leaps(signal: str, control: Evidence, repeats: Sequence[Evidence]) -> bool:
    """Whether a norm, after the first steps, jumps by chance: several repeats are far off.

    Where training is that sensitive, correct runs have spikes of the norm at different steps. The
    norm is not judged from there on; the loss still is, and one repeat alone that is off is flawed.
    """
    first = _leaps(signal, control, repeats)
    return len(first) >= FEWEST_THAT_LEAP and min(first) > FIRST_STEPS


def _leaps(signal: str, control: Evidence, repeats: Sequence[Evidence]) -> list[int]:
    """The step of its first jump, for each repeat that has one."""
    if not signal.startswith("grad_norm"):
        return []
    first = []
    for repeat in repeats:
        curve = pair(repeat, control, signal)
        far = ~(relative_difference(curve.test, curve.control) <= SPREAD_CEILING[signal])
        first += curve.steps[far][:1].tolist()
    return first


def _last_calm_step(control: Evidence, repeats: Sequence[Evidence]) -> float:
    """The one before the norms of most repeats begin to jump; infinite where they do not.

    From there on chance decides how much correct runs differ, in their losses and tensors, too.
    """
    found = (_leaps(signal, control, repeats) for signal in JUDGED_SIGNALS)
    steps = [min(first) for first in found if len(first) > len(repeats) / 2]
    return min(steps) - 1 if steps and min(steps) > FIRST_STEPS else math.inf


def _left_by(control: Evidence) -> tuple[str, ...]:
    return tuple(signal for signal in JUDGED_SIGNALS if signal in control.signals)


def _fails(repeat: Evidence, control: Evidence) -> str:
    compared = compare_runs(repeat, control)
    for question in _AS_OF_A_TEST_SET:
        check = question(compared)
        if check.outcome not in (Outcome.PASS, Outcome.SKIPPED):
            return f"the repeat {repeat.name} fails {check.name}: {check.detail}"
    return ""


def _other_start(repeat: Evidence, control: Evidence) -> str:
    """Other initial weights, by more than the ulp that a repeat of that kind moves them by."""
    first = next(iter(shared_samples(repeat, control)), None)
    if first is None or first[0].step:
        return ""
    ours, theirs = first
    by_an_ulp = repeat.repeat in (None, RepeatKind.ULP)
    stored = storage(repeat, control, SPACING_FLOAT32).spacings(theirs.names)
    # Weights of 1 that move by an ulp are 0.8 spacings off, which a sketch of 32 of them estimated
    # as up to 1.004 spacings (of 195 such norms; 0.97 of 4,096 weights).
    limit = SAME_WEIGHTS + (2 * stored if by_an_ulp else np.zeros_like(stored))
    difference = rows_difference(ours.parameters, theirs.parameters)
    right = difference <= limit
    if by_an_ulp:
        # A zero has no relative error: its neighbours are the smallest numbers that there are.
        zero = theirs.parameters.norm == 0
        right |= zero & (ours.parameters.norm <= SMALLEST_BFLOAT16 * np.sqrt(theirs.sizes))
    off = np.flatnonzero(~right)
    if not off.size:
        return ""
    worst = off[np.argmax(difference[off])]
    return (
        f"the repeat {repeat.name} starts from other weights than the control: "
        f"{theirs.names[worst]} is off by {difference[worst]:.2g} of its norm"
    )


class _Found(NamedTuple):
    """How much each repeat differs from the control in one quantity; arrays are (entries,)."""

    difference: dict[int, Floats]
    """By number of the repeat."""
    least: float | Floats
    """As much as rounding alone may make."""
    least_of_ulp: float | Floats
    """The same for an ``ulp`` repeat that is compared with other kinds."""
    outlier: float
    """From how many times the difference of others of its kind on a repeat is an outlier."""
    of_another_kind: float
    """The same against the furthest of other kinds."""
    clause: Callable[[int, float], str]
    """Says by how much one entry of it differs."""


def _out_of_line(found: _Found, repeats: Sequence[Evidence]) -> Iterator[tuple[float, Outlier]]:
    """Repeats that differ by more than allowed, and by how many times as much."""
    for number, size in found.difference.items():
        kind = repeats[number].repeat
        rest = [(repeats[at].repeat, each) for at, each in found.difference.items() if at != number]
        own = [each for of_kind, each in rest if of_kind == kind]
        others = [each for of_kind, each in rest if of_kind != kind]
        excess = np.zeros(size.shape)
        if own:
            excess = _times(size, _usual(_lower_median(own), found.least)) / found.outlier
        if own and others:
            # A permutation may leave every rank its own samples; such a repeat hardly differs.
            usual = _usual(_lower_median(others), found.least)
            beyond = _times(size, usual) / BEYOND_OTHER_KINDS
            excess = np.minimum(excess, beyond)
        times = found.outlier
        if others and len(own) < ENOUGH_OF_A_KIND:
            least = found.least_of_ulp if kind == RepeatKind.ULP else found.least
            furthest = _usual(np.max(others, axis=0), least)
            of_another_kind = _times(size, furthest) / found.of_another_kind
            if of_another_kind.max() > excess.max():
                excess, times = of_another_kind, found.of_another_kind
        worst = int(np.argmax(excess))
        if excess[worst] > 1:
            what = (
                f"{found.clause(worst, float(size[worst]))}, over {times:g} times as much as "
                "the other repeats, which differ by rounding"
            )
            yield float(excess[worst]), Outlier(repeats[number].name, what)


def _times(size: Floats, usual: Floats) -> Floats:
    """The ratio; 1 where both are infinite, as from a control of 0."""
    both = np.isinf(size) & np.isinf(usual)
    return np.where(both, 1.0, np.divide(size, usual, where=~both, out=np.ones(size.shape)))


def _lower_median(differences: Sequence[Floats]) -> Floats:
    return np.asarray(np.sort(differences, axis=0)[(len(differences) - 1) // 2])


def _usual(difference: Floats, least: float | Floats) -> Floats:
    return np.maximum(np.maximum(difference, QUIET * np.median(difference)), least)


def _by_signal(
    control: Evidence, repeats: Sequence[Evidence], last: float
) -> Iterator[tuple[float, Outlier]]:
    for signal in JUDGED_SIGNALS:
        sizes = _sizes(control, repeats, signal, math.inf)
        least = ROUNDING[control.precision][signal].first
        rounded = FLOORS[Precision.BF16][signal].first if experts_round(control) else 0.0
        between = [_distance(first, second, signal) for first, second in combinations(repeats, 2)]
        furthest = max((size for size in between if size is not None), default=0.0)
        nearest = float(min(sizes.values(), default=np.zeros(1))[0])
        if nearest > SIGNAL_OUTLIER * max(furthest, least):
            what = (
                f"its {signal} differs by at least {nearest:.2g} from that of its repeats, which "
                f"agree with each other to {furthest:.2g}"
            )
            # First of all: against a wrong control every repeat looks like an outlier.
            yield math.inf, Outlier(control.name, what)
        # Only now: a norm that jumps by chance does so at another step in each repeat.
        if leaps(signal, control, repeats):
            continue
        yield from _out_of_line(
            _Found(
                sizes if last == math.inf else _sizes(control, repeats, signal, last),
                least,
                max(least, rounded / SIGNAL_OUTLIER_OF_ANOTHER_KIND),
                SIGNAL_OUTLIER,
                SIGNAL_OUTLIER_OF_ANOTHER_KIND,
                lambda _, size, signal=signal: (  # type: ignore[misc]
                    f"its {signal} differs from the control's by {size:.2g}"
                ),
            ),
            repeats,
        )


def _sizes(
    control: Evidence, repeats: Sequence[Evidence], signal: str, last: float
) -> dict[int, Floats]:
    """By number of the repeat, how far it is from the control up to a step, shape (1,)."""
    sizes = (_distance(each, control, signal, last) for each in repeats)
    return {number: np.array([size]) for number, size in enumerate(sizes) if size is not None}


def _distance(
    first: Evidence, second: Evidence, signal: str, last: float = math.inf
) -> float | None:
    """Root mean square over the steps up to ``last``, with the growth of rounding divided out.

    None when they have no step in common.
    """
    curve = pair(first, second, signal)
    asked = curve.steps <= last
    if not asked.any():
        return None
    floor = ROUNDING[second.precision][signal]
    difference = difference_beyond_print(first, second, signal, curve)[asked]
    with np.errstate(over="ignore"):
        squares = np.square(difference * floor.first / floor.at(curve.steps[asked]))
        return float(np.sqrt(np.mean(squares)))


def _by_tensor(
    control: Evidence, repeats: Sequence[Evidence], distances: TensorDistances, last: float
) -> Iterator[tuple[float, Outlier]]:
    gradients, updates, lost, names = distances
    for kind, by_step in (("gradient", gradients), ("update", updates)):
        for step, difference in by_step.items():
            if step > last:
                continue
            if kind == "update" and step <= SIGN_STEPS:
                continue  # nearly signs: one that rounding flips is off by a thousand times more
            rounding = TENSOR_ROUNDING[control.precision]
            least = np.maximum(rounding, lost[step]) if kind == "update" else rounding
            if step > SAME_TOKENS:
                # A gradient of few tokens is another one if rounding hands out one of them anew.
                of_few_tokens = [is_of_one_expert(name) for name in names[step]]
                least = np.where(of_few_tokens, np.inf, least)
            yield from _out_of_line(
                _Found(
                    difference,
                    least,
                    least,
                    TENSOR_OUTLIER,
                    math.inf,  # in low precision kinds differ by more than a fault makes
                    lambda at, size, kind=kind, step=step: (  # type: ignore[misc]
                        f"its {kind} of {names[step][at]} at step {step} differs from the "
                        f"control's by {size:.2g} of its norm"
                    ),
                ),
                repeats,
            )


class TensorDistances(NamedTuple):
    """Relative differences to the control, by step and number of the repeat."""

    gradients: dict[int, dict[int, Floats]]
    """Arrays have shape (parameters,)."""
    updates: dict[int, dict[int, Floats]]
    lost: dict[int, Floats]
    """By step: what storing parameters in less than float32 may take of an update."""
    names: dict[int, tuple[str, ...]]
    """Of the parameters."""


def tensor_differences(control: Evidence, repeats: Sequence[Evidence]) -> TensorDistances:
    """How much repeats differ from the control in every tensor, at the steps that both sampled."""
    found = TensorDistances({}, {}, {}, {})
    stored = storage(control, control, 0.0)
    for number, repeat in enumerate(repeats):
        before: tuple[TensorSample, TensorSample] | None = None
        for ours, theirs in shared_samples(repeat, control):
            found.names[theirs.step] = theirs.names
            difference = gradient_difference(ours, theirs)
            if difference is not None:
                found.gradients.setdefault(theirs.step, {})[number] = difference
            if before is not None:
                found.updates.setdefault(theirs.step, {})[number] = update_difference(
                    (before[0], ours), (before[1], theirs)
                )
                moved = update(before[1], theirs)
                steps = theirs.step - before[1].step
                spacings = stored.spacings(theirs.names)
                found.lost[theirs.step] = lost_in_storing(moved, theirs, steps, spacings)
            before = ours, theirs
    return found
