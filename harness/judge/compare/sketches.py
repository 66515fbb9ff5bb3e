"""Two runs' samples aligned by parameter, and the relative difference of their tensors.

A sketch holds k signed projections of a tensor (``docs/architecture.md``). It is linear, so the
difference of two sketches is the sketch of the difference, whose squared length estimates the
squared norm of that difference without bias and with relative standard deviation at most
sqrt(2 / k) (Alon, Matias and Szegedy, "The space complexity of approximating the frequency
moments", 1996; for the sparse projections in use here Thorup and Zhang, "Tabulation based
4-universal hashing with applications to second moment estimation", 2004).

A sketch hashes the parameter's name, so sketches under the names of two releases of a trainer
cannot be compared; norms can (:func:`align`). A release may also merge several tensors into one
(``wq wk wv`` into ``wqkv``), so all parameters that have different names are compared as a whole:
number of entries, and the norm of values and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.experts import SAME_TOKENS, together
from converge_harness.model import (
    Evidence,
    Flags,
    Floats,
    Integers,
    PostStepState,
    SetSpec,
    TensorRows,
    TensorSample,
)


def shared_samples(test: Evidence, control: Evidence) -> list[tuple[TensorSample, TensorSample]]:
    """Samples of both runs at the steps that both sampled, in order; rows are aligned by name.

    A sample with other parameters than the control's is left out: the check ``same-parameters``
    reports it.
    """
    theirs = {sample.step: sample for sample in control.samples}
    return [
        (_in_order_of(sample, theirs[sample.step].names), theirs[sample.step])
        for sample in test.samples
        if sample.step in theirs and _alike(sample, theirs[sample.step])
    ]


def rows_difference(test: TensorRows, control: TensorRows) -> Floats:
    """Shape (parameters,): relative difference of every tensor."""
    return relative(test.sketch - control.sketch, test.norm, control.norm)


def gradient_difference(test: TensorSample, control: TensorSample) -> Floats | None:
    """Shape (parameters,): relative difference of every gradient; None where one run has none.

    After the first step that of a single expert is the difference of all experts of its layer
    (:mod:`converge_harness.judge.compare.experts`). Rows are aligned.
    """
    ours, theirs = test.gradients, control.gradients
    if ours is None or theirs is None:
        return None
    if control.step <= SAME_TOKENS:
        return rows_difference(ours, theirs)
    lengths = _length(ours.sketch - theirs.sketch), ours.norm, theirs.norm
    return _ratio(*(together(each, control.names) for each in lengths))


def update_difference(test: Sequence[TensorSample], control: Sequence[TensorSample]) -> Floats:
    """Shape (parameters,): difference of every parameter's update, over the control's.

    Both are (sample before, sample); norms of updates are estimated from sketches, too. 1.0 for a
    parameter that does not move at all.
    """
    theirs = update(*control)
    moved = _length(theirs)
    return relative(update(*test) - theirs, moved, moved)


def update(before: TensorSample, after: TensorSample) -> Floats:
    """Shape (parameters, k): sketch of every parameter's update."""
    return after.parameters.sketch - before.parameters.sketch


def relative(difference: Floats, first: Floats, second: Floats) -> Floats:
    """Norm of a sketch of a difference over the smaller of the two norms.

    0 where both norms are 0; infinite where one is 0, or where anything is not finite.
    """
    return _ratio(_length(difference), first, second)


def _ratio(length: Floats, first: Floats, second: Floats) -> Floats:
    smaller = np.minimum(first, second)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = length / smaller
    ratio = np.where(length == 0, 0.0, ratio)
    return np.where(np.isfinite(length) & np.isfinite(first + second), ratio, np.inf)


class Fit(NamedTuple):
    """The best ``test = factor x control`` of one tensor, and its residual."""

    factor: float
    residual: float
    """Norm of what the factor does not explain, over the test's norm: 0 for a pure scale."""


def fit(test: Floats, control: Floats) -> Fit:
    """Least squares between two sketches, shape (k,); exact when one tensor scales the other."""
    square = float(control @ control)
    if not square or not np.isfinite(square) or not np.all(np.isfinite(test)):
        return Fit(np.nan, np.inf)
    factor = float(test @ control) / square
    length = float(np.linalg.norm(test))
    left = float(np.linalg.norm(test - factor * control))
    return Fit(factor, left / length if length else 0.0)


def _alike(first: TensorSample, second: TensorSample) -> bool:
    same_names = set(first.names) == set(second.names)
    return same_names and first.parameters.sketch.shape == second.parameters.sketch.shape


