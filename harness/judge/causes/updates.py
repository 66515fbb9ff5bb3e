"""C6 from sketches: weights that begin, move, or are kept differently.

No curve shows what a resume lost in the middle of a run. The first sample after it does: weights
have moved further than any update can, or are rounded, or those of a few parameters begin to differ
from the control's while all others agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import Context, loss_agrees, signal_name
from converge_harness.judge.causes.gradient_patterns import (
    MOST_FACTORS,
    NAMED,
    Sorting,
    common_multiple,
    sort,
    wrong_gradients,
)
from converge_harness.judge.causes.parameter_names import describe, joined, place_of
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.compare.curves import series
from converge_harness.judge.compare.floors import FIRST_STEPS, storage
from converge_harness.judge.compare.sketches import fit, rows_difference, update
from converge_harness.judge.compare.tensors import TensorComparison, TensorDifferences
from converge_harness.model import CauseClass, Floats, Integers, Precision, TensorSample

SAME_NORM = 1e-9
"""Norms in float64 of the same bits differ by no more, whatever the order of the sum."""
STILL = 1e-6
"""A tensor whose update has less than this share of the control's norm does not move."""


@signature(Basis.HELD, Stage.WEIGHTS, asked_of=(ComparisonKind.ORDINARY, ComparisonKind.DRAWING))
def initial(context: Context) -> Cause | None:
    """Training begins with other weights: then nothing else can be compared."""
    sample = context.sample(0)
    if not context.failed("same-initial-parameters") or sample is None or sample.initial is None:
        return None
    ours, theirs = sample.test.parameters, sample.control.parameters
    sorting = sort(ours.sketch, theirs.sketch, sample.initial)
    off = sample.initial.outside.tolist()
    swapped = _swapped(sample, off)
    look_at = (
        "what loads the initial weights: checkpoint.initial_load_path, the names that each "
        "pipeline stage asks for, and whether anything initialises again after loading"
    )
    if swapped:
        look_at = "which layers each pipeline stage loads: the names in its state dict; " + look_at
    elif sorting.factor_of_all is not None or (sorting.scaled and not sorting.turned):
        swapped = f"; scaled by {sorting.scaled[0].factor:.4g}"
    elif len(off) == len(sorting.judged):
        swapped = "; no checkpoint was loaded, or another one"
    sentence = (
        f"training does not begin with the control's weights: {initial_difference(sample)}{swapped}"
    )
    return Cause(sentence, CauseClass.STATE, look_at)


def initial_difference(sample: TensorComparison) -> str:
    """Which weights differ before the first step, and by how much; empty when none does."""
    found = sample.initial
    if found is None or not found.outside.size:
        return ""
    off = found.outside.tolist()
    names = [sample.names[index] for index in off]
    worst = [f"{sample.names[index]} by {found.difference[index]:.2g}" for index in off[:NAMED]]
    return (
        f"{describe(names, sample.names)} differ{'s' * (len(off) == 1)} before the first step "
        f"(worst {joined(worst)})"
    )


def _swapped(sample: TensorComparison, off: Sequence[int]) -> str:
    """Whether tensors have the sizes and norms of others of the control.

    A sketch depends on the tensor's name, so of different names only norms can be compared.
    """
    ours, theirs = sample.test.parameters.norm, sample.control.parameters.norm
    sizes = sample.control.sizes
    found = {}
    for index in off:
        same = (sizes == sizes[index]) & (np.abs(theirs - ours[index]) <= SAME_NORM * ours[index])
        same[index] = False
        if np.count_nonzero(same) == 1:
            found[sample.names[index]] = sample.names[int(np.flatnonzero(same)[0])]
    if not found:
        return ""
    layers = {(place_of(name).layer, place_of(other).layer) for name, other in found.items()}
    moved = sorted((a, b) for a, b in layers if a is not None and b is not None and a != b)
    if len(moved) == len(layers) and len(found) > 1:
        norms = joined(
            [f"layer {here} looks like the control's layer {there}" for here, there in moved]
        )
    else:
        norms = joined(
            [f"{name} looks like the control's {other}" for name, other in found.items()][:NAMED]
        )
    return f"; by its norms {norms}"


