"""Two runs compared: the inputs of every check, made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.judge.compare.envelopes import Envelope, compare
from harness.judge.compare.floors import JUDGED_SIGNALS
from harness.judge.compare.limits import fitting
from harness.judge.compare.precision_errors import Errors, PrecisionRuns, measure_errors
from harness.judge.compare.sketches import Renamed, align
from harness.judge.compare.tensors import Comparisons, compare_tensors
from harness.judge.programs import is_curve
from harness.judge.soundness import disordered
from harness.model import Calibration, Evidence, SeedRuns, SetSpec


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The inputs of all checks; a check takes those that its parameters name."""

    test: Evidence
    control: Evidence
    calibration: Calibration | None = None
    """What those repeats of the control taught that speak for this test set; None: limits are
    floors alone."""
    spec: SetSpec | None = None
    """What the test set names; None for curves that are not ours, or of a program that is not
    probed: then nothing is audited."""
    control_spec: SetSpec | None = None
    margin: float | None = None
    """Largest relative difference of the mean loss that is equivalent; None: the default."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Signal to a relative difference that replaces the learnt limit."""
    envelopes: Mapping[str, Envelope] = field(default_factory=dict)
    """Signal to envelope, without the signals that the two runs cannot be compared on."""
    own_start: bool = False
    """Whether each has a seed checkpoint of its own, or makes its weights itself, so that nothing
    but their initial parameters says that they start alike."""
    renamed: Renamed | None = None
    """What two releases call by other names; the samples are then without it."""
    measure: PrecisionRuns | None = None
    """By which errors of low precision are judged; None: there is no reference."""
    errors: Errors | None = None
    """These errors; None where they could not be measured."""
    one_path: bool = False
    """Whether both were read from one file or folder."""
    seeds: SeedRuns | None = None
    """All runs of control and test set, where there are several seeds; ``test`` and ``control`` are
    the first of each."""
    target: float | None = None
    """Loss that the seeds are to reach, where somebody asked when; None: their levels are asked."""
    draws: bool = False
    """Whether the test set rightly draws other random numbers than its control."""
    tensors: Comparisons = ()
    """Per-tensor comparisons at the steps that both sampled, in their order."""


def compare_runs(
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None = None,
    *,
    spec: SetSpec | None = None,
    control_spec: SetSpec | None = None,
    tolerances: Mapping[str, float] | None = None,
    margin: float | None = None,
    own_start: bool = False,
    measure: PrecisionRuns | None = None,
    one_path: bool = False,
    seeds: SeedRuns | None = None,
    target: float | None = None,
) -> RunComparison:
    """Gather the inputs and compare the runs.

    A run whose steps are out of order has no envelope: which of its values is which is not known.
    Raises ValueError for an unusable tolerance.
    """
    if is_curve(spec) or is_curve(control_spec):
        spec = control_spec = None
        own_start = False
    own_start = own_start or (spec is not None and not spec.trainer.can.shares_initial_weights)
    draws = spec is not None and spec.own_random_numbers
    aligned = align(test, control, spec, control_spec)
    test, control = aligned.test, aligned.control
    calibration = fitting(calibration, test, control)
    ordered = disordered(test) is None and disordered(control) is None
    signals = JUDGED_SIGNALS if ordered else ()
    compared = [
        compare(signal, test, control, calibration, tolerances, margin) for signal in signals
    ]
    return RunComparison(
        test=test,
        control=control,
        calibration=calibration,
        spec=spec,
        control_spec=control_spec,
        margin=margin,
        tolerances=tolerances or {},
        own_start=own_start,
        renamed=aligned.renamed,
        measure=measure,
        one_path=one_path,
        seeds=seeds,
        target=target,
        draws=draws,
        errors=measure_errors(test, measure, draws=draws) if measure else None,
        envelopes={envelope.signal: envelope for envelope in compared if envelope is not None},
        tensors=compare_tensors(test, control, calibration),
    )
