"""C5: the reported number is wrong, and training is not.

With the probe, a reported number is compared with the one recomputed in the same run: how it is
wrong (:func:`way_of`), and to which part of the model a grad norm belongs (the squares of norms add
up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import (
    CONSTANT,
    Context,
    is_one_factor,
    off_at_first_step,
    ratio_text,
    signal_name,
)
from converge_harness.judge.causes.factors import Match, named_factor
from converge_harness.judge.causes.location import stage_clause
from converge_harness.judge.causes.parameter_names import depth_of, describe, layers_of, role_of
from converge_harness.judge.causes.signature import (
    EVERY,
    Basis,
    Cause,
    ComparisonKind,
    Stage,
    signature,
)
from converge_harness.judge.compare.reported import Agreement, agreement
from converge_harness.judge.degrees import max_norm
from converge_harness.model import CauseClass, Flags, Floats, Integers, Outcome, Precision

_LOGGED = {
    "loss": "where the loss is reduced for logging: dist_sum or dist_mean, over which mesh, and "
    "whether its placement is Partial",
    "grad_norm": "where the norm is computed for logging and clipping: over which mesh and "
    "pipeline stages it is summed",
}
_LOGGED_ELSEWHERE = {
    "loss": "where the loss is reduced for logging: over which ranks and microbatches it is added "
    "up, and by how many tokens or ranks it is divided",
    "grad_norm": "where the norm is computed for logging and clipping: over which ranks and shards "
    "it is summed",
}
"""The same where the code is not known."""
_TRAINED = (
    "same-initial-parameters",
    "renamed-parameters-agree",
    "gradients-first-steps",
    "updates-first-steps",
    "gradients-envelope",
    "updates-envelope",
    "clipping-first-steps",
    "clipping-envelope",
    "optimizer-steps",
    "optimizer-state-first-steps",
    "optimizer-state-envelope",
    "buffers-first-steps",
    "buffers-envelope",
)
"""Checks of the training itself, besides the recomputed curves."""
_TENSORS = {name for name in _TRAINED if name.startswith(("gradients-", "updates-"))}
_HARDLY = 8.0
"""Multiple of its limit: a tensor beyond that is wrong, whatever its limit was learnt from. Correct
PP and accumulation reach 6 in mixed bf16, where limits are learnt from moved weights alone."""
_CLEARLY = 0.3
"""Gradients count as agreeing although the loss differs when they are off by less than this share
of its difference: another objective has other gradients, whatever a coarse limit says."""
_MOSTLY = 0.5
"""Share of a reported difference that recomputed values may have, for it to be misreported."""


@signature(
    Basis.FIRST_TENSORS,
    Stage.REPORT,
    # It compares what one run reports and computes, so it does not depend on another run.
    overrides=(
        "drawn_otherwise",
        "other_masks",
        "loss_of_right_gradients",
        "loss_scaled_alone",
    ),
    asked_of=EVERY,
)
def metric_only(context: Context) -> Cause | None:
    """The reported number is wrong, the recomputed one right."""
    recomputed = [
        envelope
        for signal, envelope in context.compared.envelopes.items()
        if signal.endswith("_recomputed")
    ]
    if not recomputed:
        return None
    failed = [name for name in _TRAINED if context.failed(name)]
    trained = not any(each.onset is not None for each in recomputed)
    trained = trained and (not failed or _hardly(failed, context))
    for signal in ("loss", "grad_norm"):
        reported = context.compared.envelopes.get(signal)
        if reported is None or reported.onset is None:
            continue
        first = reported.index_of(reported.onset)
        if not _misreported(signal, context, reported.onset):
            continue
        way = way_of(signal, context)
        said = (
            f"only the metric is wrong: the reported {signal_name(reported)} is "
            f"{ratio_text(reported, first)} times the control's at step {reported.steps[first]}"
            f"{way.text or context.factor(reported)}, while the recomputed values agree"
        )
        look_at = "; ".join(text for text in (way.where, _logged(signal, context)) if text)
        if trained:
            right = f"training itself is right{_unless(context)}"
            if signal == "loss":
                right = _training(context, abs(float(context.ratio(reported)[0][first]) - 1))
            sentence = f"{said}{_norm_too(signal, context)}: {right}"
            return Cause(sentence, CauseClass.METRIC_ONLY, look_at)
        parted = _clipped(context, reported.onset) if signal == "grad_norm" else None
        if parted is not None:
            sentence = (
                f"{said} there: a wrong norm, and clipping uses it, so training follows "
                f"(off from step {parted} on)"
            )
            return Cause(sentence, CauseClass.METRIC_ONLY, look_at)
    return None


def _hardly(failed: Sequence[str], context: Context) -> bool:
    """Whether only tensors failed, and below fp32 just outside their limits.

    Correct implementations differ there by more than few repeats of the control show. The reported
    and the recomputed value are compared within one run.
    """
    if context.precision is Precision.FP32 or not set(failed) <= _TENSORS:
        return False
    kinds = (kind for each in context.compared.tensors for kind in (each.gradients, each.updates))
    furthest = max((float(kind.excess.max()) for kind in kinds if kind is not None), default=0.0)
    return furthest <= _HARDLY


def _training(context: Context, share: float) -> str:
    """What is known of training when the reported loss is off by ``share``, relative.

    An objective that differs by so much changes gradients by as much. In low precision that may be
    inside their limits.
    """
    sample = next((each for each in context.compared.tensors if each.gradients is not None), None)
    if context.precision is Precision.FP32 or sample is None or sample.gradients is None:
        return "training itself is right"
    furthest = float(sample.gradients.difference.max(initial=0.0))
    if furthest <= _CLEARLY * share:
        return "training itself is right"
    return (
        f"training agrees as far as {context.precision.value} arithmetic shows (gradients to "
        f"{furthest:.1g}), which would not show an objective that is off by as much; the same pair "
        "in fp32 would"
    )


def _logged(signal: str, context: Context) -> str:
    """Where to look for the code that reports a signal."""
    spec = context.compared.spec
    guided = spec is not None and spec.trainer.can.guided
    return (_LOGGED if guided else _LOGGED_ELSEWHERE)[signal]


def _misreported(signal: str, context: Context, step: int) -> bool:
    """Whether most of a difference is between what one run reports and what it computes.

    A recomputed value inside a coarse limit may be off by as much as the reported one.
    """
    reported, truth = (
        context.compared.envelopes.get(name) for name in (signal, f"{signal}_recomputed")
    )
    if reported is None or truth is None or step not in truth.steps:
        return True  # nothing contradicts it
    said, true = reported.index_of(step), truth.index_of(step)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        whole = reported.test[said] / reported.control[said]
        own = truth.test[true] / truth.control[true]
        return bool(not abs(whole / own - 1) < _MOSTLY * abs(whole - 1))


def _unless(context: Context) -> str:
    """What is known of the norm that clipping used."""
    if context.outcome("clipping-first-steps") is Outcome.PASS:
        return ", clipping too"
    return ", unless clipping uses that norm"


def _norm_too(signal: str, context: Context) -> str:
    """Whether the other metric is wrong as well."""
    norm = context.compared.envelopes.get("grad_norm")
    if signal == "grad_norm" or norm is None or norm.onset is None:
        return ""
    return f"; the reported grad norm is wrong, too{way_of('grad_norm', context).text}"


def _clipped(context: Context, onset: int) -> int | None:
    """When training began to differ, if only after a first step whose norm was misreported."""
    norm, sample = context.compared.envelopes.get("grad_norm_recomputed"), context.sample(onset)
    if (
        norm is None
        or not context.agrees("grad_norm", onset)
        or context.agrees("loss", onset) is False
    ):
        return None
    if sample is not None and sample.gradients is not None and sample.gradients.outside.size:
        return None
    if not context.failed("reported-grad-norm-is-recomputed"):
        return None
    parted = context.first_failure(
        "grad-norm-first-step", "grad-norm-envelope", "reported-grad-norm-is-recomputed"
    )
    return parted if parted is not None and parted >= onset else None


@signature(
    Basis.FIRST_TENSORS,
    Stage.REPORT,
    # All gradients agree, not only the norm.
    overrides=("loss_scaled_alone",),
)
def loss_of_right_gradients(context: Context) -> Cause | None:
    """A loss that differs although every gradient of it agrees."""
    loss, sample = context.curve("loss"), context.sample(1)
    if loss is None or not off_at_first_step(loss) or int(loss.steps[0]) != 1:
        return None
    if sample is None or sample.gradients is None or sample.gradients.outside.size:
        return None
    if context.agrees("grad_norm", 1) is False or context.failed("same-initial-parameters"):
        return None
    worst = sample.gradients.worst
    if not sample.gradients.difference[worst] <= _CLEARLY * loss.difference[0]:
        return None
    sentence = (
        f"only the loss as a number is wrong: {signal_name(loss)} is {ratio_text(loss, 0)} times "
        f"the control's at step 1{context.factor(loss)}, while the gradients of all "
        f"{len(sample.names)} parameters agree (the furthest to "
        f"{sample.gradients.difference[worst]:.1g})"
    )
    return Cause(sentence, CauseClass.METRIC_ONLY, _logged("loss", context))


@signature(
    Basis.FIRST_TENSORS, Stage.REPORT, asked_of=(ComparisonKind.ORDINARY, ComparisonKind.CURVES)
)
def loss_scaled_alone(context: Context) -> Cause | None:
    """C5 without a probe: a scaled objective would scale the gradients too."""
    loss, norm = context.compared.envelopes.get("loss"), context.curve("grad_norm")
    if (
        "loss_recomputed" in context.compared.envelopes
        or loss is None
        or norm is None
        or norm.onset is not None
    ):
        return None
    factor = context.factor(loss) if loss.onset is not None else ""
    constant = loss.onset is not None and is_one_factor(context.ratio(loss)[0])
    if not (factor or constant):
        return None
    sentence = (
        f"probably only the metric is wrong: the loss is {ratio_text(loss, 0)} times the control's"
        f"{factor}, while the grad norm agrees at every step"
    )
    return Cause(sentence, CauseClass.METRIC_ONLY, _logged("loss", context))


@signature(
    Basis.LEFT_OVER,
    Stage.REPORT,
    # A table that is off by rounding is weak evidence.
    overrides=("rounded_tables",),
)
def contradiction(context: Context) -> Cause | None:
    """Everything agrees with the control except what the run reports of itself."""
    for signal in ("loss", "grad_norm"):
        name = f"reported-{signal.replace('_', '-')}-is-recomputed"
        others = [
            check.name
            for check in context.checks.values()
            if check.name != name and check.outcome is Outcome.FAIL
        ]
        if context.failed(name) and not others:
            sentence = (
                f"only the metric is wrong: the {signal.replace('_', ' ')} that is "
                f"{context.detail(name)}{way_of(signal, context).text}, while all that was "
                "compared with the control agrees"
            )
            if (
                signal == "loss"
                and (compared := agreement(context.compared.test, signal)) is not None
            ):
                share = float(compared.difference.max(initial=0.0))
                sentence += f": {_training(context, share)}"
            return Cause(sentence, CauseClass.METRIC_ONLY, _logged(signal, context))
    return None


_FEWEST = 3
"""Least steps for any way but a named factor: a single number fits many formulas."""
_MANTISSAS = {"bfloat16": 8, "float16": 11}
"""Bits of the significand, with the implicit one (IEEE 754, and bfloat16 as torch has it)."""
_NEAR = 3.0
"""Multiple of the limit of agreement: nothing drifts between two numbers of one run."""
_MOST_SHARE = 0.9
"""Largest weight of a new value in a running mean; with more it is hardly one."""
_TWICE = 2.0
"""A sum of two rounded numbers is off by at most so many times the rounding of one."""


class Way(NamedTuple):
    """How a metric is wrong."""

    text: str = ""
    """A clause with a leading comma; empty when the run reports what it computes."""
    where: str = ""
    """What to look at in addition."""


def way_of(signal: str, context: Context) -> Way:
    """How ``loss`` or ``grad_norm`` is misreported; the first way that fits, most certain first."""
    compared = agreement(context.compared.test, signal)
    if compared is None or not compared.outside.size:
        return Way()
    known = (way for look in _WAYS if (way := look(compared, context)))
    return next(known, Way())


def _factor(compared: Agreement, context: Context) -> Way | None:
    """One factor, or a number of the run: nothing drifts, so it fits nearly exactly.

    At the steps that are off: the others may be correct.
    """
    off = np.isin(compared.steps, compared.outside)
    ratio, steps = _ratio(compared)[off], compared.steps[off]
    near = _NEAR * compared.limit.value
    few = "" if off.all() else f" at {steps.size} of {off.size} steps"
    text = _named(ratio, steps, context, Match(near, near))
    if text:
        return Way(f"{few}, which equals {text}")
    if compared.signal == "grad_norm":  # squares of norms add up, or are averaged
        text = _named(ratio**2, steps, context, Match(2 * near, 2 * near))
        if text:
            return Way(f"{few}, which equals the square root of {text}")
    return None


def _constant(compared: Agreement, _: Context) -> Way | None:
    """One factor that equals nothing known, at the steps that are off."""
    off = np.isin(compared.steps, compared.outside)
    ratio, near = _ratio(compared)[off], _NEAR * compared.limit.value
    middle = float(np.median(ratio))
    if ratio.size < _FEWEST or abs(middle - 1) <= _NEAR * near:
        return None
    if not np.all(np.abs(ratio - middle) <= near * abs(middle)):
        return None
    where = "every step" if off.all() else f"{ratio.size} of {off.size} steps"
    return Way(f", the same {middle:.6g} times the recomputed one at {where}")


def _late(compared: Agreement, _: Context) -> Way | None:
    """Each value is that of the step before."""
    if compared.steps.size < _FEWEST or not np.all(np.diff(compared.steps) == 1):
        return None
    if not _same(compared.reported[1:], compared.recomputed[:-1], compared):
        return None
    return Way(
        ", one step late: each value is the recomputed one of the step before",
        "when the value is copied from the device: an asynchronous copy, or a buffer used again",
    )


def _stale(compared: Agreement, _: Context) -> Way | None:
    """The value no longer changes, while the recomputed one does."""
    still = np.diff(compared.reported) == 0
    moving = np.diff(compared.recomputed) != 0
    stays = still & moving & np.isin(compared.steps[1:], compared.outside)
    last = int(np.flatnonzero(~stays)[-1]) + 1 if not stays.all() else 0
    if stays.size - last < _FEWEST:
        return None
    return Way(
        f", the same value at every step from step {compared.steps[last]} on",
        "when the value is computed anew and copied from the device",
    )


def _running_mean(compared: Agreement, _: Context) -> Way | None:
    """An exponential mean over steps: each value moves by a fixed share to the recomputed one."""
    if compared.steps.size <= _FEWEST:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.diff(compared.reported) / (compared.recomputed[1:] - compared.reported[:-1])
    share = float(np.median(shares))
    if not 0 < share < _MOST_SHARE or not np.all(np.abs(shares - share) <= CONSTANT * share):
        return None
    return Way(f", a running mean over steps: each takes {share:.3g} of the recomputed one")


def _formula(compared: Agreement, _: Context) -> Way | None:
    """A root that is missing or taken twice, a perplexity."""
    value = compared.recomputed
    with np.errstate(invalid="ignore", over="ignore"):
        formulas = {
            "the square of the recomputed one": value**2,
            "the square root of the recomputed one": np.sqrt(value),
            "the exponential of the recomputed one": np.exp(value),
        }
    for text, expected in formulas.items():
        if _same(compared.reported, expected, compared):
            return Way(f", {text}")
    return None


def _clipped_norm(compared: Agreement, context: Context) -> Way | None:
    """The norm after clipping."""
    most = max_norm(context.in_force, context.compared.test.keys)
    if compared.signal != "grad_norm" or most is None:
        return None
    if not _same(compared.reported, np.minimum(compared.recomputed, most), compared):
        return None
    return Way(
        f", the recomputed one after clipping to {most:g}",
        "whether the norm is taken before or after clipping",
    )


def _part(compared: Agreement, context: Context) -> Way | None:
    """The norm of a part of the model."""
    text = part_text(compared, context) if compared.signal == "grad_norm" else ""
    return Way(f", {text}") if text else None


def _rounded(compared: Agreement, _: Context) -> Way | None:
    """Every value is rounded to a coarser format."""
    fraction = np.frexp(compared.reported)[0]
    for name, bits in _MANTISSAS.items():
        steps = fraction * 2.0**bits
        near = compared.difference <= _TWICE * 2.0**-bits
        if np.all(steps == np.round(steps)) and np.all(near):
            return Way(
                f", as rounded to {name}", "in which precision the value is summed and reduced"
            )
    return None


def _varying(compared: Agreement, context: Context) -> Way | None:
    """Another factor at every step."""
    off = np.isin(compared.steps, compared.outside)
    ratio, steps = _ratio(compared)[off], compared.steps[off]
    if not np.all(np.isfinite(ratio)):
        return None
    spread = f"from {ratio.min():.6g} to {ratio.max():.6g} times the recomputed one"
    about = _named(ratio, steps, context, Match())
    if about:
        return Way(
            f", {spread}: about {about}; the part of one rank or microbatch would look the same"
        )
    return Way(f", {spread}, by no single factor")


_WAYS: tuple[Callable[[Agreement, Context], Way | None], ...] = (
    _clipped_norm,
    _factor,
    _late,
    _constant,
    _stale,
    _running_mean,
    _formula,
    _part,
    _rounded,
    _varying,
)


def _ratio(compared: Agreement) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(compared.reported / compared.recomputed, dtype=np.float64)


def _named(ratio: Floats, steps: Integers, context: Context, match: Match) -> str:
    return named_factor(ratio, steps, context.compared.test, context.compared.control, match).text


def _same(values: Floats, expected: Floats, compared: Agreement) -> bool:
    """Whether values agree as well as a report should, at enough steps to be sure."""
    allowed = compared.limit.value * np.abs(expected)
    return values.size >= _FEWEST - 1 and bool(np.all(np.abs(values - expected) <= allowed))


_FEWEST_SAMPLES = 2
_SHARE = 0.3
"""Share of the limit of agreement for the norm of a part: there are many parts that could fit."""


class _Part(NamedTuple):
    """A sum of squares over some parameters, each counted a number of times."""

    times: Floats
    """Shape (parameters,)."""
    text: str


def part_text(compared: Agreement, context: Context) -> str:
    """``the norm of layers 2-3 alone``; empty where no part fits, or several do."""
    at = {int(step): index for index, step in enumerate(compared.steps)}
    samples = [each for each in context.compared.test.samples if each.step in at and each.gradients]
    if len(samples) < _FEWEST_SAMPLES:
        return ""
    names = samples[0].names
    squares = np.array([each.gradients.norm**2 for each in samples if each.gradients])
    reported = np.array([compared.reported[at[each.step]] for each in samples])
    allowed = _SHARE * compared.limit.value * reported
    found: dict[bytes, str] = {}
    for part in _parts(names, context):
        if np.all(np.abs(np.sqrt(squares @ part.times) - reported) <= allowed):
            found.setdefault(part.times.tobytes(), part.text)
    return next(iter(found.values())) if len(found) == 1 else ""


def _parts(names: Sequence[str], context: Context) -> Iterator[_Part]:
    for chosen in _choices(names):
        if chosen.all() or not chosen.any():
            continue
        for kept in (chosen, ~chosen):
            yield _Part(kept.astype(np.float64), _alone(kept, names, context))
        which = describe(_chosen(names, chosen), names)
        for name, degree in context.degrees.items():
            if isinstance(degree, int) and degree > 1:
                text = f"{which} counted {degree} times, once by each {name} rank"
                more = (degree - 1) * chosen.astype(np.float64)
                yield _Part(np.asarray(1.0 + more, dtype=np.float64), f"the norm with {text}")


def _alone(kept: Flags, names: Sequence[str], context: Context) -> str:
    """What is in it or what is left out, whichever is shorter; for a stage, what it holds."""
    inside, outside = _chosen(names, kept), _chosen(names, ~kept)
    stage = stage_clause(inside, names, context)
    if len(inside) > len(outside) and not stage:
        return f"the norm without {describe(outside, names)}"
    return f"the norm of {describe(inside, names)}{stage} alone"


def _chosen(names: Sequence[str], flags: Flags) -> list[str]:
    return [name for name, here in zip(names, flags, strict=True) if here]


def _choices(names: Sequence[str]) -> Iterator[Flags]:
    """The beginnings of the model, each kind of parameter, each parameter."""
    layers = layers_of(names)
    if layers:
        depths = np.array([depth_of(name, layers[-1]) for name in names])
        yield from (depths < cut for cut in range(layers[-1] + 2))
    roles = [role_of(name) for name in names]
    yield from (np.array([role is each for role in roles]) for each in dict.fromkeys(roles))
    yield from np.eye(len(names), dtype=np.bool_)