@signature(
    Basis.LATER_STATE,
    Stage.UPDATE,
    # Weights that do not change are not counted by the optimizer either.
    overrides=("counted_otherwise",),
)
def frozen(context: Context) -> Cause | None:
    """Parameters do not change although they have a gradient."""
    for before, sample in pairwise(context.compared.tensors):
        found = sample.updates
        if found is None or not found.outside.size:
            continue
        moved, should = (np.linalg.norm(each, axis=1) for each in _moves(before, sample))
        gradients = sample.test.gradients
        driven = gradients.norm > 0 if gradients is not None else np.ones_like(moved, np.bool_)
        still = np.flatnonzero((moved <= STILL * should) & (should > 0) & driven)
        if not set(still.tolist()) & set(found.outside.tolist()):
            return None  # the first wrong one moved; others that later do not follow from it
        names = [sample.names[index] for index in still]
        others = len(set(found.outside.tolist()) - set(still.tolist()))
        if others and sample.step == before.step + 1:
            return None  # within one step no parameter depends on another: all updates are wrong
        more = f"; {others} more move differently" if others else ""
        stay = "stays as it was" if len(names) == 1 else "stay as they were"
        sentence = (
            f"parameters do not move: {describe(names, sample.names)} {stay} from step "
            f"{before.step} to step {sample.step}, despite getting gradients{more}"
        )
        every = still.size == np.count_nonzero(should > 0)
        return Cause(sentence, CauseClass.FROZEN, _NO_STEP if every else _LEFT_OUT)
    return None


_NO_STEP = "whether the optimizer steps at all: skipped steps, the loss scaler, its learning rate"
_LEFT_OUT = (
    "the optimizer's parameter list: parameters left out, replaced after it was built (wrapping, "
    "sharding, tying), or in a group without learning rate"
)


@signature(Basis.LATER_TENSORS, Stage.UPDATE)
def updated(context: Context) -> Cause | None:
    """Gradients agree, and parameters move differently."""
    for before, sample in pairwise(context.compared.tensors):
        if sample.gradients is not None and sample.gradients.outside.size:
            return _unseen(before, sample, context)
        if sample.updates is not None and sample.updates.outside.size:
            return _other_update(before, sample, sample.updates, context)
    return None


def _unseen(before: TensorComparison, sample: TensorComparison, context: Context) -> Cause | None:
    """The first difference is a consequence of the first update, which is inside a wider limit."""
    if before.updates is None or sample.step > FIRST_STEPS:
        return None
    worst = int(np.argmax(before.updates.difference))
    start = context.sample(before.step - 1)
    decay = _decay(start, before, range(len(before.names)), context) if start else ""
    sentence = (
        f"the first update differs: the gradients of step {before.step} agree, those of step "
        f"{sample.step} do not; the update of {sample.names[worst]} is off by "
        f"{before.updates.difference[worst]:.2g}, within its limit of "
        f"{before.updates.limit[worst]:.2g}{decay}"
    )
    return Cause(sentence, CauseClass.UPDATE, _OPTIMIZER)


_OPTIMIZER = (
    "between gradient and weight: clipping (max_norm, by which norm, how often), the optimizer's "
    "class, betas, epsilon and weight decay, its state, and parameter groups with settings of "
    "their own"
)


def _other_update(
    before: TensorComparison, sample: TensorComparison, found: TensorDifferences, context: Context
) -> Cause:
    sorting = sort(*_moves(before, sample), found)
    among = [sample.names[index] for index in sorting.judged]
    names = [sample.names[index] for index in found.outside]
    since = "" if before.step == sample.step - 1 else f" since step {before.step}"
    head = f"gradients agree and the update differs at step {sample.step}{since}"
    tail = loss_agrees(context, sample.step)
    decay = _decay(before, sample, found.outside.tolist(), context)
    if decay:
        said, look_at = f"{describe(names, among)}{decay}", _DECAY
    elif sorting.scaled and not sorting.turned and len(sorting.scaled) <= MOST_FACTORS:
        said, look_at = _factors(sample, sorting, among), f"{_RATE}; {_OPTIMIZER}"
    else:
        worst = [
            f"{name} {_off_by(float(found.difference[index]))}"
            for name, index in zip(names[:NAMED], found.outside, strict=False)
        ]
        said = f"that of {describe(names, among)}, worst {joined(worst)}"
        look_at = _OPTIMIZER
    if sample.step > FIRST_STEPS:
        look_at = f"what changes after step {before.step}: {look_at}"
    return Cause(f"{head}: {said}{_still(found, names, context)}{tail}", CauseClass.UPDATE, look_at)


