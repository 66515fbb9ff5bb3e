"""Two runs compared: the inputs of every check, made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converge_harness.judge.compare.activations import ModuleComparison, compare_modules
from converge_harness.judge.compare.curves import (
    CurveDifference,
    curve_difference,
    curve_differences,
    has,
    whole_series,
)
from converge_harness.judge.compare.envelopes import (
    Envelope,
    LearntLimit,
    compare_signal,
    curves_alone,
    furthest_learnt,
    limits,
)
from converge_harness.judge.compare.limits import applicable
from converge_harness.judge.compare.loss_only import LossOnlyGate, loss_only_gate
from converge_harness.judge.compare.precision_errors import Errors, PrecisionRuns, measure_errors
from converge_harness.judge.compare.random_states import Generators, generators
from converge_harness.judge.compare.sketches import Renamed, align
from converge_harness.judge.compare.tensors import Comparisons, compare_tensors
from converge_harness.judge.compare.tost import ALPHA
from converge_harness.judge.in_force import (
    ConfigDifference,
    config_differences,
    planned_settings,
)
from converge_harness.judge.probed_runs import is_curve
from converge_harness.judge.resume.passes import superseded
from converge_harness.judge.soundness import disordered
from converge_harness.model import (
    JUDGED_SIGNALS,
    Calibration,
    Evidence,
    Floats,
    Recovery,
    SeedRuns,
    Segment,
    SetSpec,
)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The inputs of all checks; a check takes those that its parameters name."""

    test: Evidence
    control: Evidence
    calibration: Calibration | None = None
    """From those repeats of the control that apply to this test set; None: limits are floors
    alone."""
    spec: SetSpec | None = None
    """What the test set names; None for curves that are not ours, or of a program that is not
    probed: then nothing is audited."""
    control_spec: SetSpec | None = None
    segments: tuple[Segment, ...] = ()
    """The schedule of an elastic set, also of a program that is not probed."""
    recovery: Recovery | None = None
    """How a fault set is broken and has to recover, also of a program that is not probed."""
    margin: float | None = None
    """Largest relative difference of the mean loss that is equivalent; None: the default."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """Signal to a relative difference that replaces the learnt limit."""
    envelopes: Mapping[str, Envelope] = field(default_factory=dict)
    """Signal to envelope, without the signals that the two runs cannot be compared on."""
    drawn: tuple[Envelope, ...] = ()
    """The same, also of a run whose steps are out of order, which is not judged by them."""
    learnt_envelopes: tuple[Envelope, ...] = ()
    """These as learnt, before tolerances replace any limit."""
    own_start: bool = False
    """Whether each has a seed checkpoint of its own, or makes its weights itself, so that only
    their initial parameters can show that they start from the same weights."""
    renamed: Renamed | None = None
    """What two releases call by other names; the samples are then without it."""
    measure: PrecisionRuns | None = None
    """What errors of low precision are measured against; None: there is no reference."""
    errors: Errors | None = None
    """These errors; None where they could not be measured."""
    planned: tuple[SetSpec, SetSpec] | None = None
    """Both sets as planned, if one of them is a program without the probe, of which nobody recorded
    what was in force; ``spec`` and ``control_spec`` are None then."""
    one_path: bool = False
    """Whether both were read from one file or folder."""
    seeds: SeedRuns | None = None
    """All runs of control and test set, where there are several seeds; ``test`` and ``control`` are
    the first of each."""
    target: float | None = None
    """Loss that the seeds have to reach, where the question is when; None: how low they end."""
    draws: bool = False
    """Whether the test set is meant to draw other random numbers than its control."""
    level: float = ALPHA
    """Of the test of equivalence; smaller if this is one of several planned looks."""
    modules: ModuleComparison | None = None
    """What modules computed in the first batches; None if it was not recorded."""
    tensors: Comparisons = ()
    """Per-tensor comparisons at the steps that both sampled, in their order."""
    curves: Mapping[str, CurveDifference] = field(default_factory=dict)
    """Every judged signal at the steps that both runs have, for drawing."""
    superseded_curves: Mapping[int, Mapping[str, CurveDifference]] = field(default_factory=dict)
    """By number of a pass of the test set and signal: the control beside what that pass left at
    steps that a later one trained again, for drawing. It is not judged."""
    loss_only: LossOnlyGate | None = None
    """What a gate on the loss alone would have said; None without a common step."""

    @property
    def limits(self) -> Mapping[str, Floats]:
        """Signal to its limit at every step that both runs have, for drawing."""
        return limits(self.test, self.control, self.drawn)

    @property
    def configs(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The test set's configuration and the control's, by key.

        Those in force; if one of them is not probed, what the experiment file says of both. Both
        are empty if one is not recorded: then nobody knows how they differ.
        """
        ours: Mapping[str, Any]
        theirs: Mapping[str, Any]
        if self.planned is not None:
            ours, theirs = map(planned_settings, self.planned)
        else:
            ran = (self.test.in_force, self.control.in_force)
            ours, theirs = (each.config if each else {} for each in ran)
        return (ours, theirs) if ours and theirs else ({}, {})

    @property
    def config_differences(self) -> tuple[ConfigDifference, ...]:
        """How :attr:`configs` differ, by key."""
        if self.planned is not None:
            declared = {key for spec in self.planned for key in spec.overrides}
        else:
            ran = (self.test.in_force, self.control.in_force)
            declared = {key for each in ran if each for key in each.declared}
        test, control = self.planned or (self.spec, self.control_spec)
        same_toolchain = test is None or control is None or test.toolchain == control.toolchain
        return config_differences(*self.configs, declared, same_toolchain=same_toolchain)

    @property
    def furthest_learnt(self) -> LearntLimit | None:
        """Where a learnt limit is the largest multiple of its floor."""
        return furthest_learnt(self.control.precision, self.calibration, self.learnt_envelopes)

    @property
    def curves_alone(self) -> bool:
        """Whether both runs left only their curves."""
        return curves_alone(self.test, self.control)

    @property
    def generators(self) -> tuple[Generators, ...]:
        """Both runs with the states of each kind of random generators.

        Where other numbers are drawn on purpose, repeats do not show how much they move a signal.
        """
        envelopes = () if self.draws else self.learnt_envelopes
        return tuple(generators(self.test, self.control, envelopes))

    @property
    def shared_signals(self) -> tuple[str, ...]:
        """The judged signals that both runs recorded, though perhaps at different steps."""
        return tuple(
            each for each in JUDGED_SIGNALS if has(self.test, each) and has(self.control, each)
        )


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
    level: float = ALPHA,
) -> RunComparison:
    """Gather the inputs and compare the runs.

    A run whose steps are out of order has no envelope: it is not known which value is whose.
    Raises ValueError for an unusable tolerance.
    """
    segments, recovery = (spec.segments, spec.recovery) if spec else ((), None)
    planned = None
    if is_curve(spec) or is_curve(control_spec):
        planned = (spec, control_spec) if spec and control_spec else None
        spec = control_spec = None
        own_start = False
    own_start = own_start or (spec is not None and not spec.trainer.can.shares_initial_weights)
    draws = spec is not None and spec.own_random_numbers
    aligned = align(test, control, spec, control_spec)
    test, control = aligned.test, aligned.control
    calibration = applicable(calibration, test, control)
    ordered = disordered(test) is None and disordered(control) is None
    tolerances = tolerances or {}
    drawn = _envelopes(test, control, calibration, tolerances, margin)
    learnt = _envelopes(test, control, calibration, {}, margin) if tolerances else drawn
    curves = curve_differences(test, control)
    return RunComparison(
        test=test,
        control=control,
        calibration=calibration,
        spec=spec,
        control_spec=control_spec,
        planned=planned,
        segments=segments,
        recovery=recovery,
        margin=margin,
        tolerances=tolerances,
        own_start=own_start,
        renamed=aligned.renamed,
        measure=measure,
        one_path=one_path,
        seeds=seeds,
        target=target,
        draws=draws,
        level=level,
        errors=measure_errors(test, measure, draws=draws) if measure else None,
        envelopes={envelope.signal: envelope for envelope in drawn} if ordered else {},
        drawn=drawn,
        learnt_envelopes=learnt,
        modules=compare_modules(test, control, calibration.modules if calibration else {}, measure),
        tensors=compare_tensors(test, control, calibration),
        curves=curves,
        superseded_curves=_superseded_curves(test, control),
        loss_only=loss_only_gate(curves["loss"]),
    )


def _superseded_curves(test: Evidence, control: Evidence) -> dict[int, dict[str, CurveDifference]]:
    return {
        number: {
            signal: curve_difference(left[signal], whole_series(control, signal))
            for signal in JUDGED_SIGNALS
            if signal in left
        }
        for number, left in superseded(test).items()
    }


def _envelopes(
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None,
    tolerances: Mapping[str, float],
    margin: float | None,
) -> tuple[Envelope, ...]:
    """Of the judged signals, those that the two runs can be compared on."""
    every = (
        compare_signal(each, test, control, calibration, tolerances, margin)
        for each in JUDGED_SIGNALS
    )
    return tuple(envelope for envelope in every if envelope is not None)
