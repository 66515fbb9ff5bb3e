"""C6 from sketches: other weights to begin with, and right gradients that move them otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from harness.judge.causes.cause import Cause
from harness.judge.causes.groups import describe, joined, place_of
from harness.judge.causes.sorting import MOST_FACTORS, Sorting, common_multiple, sort
from harness.judge.causes.wrong import NAMED, wrong_gradients
from harness.judge.curves import series
from harness.judge.floors import FIRST_STEPS
from harness.judge.scene import Scene, loss_agrees
from harness.judge.sketches import update
from harness.judge.storage import storage
from harness.judge.tensors import TensorComparison, TensorDifferences
from harness.model import CauseClass, Floats

SAME_NORM = 1e-9
"""Norms in float64 of the same bits differ by no more: any order of the sum."""
STILL = 1e-6
"""A tensor whose update has less than this of the control's length does not move."""


def initial(scene: Scene) -> Cause | None:
    """Training begins with other weights: nothing else can then be compared."""
    sample = scene.sample(0)
    if not scene.failed("same-initial-parameters") or sample is None or sample.initial is None:
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
        f"training does not begin with the control's weights: {initial_words(sample)}{swapped}"
    )
    return Cause(sentence, CauseClass.STATE, look_at)


def initial_words(sample: TensorComparison) -> str:
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
    """Whether tensors have the sizes and norms of others of the control: sketches cannot tell.

    A sketch depends on the tensor's name, so only norms of different names can be compared.
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
        words = joined(
            [f"layer {here} looks like the control's layer {there}" for here, there in moved]
        )
    else:
        words = joined(
            [f"{name} looks like the control's {other}" for name, other in found.items()][:NAMED]
        )
    return f"; by its norms {words}"


def frozen(scene: Scene) -> Cause | None:
    """Parameters stay where they are although they have a gradient."""
    for before, sample in pairwise(scene.case.tensors):
        found = sample.updates
        if found is None or not found.outside.size:
            continue
        moved, should = (np.linalg.norm(each, axis=1) for each in _moves(before, sample))
        gradients = sample.test.gradients
        driven = gradients.norm > 0 if gradients is not None else np.ones_like(moved, np.bool_)
        still = np.flatnonzero((moved <= STILL * should) & (should > 0) & driven)
        if not set(still.tolist()) & set(found.outside.tolist()):
            return None  # the first to go wrong moved; what stands still later follows from it
        names = [sample.names[index] for index in still]
        others = len(set(found.outside.tolist()) - set(still.tolist()))
        if others and sample.step == before.step + 1:
            return None  # within one step no parameter follows another: all updates are wrong
        more = f"; {others} more move otherwise" if others else ""
        stay = "stays as it was" if len(names) == 1 else "stay as they were"
        sentence = (
            f"parameters do not move: {describe(names, sample.names)} {stay} from step "
            f"{before.step} to step {sample.step}, in spite of a gradient{more}"
        )
        every = still.size == np.count_nonzero(should > 0)
        return Cause(sentence, CauseClass.FROZEN, _NO_STEP if every else _LEFT_OUT)
    return None


_NO_STEP = "whether the optimizer steps at all: skipped steps, the loss scaler, its learning rate"
_LEFT_OUT = (
    "the optimizer's parameter list: parameters left out, replaced after it was built (wrapping, "
    "sharding, tying), or in a group without learning rate"
)


def updated(scene: Scene) -> Cause | None:
    """Gradients agree, and parameters move otherwise."""
    for before, sample in pairwise(scene.case.tensors):
        if sample.gradients is not None and sample.gradients.outside.size:
            return _unseen(before, sample, scene)
        if sample.updates is not None and sample.updates.outside.size:
            return _other_update(before, sample, sample.updates, scene)
    return None


def _unseen(before: TensorComparison, sample: TensorComparison, scene: Scene) -> Cause | None:
    """The first thing off is what the first update led to: it is within its own, wider limit."""
    if before.updates is None or sample.step > FIRST_STEPS:
        return None
    worst = int(np.argmax(before.updates.difference))
    start = scene.sample(before.step - 1)
    decay = _decay(start, before, range(len(before.names)), scene) if start else ""
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
    before: TensorComparison, sample: TensorComparison, found: TensorDifferences, scene: Scene
) -> Cause:
    sorting = sort(*_moves(before, sample), found)
    among = [sample.names[index] for index in sorting.judged]
    names = [sample.names[index] for index in found.outside]
    since = "" if before.step == sample.step - 1 else f" since step {before.step}"
    head = f"gradients agree and the update differs at step {sample.step}{since}"
    tail = loss_agrees(scene, sample.step)
    decay = _decay(before, sample, found.outside.tolist(), scene)
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
    return Cause(f"{head}: {said}{_still(found, names, scene)}{tail}", CauseClass.UPDATE, look_at)


def _off_by(difference: float) -> str:
    return f"by {difference:.2g}" if np.isfinite(difference) else "where the control stands still"


def _still(found: TensorDifferences, off: Sequence[str], scene: Scene) -> str:
    """Whether all that is off stands still in the control, which coarse weights often do."""
    stored = storage(scene.case.test, scene.case.control, 0.0)
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
    """Sketches of what every parameter moved by: in the test set and in the control."""
    return update(before.test, sample.test), update(before.control, sample.control)


def _factors(sample: TensorComparison, sorting: Sorting, among: Sequence[str]) -> str:
    parts = []
    for scaled in sorting.scaled:
        group = [sample.names[index] for index in scaled.members]
        parts.append(f"{describe(group, among)} move {scaled.factor:.4g} times as far")
    rest = f"; the other {len(sorting.right)} are right" if sorting.right else ""
    return joined(parts) + rest


def _decay(
    before: TensorComparison, sample: TensorComparison, off: Iterable[int], scene: Scene
) -> str:
    """Whether the updates differ by a multiple of the weights: that is weight decay.

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
    rate = series(scene.case.test, "lr").at(sample.step)
    known = f", so weight decay differs by {-multiple / rate:.3g}" if rate else ""
    return f"; the updates differ by {multiple:.3g} times the weights themselves{known}"


def first_part(scene: Scene) -> str:
    """Which tensors parted first, at a later sample, for the words of other causes."""
    for sample in scene.case.tensors:
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
            f"; of the sampled tensors the {what} of {describe(names, sample.names)} part first, "
            f"at step {sample.step} (worst {names[0]})"
        )
    return ""