def _off_by(difference: float) -> str:
    return f"by {difference:.2g}" if np.isfinite(difference) else "where the control does not move"


def _still(found: TensorDifferences, off: Sequence[str], context: Context) -> str:
    """A clause if all that is off does not move in the control, as often with coarse weights."""
    stored = storage(context.compared.test, context.compared.control, 0.0)
    coarse = float(stored.spacings(off).max())
    if not coarse or np.isfinite(found.difference[found.outside]).any():
        return ""
    return (
        f"; weights are stored in steps of {coarse:.1g} of themselves here, so updates that hardly "
        "differ may be lost on one side alone"
    )


_DECAY = "the optimizer's weight decay, and which parameter groups it applies to"
_RATE = (
    "the learning rate that the optimizer really uses: its parameter groups, the scheduler's place"
)


def _moves(before: TensorComparison, sample: TensorComparison) -> tuple[Floats, Floats]:
    """Sketches of every parameter's update, in the test set and in the control."""
    return update(before.test, sample.test), update(before.control, sample.control)


def _factors(sample: TensorComparison, sorting: Sorting, among: Sequence[str]) -> str:
    parts = []
    for scaled in sorting.scaled:
        group = [sample.names[index] for index in scaled.members]
        parts.append(f"{describe(group, among)} move {scaled.factor:.4g} times as far")
    rest = f"; the other {len(sorting.right)} are right" if sorting.right else ""
    return joined(parts) + rest


def _decay(
    before: TensorComparison, sample: TensorComparison, off: Iterable[int], context: Context
) -> str:
    """A clause if the updates differ by a multiple of the weights: that is weight decay.

    The decoupled decay of AdamW moves a weight by ``- lr x decay x weight`` (Loshchilov and
    Hutter, "Decoupled weight decay regularization", 2019), whatever its gradient.
    """
    if before.step != sample.step - 1:
        return ""
    ours, theirs = _moves(before, sample)
    chosen = list(off)
    multiple = common_multiple((ours - theirs)[chosen], before.control.parameters.sketch[chosen])
    if multiple is None:
        return ""
    rate = series(context.compared.test, "lr").at(sample.step)
    known = f", so weight decay differs by {-multiple / rate:.3g}" if rate else ""
    return f"; the updates differ by {multiple:.3g} times the weights themselves{known}"


def first_part(context: Context) -> str:
    """A clause for other causes: which tensors differed first, at a later sample."""
    for sample in context.compared.tensors:
        wrong = wrong_gradients(sample)
        if wrong is not None:
            names, what = wrong.off, "gradients"
            if wrong.sorting.factor_of_all is not None:
                factor = wrong.sorting.factor_of_all.factor
                return f"; at step {sample.step} all gradients are {factor:.4g} times the control's"
        elif sample.updates is not None and sample.updates.outside.size:
            names, what = [sample.names[index] for index in sample.updates.outside], "updates"
        else:
            continue
        return (
            f"; of the sampled tensors the {what} of {describe(names, sample.names)} differ first, "
            f"at step {sample.step} (worst {names[0]})"
        )
    return ""


ADAM_REACH = 1.25
"""How far Adam moves the entries of a tensor per step, in learning rates, as root mean square.

The learning rate bounds it (Kingma and Ba, "Adam: a method for stochastic optimization", 2015,
section 2.1); weight decay adds a little.
"""
BEYOND = 1.6
"""Adam cannot move a tensor by more learning rates per step than this."""
BFLOAT16_LEAVES = (4e-4, 6e-3)
"""Relative difference of a tensor from itself rounded to bfloat16: 8 bits, and some training."""
ALL_ALIKE = 10.0
"""Rounding affects all tensors: the largest difference is at most this times the smallest."""
STANDS_OUT = 4.0
"""Multiple of the largest difference of all other tensors."""
ASIDE = 0.5
"""Largest residual of a factor, for an update to have the control's direction."""
NOTABLE = 0.2
"""Share of an update; a smaller difference shows nothing about single tensors."""

_NOTHING = 1e-12

_LOADED = (
    "what a resume between those steps saves and loads, by which names, and whether it is strict: "
    "weights, and the optimizer's state of each"
)
_SETTINGS = (
    "what changes between those steps for these parameters alone: learning rate, betas and weight "
    "decay of their group"
)


