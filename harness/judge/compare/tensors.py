"""Every parameter's gradient and update against the control's, with a limit for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from converge_harness.judge.compare.experts import (
    FEW_TOKENS,
    SAME_TOKENS,
    equal_shares,
    is_of_one_expert,
    together,
)
from converge_harness.judge.compare.floors import (
    FIRST_STEPS,
    GRADIENT_FLOORS,
    SAME_WEIGHTS,
    SIGN_STEPS,
    SPACING_FLOAT32,
    TENSOR_CEILING,
    TENSOR_ROUNDING,
    TURNED_SIGNS,
    UPDATE_FLOORS,
    Floor,
    coarser,
    spacing,
    storage,
)
from converge_harness.judge.compare.limits import (
    FIRST_JUMP,
    HasLimits,
    applicable,
    jumps,
    tensor_multiple,
    widest_scale,
)
from converge_harness.judge.compare.sketches import (
    gradient_difference,
    relative,
    shared_samples,
    update,
    update_difference,
)
from converge_harness.model import (
    Calibration,
    Deviation,
    Evidence,
    Flags,
    Floats,
    Integers,
    Precision,
    TensorSample,
)

MOST_DEVIATIONS = 20
FALLEN_CEILING = 0.95
"""Largest limit of a gradient that has become small: one of twice or half the length is 1.0 off."""
NOT_MOVED = 1.0
"""The difference of a missing update; that of a missing gradient is infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorDifferences(HasLimits):
    """Relative differences of one kind (gradients, say) at one step, per parameter."""

    difference: Floats
    limit: Floats
    learnt: Flags
    """Where the limit comes from repeats of the control, and not from a floor."""
    floor_origin: str
    learnt_origin: str = ""
    chaotic: Flags | None = None
    """Where repeats of the control differ so much that nothing is judged; None: nowhere."""

    @property
    def is_outside(self) -> Flags:
        """Whether each tensor is outside its limit; one that is NaN is."""
        outside: Flags = ~(self.difference <= self.limit)
        return outside

    @property
    def outside(self) -> Integers:
        """Indices of the tensors outside their limits, the largest excess first."""
        excess = self.excess
        wrong = np.flatnonzero(self.is_outside)
        return wrong[np.argsort(-excess[wrong], kind="stable")]

    @property
    def worst(self) -> int:
        """Index of the tensor nearest to its limit, or furthest beyond it."""
        return int(np.argmax(self.excess))

    @property
    def origin(self) -> str:
        """A clause on where the limits come from: one source or both."""
        learnt = [self.learnt_origin] if self.learnt.any() else []
        floor = [self.floor_origin] if not self.learnt.all() else []
        return ", or ".join([*learnt, *floor])

    @property
    def excess(self) -> Floats:
        """Every tensor's difference over its limit; 0 where both are zero."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            excess = self.difference / self.limit
        return np.nan_to_num(excess, nan=0.0, posinf=np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class TensorComparison:
    """One sampled step of a test set against the control's; rows in the order of ``names``."""

    step: int
    names: tuple[str, ...]
    test: TensorSample
    control: TensorSample
    initial: TensorDifferences | None
    """Parameters before training; at step 0 only."""
    gradients: TensorDifferences | None
    updates: TensorDifferences | None
    """Since the sample before; None at the first sample."""

    def deviations(self, found: TensorDifferences) -> tuple[Deviation, ...]:
        return tuple(
            Deviation(
                self.names[index],
                self.step,
                float(found.difference[index]),
                float(found.limit[index]),
            )
            for index in found.outside[:MOST_DEVIATIONS]
        )


Comparisons = tuple[TensorComparison, ...]
"""One per step that both runs sampled, in order."""


def compare_tensors(
    test: Evidence, control: Evidence, calibration: Calibration | None
) -> Comparisons:
    """Compare the runs at every step that both sampled, in order."""
    limits = _Limits(test, control, applicable(calibration, test, control))
    found: list[TensorComparison] = []
    before: tuple[TensorSample, TensorSample] | None = None
    largest: Floats | None = None
    for number, (ours, theirs) in enumerate(shared_samples(test, control)):
        gradients = updates = None
        off = gradient_difference(ours, theirs)
        if off is not None and ours.gradients is not None and theirs.gradients is not None:
            off = limits.with_lost_experts(off, ours.gradients.norm, theirs.gradients.norm, theirs)
            gradients = _known(limits.of(off, "gradient", theirs, number), test, ours)
            norm = together(theirs.gradients.norm, theirs.names)
            finite = np.where(np.isfinite(norm), norm, 0.0)
            largest = finite if largest is None else np.maximum(largest, finite)
            gradients = limits.against_largest(gradients, norm, largest, theirs)
        if before is not None:
            difference = update_difference((before[0], ours), (before[1], theirs))
            updates = limits.of(difference, "update", theirs, number)
            if gradients is not None and theirs.step <= SIGN_STEPS:
                updates = limits.beyond_signs(updates, gradients)
            updates = _beyond_spacing(
                updates,
                update(before[1], theirs),
                theirs,
                theirs.step - before[1].step,
                limits.storage.spacings(theirs.names),
            )
        initial = limits.initial(ours, theirs) if theirs.step == 0 else None
        found.append(
            TensorComparison(theirs.step, theirs.names, ours, theirs, initial, gradients, updates)
        )
        before = ours, theirs
    return tuple(found)


