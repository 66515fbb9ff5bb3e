"""What is learnt from A/A repeats of a control: how much correct runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from converge_harness.model.evidence import Floats, Integers, ModuleTensor
from converge_harness.model.experiment import Precision


@dataclass(frozen=True, slots=True, eq=False)
class SignalScale:
    """How much repeats differ from the control in one signal: relative differences, per step."""

    steps: Integers
    """Shape (steps,), increasing."""
    scale: Floats
    """Shape (steps,): root mean square over the repeats, smoothed, never falling."""
    growth: float
    """Exponent of the best power law ``scale ~ step ** growth``."""
    doubling_steps: float | None = None
    """Steps in which the scale doubles, where an exponential fits better; else None."""
    lasting: float | None = None
    """Root mean square over the repeats of their mean signed difference over the second half of the
    run: how much correct runs differ permanently. None when unknown.
    """
    ending: float | None = None
    """The same for the level to which they drift: the least-squares line at the last step."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorScale:
    """The same for every parameter's gradient and update, at one sampled step."""

    names: tuple[str, ...]
    gradient: Floats | None
    """Shape (parameters,): RMS over the repeats of the relative difference; None at step 0."""
    update: Floats | None
    """Shape (parameters,): the same for the update since the sample before; None at step 0."""
    gradient_spread: float | None = None
    """How much larger one repeat's difference is than the others': root mean square, over repeats
    and parameters, of the logarithm of the ratio, where it is above 1. None for a single repeat.
    """
    update_spread: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Envelope scales of one control, and from what they were learnt."""

    control: str
    """Name of the control."""
    identity: str | None
    """Identity of the control's job; None for foreign curves."""
    precision: Precision
    """The regime: limits of one do not apply to another."""
    repeats: tuple[str, ...]
    """Names of the repeats."""
    taught_by: int
    """How many of them differ from the control at all: nothing is learnt from the others."""
    signals: Mapping[str, SignalScale] = field(default_factory=dict)
    tensors: Mapping[int, TensorScale] = field(default_factory=dict)
    """By step."""
    modules: Mapping[ModuleTensor, float] = field(default_factory=dict)
    """How far modules of the repeats are from the control's in the first batches: median over the
    repeats of the relative difference."""
    sources: tuple[str, ...] = ()
    """From where the repeats were read; empty for a calibration from a file."""
    alike: Calibration | None = None
    """The same, learnt without repeats that distribute samples to the ranks in another order: for
    test sets that distribute them as the control does. None if that would be all or none of the
    repeats.
    """
    problems: tuple[str, ...] = ()
    """Why no envelope can be learnt from the repeats; if not empty, nothing may PASS."""