class _Parting(NamedTuple):
    """The first sample at which the runs differ, after the first steps."""

    before: TensorComparison
    sample: TensorComparison
    after: TensorComparison | None
    """The next sample."""

    @property
    def between(self) -> str:
        return f"between steps {self.before.step} and {self.sample.step}"


@signature(
    Basis.LATER_TENSORS,
    Stage.RESUME,
    # A move that no update can make is not rounding.
    overrides=("rounded",),
)
def moved_too_far(context: Context) -> Cause | None:
    """Weights moved once by more than an optimizer can with this learning rate."""
    parting = _parting(context)
    if parting is None or parting.after is None:
        return None
    before, sample, after = parting.before, parting.sample, parting.after
    control = _reach(before.control, sample.control, context)
    ours = _reach(before.test, sample.test, context)
    later = _reach(sample.test, after.test, context)
    if not control.max(initial=0.0) <= ADAM_REACH:
        return None
    far = np.flatnonzero(ours > BEYOND)
    # A rate that stays too high moves everything too far all the time.
    if not far.size or np.median(later[far]) > BEYOND:
        return None
    names = [sample.names[index] for index in far[np.argsort(-ours[far], kind="stable")]]
    sentence = (
        f"state is lost {parting.between}: {describe(names, sample.names)} move up to "
        f"{ours.max():.3g} learning rates a step, where the control moves at most "
        f"{control.max():.2g} and Adam hardly more than one, and not so later: weights were "
        f"replaced, or the optimizer lost its second moments{_seen(context)}"
    )
    return Cause(sentence, CauseClass.STATE, _LOADED)


@signature(
    Basis.LATER_TENSORS,
    Stage.RESUME,
    # All weights alike, not a few.
    overrides=("some_parted",),
)
def rounded(context: Context) -> Cause | None:
    """All weights differ by as much as rounding to bfloat16, and did not before."""
    parting = _parting(context)
    if parting is None or context.precision is not Precision.FP32:
        return None
    _, sample, _ = parting
    ours, theirs = sample.test.parameters, sample.control.parameters
    known = theirs.norm > 0
    off = np.linalg.norm(ours.sketch - theirs.sketch, axis=1)[known] / theirs.norm[known]
    least, most = BFLOAT16_LEAVES
    if not off.size or not least <= off.min() <= off.max() <= most:
        return None
    if off.max() > ALL_ALIKE * off.min():
        return None
    sentence = (
        f"weights are rounded {parting.between}: each of {off.size} parameters differs from the "
        f"control's by {off.min():.1g} to {off.max():.1g} of itself, as by rounding to bfloat16"
        f"{_seen(context)}"
    )
    look_at = (
        "what stores or exports weights in lower precision and is loaded again "
        "(checkpoint.export_dtype, last_save_model_only)"
    )
    return Cause(sentence, CauseClass.STATE, look_at)


@signature(Basis.LATER_TENSORS, Stage.RESUME)
def some_parted(context: Context) -> Cause | None:
    """A few parameters begin to differ from the control, and their gradients do not."""
    parting = _parting(context)
    if parting is None or _gradients_first(context):
        return None
    sample = parting.sample
    few, rest = _standing_out(sample)
    if not few.size or not _outside(sample, few) or _by_gradient(sample, few):
        return None
    one = few.size == 1
    head = f"{describe([sample.names[index] for index in few], sample.names)} part{'s' * one}"
    head += (
        f" from the control by {_differences(sample)[few].max():.2g} of the update, and not by "
        f"{'its gradient' if one else 'their gradients'}, while the furthest of all others is off "
        f"by {rest:.2g}"
    )
    factors = _factors_of_few(parting, few)
    if factors is not None:
        least, most = f"{min(factors):.3g}", f"{max(factors):.3g}"
        by = least if least == most else f"{least} to {most}"
        sentence = f"updates begin to differ {parting.between}: {head}; moved {by} times as far"
        return Cause(f"{sentence}{_seen(context)}", CauseClass.UPDATE, _SETTINGS)
    if parting.after is None:  # it may have happened once, or go on
        sentence = f"the runs part {parting.between}: {head}{_seen(context)}"
        return Cause(sentence, CauseClass.LATER, f"{_LOADED}; {_SETTINGS}")
    if _gap(parting.after, few) > _gap(sample, few) / 2:
        sentence = f"updates begin to differ {parting.between}: {head}, and as much later"
        return Cause(f"{sentence}{_seen(context)}", CauseClass.UPDATE, _SETTINGS)
    sentence = (
        f"state is lost {parting.between}: {head}: the weights or the optimizer state of "
        f"{'it' if one else 'these'} alone were lost or exchanged{_seen(context)}"
    )
    return Cause(sentence, CauseClass.STATE, _LOADED)


