"""What A/A repeats of a control teach about how far right runs may lie apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from converge_harness.model.evidence import Floats, Integers
from converge_harness.model.experiment import Precision


@dataclass(frozen=True, slots=True, eq=False)
class SignalScale:
    """How far repeats lie from the control on one signal: relative differences, per step."""

    steps: Integers
    """Shape (steps,), increasing."""
    scale: Floats
    """Shape (steps,): root mean square over the repeats, smoothed, never falling."""
    growth: float
    """Exponent of the best power law ``scale ~ step ** growth``."""
    doubling_steps: float | None = None
    """Steps in which the scale doubles, where an exponential fits better; else None."""
    lasting: float | None = None
    """Root mean square over the repeats of their mean signed difference over the second half of
    the run: how far right runs stay apart for good. None when unknown."""
    ending: float | None = None
    """The same of the level that they drift to, on the least-squares line at the last step."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorScale:
    """The same for every parameter's gradient and update, at one sampled step."""

    names: tuple[str, ...]
    gradient: Floats | None
    """Shape (parameters,): RMS over the repeats of the relative difference; None at step 0."""
    update: Floats | None
    """Shape (parameters,): the same for the update since the sample before; None at step 0."""
    gradient_spread: float | None = None
    """How far one repeat lies above the others: root mean square, over repeats and parameters, of
    the logarithm of its difference over theirs, where it is larger. None for a single repeat."""
    update_spread: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Envelope scales of one control, and what they were learnt from."""

    control: str
    """Name of the control."""
    identity: str | None
    """Identity of the control's job; None for foreign curves."""
    precision: Precision
    """The regime: limits of one are no limits of another."""
    repeats: tuple[str, ...]
    """Names of the repeats."""
    taught_by: int
    """How many of them differ from the control at all: the others teach no scale."""
    signals: Mapping[str, SignalScale] = field(default_factory=dict)
    tensors: Mapping[int, TensorScale] = field(default_factory=dict)
    """By step."""
    sources: tuple[str, ...] = ()
    """Where the repeats were read from; empty for a calibration from a file."""
    alike: Calibration | None = None
    """The same, learnt without repeats that deal samples out to other ranks: for test sets that
    deal them out as the control does. None when that would be all or none of the repeats."""
    problems: tuple[str, ...] = ()
    """Why repeats cannot teach an envelope; with one of them, nothing may PASS."""