def _length(sketches: Floats) -> Floats:
    return np.asarray(np.linalg.norm(sketches, axis=-1), dtype=np.float64)


def _in_order_of(sample: TensorSample, names: tuple[str, ...]) -> TensorSample:
    if sample.names == names:
        return sample
    place = {name: index for index, name in enumerate(sample.names)}
    return rows_of(sample, np.array([place[name] for name in names], dtype=np.int64))


def sizes_of(sample: TensorSample) -> dict[str, int]:
    """Entries of every parameter, by name."""
    return dict(zip(sample.names, sample.sizes.tolist(), strict=True))


def rows_of(sample: TensorSample, order: Integers) -> TensorSample:
    """The sample with only these rows, in this order; buffers are left as they are."""

    def rows(old: TensorRows) -> TensorRows:
        return TensorRows(
            old.sketch[order], old.norm[order], old.zeros[order], old.not_finite[order]
        )

    return TensorSample(
        step=sample.step,
        names=tuple(sample.names[index] for index in order),
        sizes=sample.sizes[order],
        parameters=rows(sample.parameters),
        gradients=rows(sample.gradients) if sample.gradients else None,
        post_step=_left_in_order(sample.post_step, order) if sample.post_step else None,
        buffers=sample.buffers,
    )


def _left_in_order(left: PostStepState, order: Integers) -> PostStepState:
    return PostStepState(
        left.clipped_norm[order], left.states, left.state_norm[order], left.state_steps[order]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Renamed:
    """Parameters of different names, at the steps that both runs sampled; arrays are (steps,)."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    """Names in the control."""
    steps: Integers
    parameters: Floats
    """Relative difference of the norms, all parameters as one vector."""
    gradients: Floats
    """The same of the gradients; 0 at step 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Two runs with samples of only those parameters that have the same name in both."""

    test: Evidence
    control: Evidence
    renamed: Renamed | None


def align(
    test: Evidence, control: Evidence, spec: SetSpec | None, control_spec: SetSpec | None
) -> Aligned:
    """Leave out of both runs' samples the parameters that two releases name differently.

    One toolchain has one name for a parameter: another name is then another model. Nothing is left
    out, too, where the rest is not the same model (names that both have with other sizes, or
    another number of entries in total), or where no step was sampled by both. The check
    same-parameters then reports it.
    """
    unchanged = Aligned(test, control, None)
    two = spec is not None and control_spec is not None and spec.toolchain != control_spec.toolchain
    if not two or not test.samples or not control.samples:
        return unchanged
    ours, theirs = sizes_of(test.samples[0]), sizes_of(control.samples[0])
    shared = ours.keys() & theirs.keys()
    if ours.keys() == theirs.keys() or not shared:
        return unchanged
    if any(ours[name] != theirs[name] for name in shared):
        return unchanged
    if sum(ours.values()) != sum(theirs.values()):
        return unchanged
    others = {sample.step: sample for sample in control.samples}
    both = [(each, others[each.step]) for each in test.samples if each.step in others]
    if not both:
        return unchanged
    return Aligned(
        replace(test, samples=tuple(_only(each, shared) for each in test.samples)),
        replace(control, samples=tuple(_only(each, shared) for each in control.samples)),
        Renamed(
            ours=tuple(sorted(ours.keys() - shared)),
            theirs=tuple(sorted(theirs.keys() - shared)),
            steps=np.array([each.step for each, _ in both], dtype=np.int64),
            parameters=_differences(both, "parameters", shared),
            gradients=_differences(both, "gradients", shared),
        ),
    )


def _kept(sample: TensorSample, shared: set[str]) -> Flags:
    return np.array([name in shared for name in sample.names], dtype=np.bool_)


def _only(sample: TensorSample, shared: set[str]) -> TensorSample:
    return rows_of(sample, np.flatnonzero(_kept(sample, shared)))


def _differences(
    both: list[tuple[TensorSample, TensorSample]], what: str, shared: set[str]
) -> Floats:
    found = [
        (_norm(getattr(ours, what), ours, shared), _norm(getattr(theirs, what), theirs, shared))
        for ours, theirs in both
    ]
    first, second = np.array(found, dtype=np.float64).reshape(-1, 2).T
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.abs(first - second) / np.minimum(first, second)
    return np.where(first == second, 0.0, difference)


def _norm(rows: TensorRows | None, sample: TensorSample, shared: set[str]) -> float:
    """Of all parameters that are not shared, as one vector."""
    if rows is None:
        return 0.0
    return float(np.linalg.norm(rows.norm[~_kept(sample, shared)]))