def _gradients_first(context: Context) -> bool:
    """Whether the first difference is the gradient norm, with a correct loss."""
    norm, first = context.curve("grad_norm"), context.first_failure()
    if norm is None:
        return True  # not known
    return first is not None and norm.onset == first and bool(context.agrees("loss", first))


def _parting(context: Context) -> _Parting | None:
    samples = context.compared.tensors
    for number, (before, sample) in enumerate(pairwise(samples), start=1):
        if sample.updates is not None and sample.updates.outside.size:
            after = samples[number + 1] if number + 1 < len(samples) else None
            return _Parting(before, sample, after) if sample.step > FIRST_STEPS else None
        if sample.gradients is not None and sample.gradients.outside.size:
            return None
    return None


def _reach(before: TensorSample, sample: TensorSample, context: Context) -> Floats:
    """Shape (parameters,): how far entries moved, in learning rates of the control per step."""
    moved = np.linalg.norm(update(before, sample), axis=1) / np.sqrt(np.maximum(sample.sizes, 1))
    schedule = series(context.compared.control, "lr")
    steps = (schedule.steps > before.step) & (schedule.steps <= sample.step)
    rates = float(np.sum(schedule.values[steps]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(moved / rates, dtype=np.float64)


def _differences(sample: TensorComparison) -> Floats:
    """Shape (parameters,): of updates; 0 where one is not known.

    That is where they were not compared, where storing the weights may round off a whole update,
    and where it did so in the control: a ratio to nothing is no measure.
    """
    found = sample.updates
    if found is None:
        return np.zeros(len(sample.names))
    known = np.isfinite(found.difference) & np.isfinite(found.limit)
    return np.where(known, found.difference, 0.0)


def _standing_out(sample: TensorComparison) -> tuple[Integers, float]:
    """The few parameters that are far off, furthest first, and how far the next one is."""
    difference = _differences(sample)
    order = np.argsort(-difference, kind="stable")
    falling = np.maximum(difference[order], _NOTHING)
    half = falling.size // 2
    with np.errstate(invalid="ignore"):  # of two infinite differences neither stands out
        gaps = np.nan_to_num(falling[:half] / falling[1 : half + 1], nan=1.0, posinf=np.inf)
    if not half or not gaps.max() >= STANDS_OUT:
        return order[:0], 0.0
    count = int(np.argmax(gaps)) + 1
    few = order[:count] if falling[count - 1] >= NOTABLE else order[:0]
    return few, float(falling[count])


def _outside(sample: TensorComparison, few: Integers) -> bool:
    """Whether any of these is outside its limit: in low precision only others may be."""
    return sample.updates is not None and bool(np.isin(few, sample.updates.outside).any())


def _by_gradient(sample: TensorComparison, few: Integers) -> bool:
    """Whether the gradients of these parameters stand out, too."""
    ours, theirs = sample.test.gradients, sample.control.gradients
    if sample.gradients is None or ours is None or theirs is None:
        return True
    difference = rows_difference(ours, theirs)  # also of a single expert, by itself
    others = np.delete(difference, few)
    return bool(difference[few].max() > 2 * others.max(initial=0.0))


def _factors_of_few(parting: _Parting, few: Integers) -> list[float] | None:
    """Factors of these updates to the control's; None if the directions differ."""
    before, sample = parting.before, parting.sample
    ours, theirs = update(before.test, sample.test), update(before.control, sample.control)
    fits = [fit(ours[index], theirs[index]) for index in few]
    along = all(each.residual < min(ASIDE, abs(1 - each.factor)) for each in fits)
    return [each.factor for each in fits] if along else None


def _gap(sample: TensorComparison, few: Integers) -> float:
    """The smallest difference of these over the largest of the others."""
    difference = np.maximum(_differences(sample), _NOTHING)
    return float(difference[few].min() / np.delete(difference, few).max())


def _seen(context: Context) -> str:
    """A clause on what the curves show of it, and when."""
    off = context.off()
    return f"; {signal_name(off[0])} leaves the control at step {off[0].onset}" if off else ""