def _beyond_spacing(
    updates: TensorDifferences, moved: Floats, theirs: TensorSample, steps: int, spacing: Floats
) -> TensorDifferences:
    """Widen limits by the rounding of updates when parameters are stored.

    An update smaller than the spacing of the numbers around a parameter is lost, or becomes a whole
    spacing: in bf16 most updates of norm weights, which are near one, are that small. Where the
    whole update may be rounded off, it shows nothing, and its limit is infinite.
    """
    lost = lost_in_storing(moved, theirs, steps, spacing)
    limit = np.minimum(updates.limit + lost, np.maximum(updates.limit, TENSOR_CEILING))
    return replace(updates, limit=np.where(lost >= TENSOR_CEILING, np.inf, limit))


def lost_in_storing(moved: Floats, after: TensorSample, steps: int, spacing: Floats) -> Floats:
    """Shape (parameters,): the spacing of the stored numbers over the update of one step.

    ``moved`` is the sketch of the updates of ``steps`` steps up to the sample ``after``; spacings
    are relative to the numbers, a parameter each.
    """
    step = np.linalg.norm(moved, axis=-1) / max(steps, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = spacing * after.parameters.norm / step
    return np.where(step > 0, lost, 0.0)


def is_uncounted(evidence: Evidence, step: int, name: str) -> bool:
    """Whether the probe could not count a gradient, so that its entries are not known."""
    return (step, name) in evidence.uncounted


def _known(gradients: TensorDifferences, test: Evidence, sample: TensorSample) -> TensorDifferences:
    """A tensor that could not be counted is not outside; the check samples-whole reports it."""
    unknown = [is_uncounted(test, sample.step, name) for name in sample.names]
    return replace(gradients, limit=np.where(unknown, np.inf, gradients.limit))


class _Limits:
    """The limits of one pair of runs."""

    def __init__(self, test: Evidence, control: Evidence, calibration: Calibration | None) -> None:
        self.precision = coarser(test.precision, control.precision)
        self.storage = storage(test, control, SPACING_FLOAT32)
        self.same_regime = test.precision is control.precision
        self.calibration = calibration if calibration and calibration.taught_by else None
        self.test, self.control = test, control

    def against_largest(
        self, gradients: TensorDifferences, norm: Floats, largest: Floats, theirs: TensorSample
    ) -> TensorDifferences:
        """Measure gradients that have become small by how large they have been.

        Only where the test set stores parameters in a coarser type than its control (bf16 against
        float32), and after the first steps: lost updates leave it a fraction of a step behind, and
        where a gradient falls fast, that is much of what is left of it. Of nine correct set-ups of
        8 to 32 steps three had a norm's gradient 0.5 to 0.9 off at step 8, and none more than 0.34
        of the largest it had been. Five with other seeds, run afterwards, were inside, too.

        Args:
            norm: shape (parameters,), the control's gradients at this step, all experts of a layer
                together.
            largest: the same, the largest finite one of all samples so far; 0 without any.
        """
        coarser_than = spacing(self.test, SPACING_FLOAT32) > spacing(self.control, SPACING_FLOAT32)
        if not coarser_than or theirs.step <= FIRST_STEPS:
            return gradients
        whole = np.isfinite(norm) & (norm > 0)
        fallen = np.divide(largest, norm, out=np.ones_like(norm), where=whole)
        ceiling = np.maximum(gradients.limit, FALLEN_CEILING)
        stored = self.storage.spacings(theirs.names) > SPACING_FLOAT32
        limit = np.where(stored, np.minimum(gradients.limit * fallen, ceiling), gradients.limit)
        origin = gradients.floor_origin
        if (limit > gradients.limit).any():
            origin += ", times how far the control's gradient has fallen"
        return replace(gradients, limit=limit, floor_origin=origin)

    def initial(self, ours: TensorSample, theirs: TensorSample) -> TensorDifferences:
        difference = relative(
            ours.parameters.sketch - theirs.parameters.sketch,
            ours.parameters.norm,
            theirs.parameters.norm,
        )
        stored = self.storage.spacings(theirs.names)
        limit = SAME_WEIGHTS + np.where(stored > SPACING_FLOAT32, stored / 2, 0.0)
        origin = "the same weights"
        return TensorDifferences(difference, limit, np.zeros_like(limit, dtype=np.bool_), origin)

    def with_lost_experts(
        self, difference: Floats, ours: Floats, theirs: Floats, sample: TensorSample
    ) -> Floats:
        """Gradients' differences, infinite for an expert that one run lost, and not its tokens.

        Rounding leaves an expert without tokens only where few would go there: its share of its
        layer's gradient in the other run is then small, and no more than rounding moves between the
        experts of any layer, as the repeats show it (0.05 was measured, where repeats moved 0.1 to
        0.4). The norms of both runs' gradients have shape (parameters,).
        """
        one_sided = (ours == 0) != (theirs == 0)
        if sample.step <= SAME_TOKENS or not one_sided.any():
            return difference
        single = np.array([is_of_one_expert(name) for name in sample.names])
        scale = self._scale("gradient", sample)
        moved = float(scale[single].max(initial=0.0)) if scale is not None else 0.0
        most = np.minimum(moved, FEW_TOKENS * equal_shares(sample.names))
        norm = np.maximum(ours, theirs)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = norm / np.maximum(*(together(each, sample.names) for each in (ours, theirs)))
        return np.where(single & one_sided & ~(share <= most), np.inf, difference)

    def of(
        self, difference: Floats, kind: str, theirs: TensorSample, number: int
    ) -> TensorDifferences:
        scale = self._scale(kind, theirs)
        floor_origin = f"floor of {self.precision.value} arithmetic"
        floors = GRADIENT_FLOORS if kind == "gradient" else UPDATE_FLOORS
        floor = self._floor(floors[self.precision], theirs.step, learnt=scale is not None)
        steps = np.array([theirs.step])
        runs = (self.test, self.control, self.calibration)
        wider = float(jumps(steps, *runs, first=FIRST_JUMP)[0])
        floor = min(wider * floor, TENSOR_CEILING)
        if scale is None or self.calibration is None:
            limit = np.full(difference.shape, floor)
            return TensorDifferences(
                difference, limit, np.zeros_like(limit, dtype=np.bool_), floor_origin
            )
        repeats = self.calibration.taught_by
        spread = self._spread(kind, theirs.step)
        multiple = tensor_multiple(len(theirs.names), max(number, 1), repeats, spread)
        origin = f"{wider * multiple:.0f} x the spread of {repeats} repeats"
        learnt = np.minimum(wider * multiple * scale, TENSOR_CEILING)
        chaotic = np.zeros(difference.shape, dtype=np.bool_)
        if theirs.step > FIRST_STEPS:
            chaotic = wider * scale > widest_scale(TENSOR_CEILING, repeats)
            # A missing tensor is wrong however chaotic training is.
            chaotic &= np.isfinite(difference) & (difference != NOT_MOVED)
        limit = np.where(chaotic, np.inf, np.maximum(learnt, floor))
        return TensorDifferences(difference, limit, learnt > floor, floor_origin, origin, chaotic)

    def beyond_signs(
        self, updates: TensorDifferences, gradients: TensorDifferences
    ) -> TensorDifferences:
        """Widen limits of AdamW's first updates by the signs that rounding may flip."""
        if self.precision is Precision.FP32:
            return updates
        difference = np.where(np.isfinite(gradients.difference), gradients.difference, 0.0)
        turned = np.minimum(TURNED_SIGNS * np.sqrt(difference), TENSOR_CEILING)
        return replace(updates, limit=np.maximum(updates.limit, turned))

    def _scale(self, kind: str, theirs: TensorSample) -> Floats | None:
        """The calibrated scale in the order of the control's names; None when there is none."""
        known = self.calibration.tensors.get(theirs.step) if self.calibration else None
        values = getattr(known, kind) if known else None
        if known is None or values is None or not set(theirs.names) <= set(known.names):
            return None
        if known.names != theirs.names:
            place = {name: index for index, name in enumerate(known.names)}
            values = values[[place[name] for name in theirs.names]]
        return np.where(np.isfinite(values), values, 0.0)

    def _spread(self, kind: str, step: int) -> float | None:
        known = self.calibration.tensors.get(step) if self.calibration else None
        return getattr(known, f"{kind}_spread") if known else None

    def _floor(self, floor: Floor, step: int, *, learnt: bool) -> float:
        if learnt and self.same_regime:
            return TENSOR_ROUNDING[self.precision]
        return float(floor.at(np.array([step]))[0])
