"""Parameters that two releases of a trainer call by other names.

A sketch hashes the parameter's name, so sketches under two names cannot be compared; norms can. Two
releases may also keep as one tensor what was several (``wq wk wv`` as ``wqkv``), so what both do
not call alike is compared as a whole: entries, and the norm of its values and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from harness.judge.sketches import rows_of, sizes_of
from harness.model import Evidence, Flags, Floats, Integers, SetSpec, TensorRows, TensorSample


@dataclass(frozen=True, slots=True, eq=False)
class Renamed:
    """What is not called alike, at the steps that both runs sampled; arrays have shape (steps,)."""

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
    """Two runs with samples of those parameters alone that both call alike."""

    test: Evidence
    control: Evidence
    renamed: Renamed | None


def align(
    test: Evidence, control: Evidence, spec: SetSpec | None, control_spec: SetSpec | None
) -> Aligned:
    """Leave out of both runs' samples what two releases of the trainer call by other names.

    One toolchain has one name for a parameter: another name is then another model. Nothing is left
    out either where the rest is not the same model (names that both have with other
    sizes, or another number of entries in all), nor where no step was sampled by both, so that
    nothing shows it. The check same-parameters then says so.
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
