"""Tier 0, integrity: whether the evidence is whole and can be judged at all.

Asked of both runs and of the repeats that limits are learnt from: complete, in order, finite;
per-tensor evidence of the same model from the same start. Broken evidence is INVALID; a test set
that turned non-finite while its control did not is a FAIL. Whether the two runs are the comparison
that was meant is asked by :mod:`converge_harness.judge.checks.comparability`.

Both runs also have to learn something. A file compared with itself, or curves of a model that does
not change, agree whatever is wrong with the code that made them. Then nothing is compared, and the
verdict is INVALID however equal the numbers are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.checks.resume import badly_continued
from converge_harness.judge.compare.curves import has, pair, rounding_of, series
from converge_harness.judge.compare.envelopes import curves_alone
from converge_harness.judge.compare.reported import agreement, other_objective
from converge_harness.judge.compare.sketches import sizes_of
from converge_harness.judge.compare.tensors import Comparisons
from converge_harness.judge.probed_runs import probing, required
from converge_harness.judge.resume.passes import INTERRUPTED, newest_whole_before
from converge_harness.judge.soundness import (
    Flaw,
    began_later,
    disordered,
    first_non_finite,
    missing_values,
    non_finite,
    ranks_disagree,
    replayed_otherwise,
    replicas_differ,
    resumed,
    unfinished,
    unsampled,
)
from converge_harness.model import (
    JUDGED_SIGNALS,
    Calibration,
    Evidence,
    Floats,
    Outcome,
    SetSpec,
    Tier,
)
from converge_harness.wording import control_called, counted, distinct_digits


@check(Tier.INTEGRITY)
def control_sound(test: Evidence, control: Evidence, control_spec: SetSpec | None) -> CheckResult:
    """The control is complete and finite, in one piece, and reports what it computes.

    Nothing can be judged against a control that is itself broken: repair or rerun it first. One
    that was interrupted and continued is in one piece if every resume restored what was saved; one
    that was resumed on purpose never is.
    """
    flaw = (
        resumed(control)
        or unfinished(control)
        or disordered(control)
        or badly_continued(control, control_spec, other=test)
        or missing_values(control, _required(control_spec, control, control))
        or non_finite(control)
        or ranks_disagree(control)
        or replicas_differ(control)
        or _misreports(control, _REPORTED[1:] if other_objective(test, control) else _REPORTED)
    )
    if flaw:
        later = began_later(control) if curves_alone(test, control) else None
        return invalid(
            f"the {control_called(control.name)} {later.text if later else flaw.what}",
            flaw.step,
            compare_with=later.option if later else "",
        )
    if twice := replayed_otherwise(control):
        return invalid(f"the {control_called(control.name)} {twice.what}")
    passes = f" in {len(control.passes)} passes, {INTERRUPTED}"
    return passed(f"{control.steps.size} steps{passes if control.interrupted else ''}")


@check(Tier.INTEGRITY)
def repeats_sound(calibration: Calibration | None) -> CheckResult:
    """The control's repeats are whole, saw the same data, and stay close to it.

    A control that does not reproduce itself gives an envelope that accepts anything.
    """
    if calibration is None or not calibration.repeats:
        return skipped("no repeats: the limits are floating-point floors alone")
    if calibration.problems:
        return invalid(calibration.problems[0])
    differing, made = calibration.taught_by, len(calibration.repeats)
    same = made - differing
    verb = "is" if same == 1 else "are"
    return passed(f"{made} repeats, of which {same} {verb} bit-identical")


@check(Tier.INTEGRITY)
def complete(test: Evidence) -> CheckResult:
    """The run finished all of its steps.

    The missing steps may be the ones that diverged.
    """
    flaw = unfinished(test)
    if flaw:
        return invalid(f"{test.name} {flaw.what}", flaw.step)
    if test.settled_of is not None:
        return passed(f"{test.steps.size} of {test.settled_of} steps: then it was settled")
    return passed(f"{test.steps.size} steps")


@check(Tier.INTEGRITY)
def steps_increase(test: Evidence) -> CheckResult:
    """Every step is recorded in order, and one that a restart replayed came out the same.

    The last values of a replayed step are judged. Other values mean that state was lost at the
    resume, or that the log holds two runs.
    """
    flaw = disordered(test)
    if flaw:
        return invalid(f"{test.name} {flaw.what}", flaw.step)
    if twice := replayed_otherwise(test):
        return invalid(f"{test.name} {twice.what}")
    # The check replays-agree compares the replays of passes.
    alike = "" if test.passes else " alike"
    notes = [f"{counted(len(test.replayed), 'step')} replayed{alike}"] if test.replayed else []
    return passed("; ".join([*notes, *test.problems]))


@check(Tier.INTEGRITY)
def values_present(
    test: Evidence, control: Evidence, spec: SetSpec | None, control_spec: SetSpec | None
) -> CheckResult:
    """Every step has a value for every judged signal.

    A missing value never counts as a correct one. Of curves from anywhere the user may leave out
    the grad norm.
    """
    required = _required(spec, test, control)
    for evidence in (test, control):
        flaw = missing_values(evidence, required)
        if flaw:
            imported = spec is None and control_spec is None
            alone = imported and not any(map(_loss_alone_misses, (test, control)))
            option = "--without grad_norm" if alone else ""
            advice = f"; {option} compares the loss alone" if option else ""
            return invalid(f"{evidence.name} {flaw.what}{advice}", flaw.step, compare_with=option)
    return passed()


@check(Tier.INTEGRITY)
def finite(test: Evidence) -> CheckResult:
    """Loss and grad norm stay finite, as the control's do.

    The test set diverged to NaN or infinity where its control did not.
    """
    flaw = first_non_finite(test)
    if flaw:
        return CheckResult(
            Outcome.FAIL, f"{flaw.what}, where the control is finite", onset=flaw.step
        )
    return passed()


CHECKS: tuple[Question, ...] = (
    control_sound,
    repeats_sound,
    complete,
    steps_increase,
    values_present,
    finite,
)


def _required(spec: SetSpec | None, test: Evidence, control: Evidence) -> tuple[str, ...]:
    """Signals without which there is no verdict.

    A run of torchtitan has all of them, and one of another program most. Imported curves have at
    least a loss, and a grad norm if either side has one: a gate must not pass because a column
    went missing.
    """
    if spec is not None:
        return JUDGED_SIGNALS if spec.trainer.can.all_signals else required(test, control)
    if has(test, "grad_norm") or has(control, "grad_norm"):
        return ("loss", "grad_norm")
    return ("loss",)


def _loss_alone_misses(evidence: Evidence) -> Flaw | None:
    return missing_values(evidence.without(("grad_norm",)), ("loss",))


_REPORTED = ("loss", "grad_norm")


def _misreports(evidence: Evidence, signals: Iterable[str]) -> Flaw | None:
    """A reported metric that the run's own probe contradicts."""
    for signal in signals:
        if signal == "grad_norm" and probing(evidence).late:
            continue  # the gradients that the probe saw may have been clipped
        compared = agreement(evidence, signal)
        if compared is not None and compared.outside.size:
            index = compared.worst
            reported, recomputed = distinct_digits(
                float(compared.reported[index]), float(compared.recomputed[index])
            )
            return Flaw(
                f"reports {signal} {reported} at step {compared.steps[index]}, recomputed "
                f"{recomputed}",
                int(compared.outside[0]),
            )
    return None


_STANDS = 8
"""So many last points that are the same number to the last digit are no training,"""
_FINE = 1e-4
"""if they are printed as finely as that."""
FEWEST_POINTS = 2
"""Of a curve that is the only evidence: the first point does not depend on the learning rate."""


@check(Tier.INTEGRITY)
def something_trained(
    test: Evidence, control: Evidence, spec: SetSpec | None, *, one_path: bool
) -> CheckResult:
    """The test set and its control are two runs, and the control learns something.

    One file twice, a single step, a learning rate of zero, or a loss that is the same number at
    every step: such curves agree whatever is wrong. Nor does a log without numbers for the first
    steps show how the run began.
    """
    if one_path:
        return invalid(
            f"{test.name} and its {control_called(control.name)} are one and the same path "
            f"({control.source}): nothing is compared; give the curve of another run"
        )
    if curves_alone(test, control) and (later := began_later(test)):
        return invalid(f"{test.name} {later.text}", compare_with=later.option)
    loss = pair(test, control, "loss")
    longest = max(series(each, "loss").steps.size for each in (test, control))
    if spec is None and 0 < longest < FEWEST_POINTS:
        return invalid(
            f"{test.name} and its {control_called(control.name)} have the loss of a single step: "
            f"at least {FEWEST_POINTS} make a curve"
        )
    still = _still(
        control, f"the {control_called(control.name)}", loss.control, "that are compared"
    )
    if not still and not series(control, "lr").values.size:
        still = _no_rate(test, test.name)  # else it is compared with the control's
    return invalid(f"nothing was trained: {still}") if still else passed()


@check(Tier.INTEGRITY)
def test_set_trained(test: Evidence) -> CheckResult:
    """The test set learns something itself.

    Asked where its curve is not compared with the control's step by step: a loss that is always 0
    would be no worse than any, and neither would one whose log stopped changing halfway.
    """
    loss = series(test, "loss").values
    still = _still(test, test.name, loss, "of it")
    half = loss[loss.size // 2 :]
    fine = np.all(rounding_of(test, "loss", half) <= _FINE * np.abs(half))
    if not still and half.size >= _STANDS and fine and bool(np.all(half == half[0])):
        still = f"the loss of {test.name} is {half[0]:g} at all of its last {half.size} steps"
    return invalid(f"nothing was trained: {still}") if still else passed()


def _still(run: Evidence, name: str, loss: Floats, which: str) -> str:
    """Why a run says nothing about training, in a clause; empty if it does."""
    if still := _no_rate(run, name):
        return still
    norms = series(run, "grad_norm").values
    if norms.size and not np.any(norms):
        return f"the grad norm of {name} is 0 at every step"
    if loss.size >= FEWEST_POINTS and bool(np.all(loss == loss[0])):
        return f"the loss of {name} is {loss[0]:g} at all {loss.size} steps {which}"
    return ""


def _no_rate(run: Evidence, name: str) -> str:
    rates = series(run, "lr").values
    return (
        f"the learning rate of {name} is 0 at every step"
        if rates.size and not np.any(rates)
        else ""
    )


_OF_A_CHECKPOINT = (
    "its seed checkpoint is not what the control started from, so the runs cannot be compared"
)
_OF_A_PROGRAM = (
    "let the program derive them from {seed} alone, alike on every rank, before it wraps the model"
)


@check(Tier.INTEGRITY)
def samples_whole(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Every step that should have per-tensor evidence has it.

    Tensors that were not recorded cannot count as correct: the probe failed, or files are damaged.
    """
    if spec is None:
        return skipped("nothing asked for per-tensor evidence")
    for evidence in (test, control):
        flaw = _half_sampled(evidence)
        if flaw:
            return invalid(f"{evidence.name} {flaw.what}", flaw.step)
    if test.sample_steps != control.sample_steps:
        return invalid("the two runs sampled their tensors at different steps")
    if not test.sample_steps:
        return skipped("per-tensor evidence is switched off")
    return passed(f"{len(test.samples)} samples")


@check(Tier.INTEGRITY)
def same_parameters(test: Evidence, control: Evidence) -> CheckResult:
    """Both runs train the same parameters.

    One side has another model, or does not train a parameter.
    """
    if not test.samples or not control.samples:
        return skipped("no per-tensor evidence on one side")
    first = control.samples[0]
    theirs = sizes_of(first)
    for evidence in (control, test):
        for sample in evidence.samples:
            ours = sizes_of(sample)
            other = sorted(set(ours.items()) ^ set(theirs.items()))
            if other:
                name = other[0][0]
                here, there = _size(ours.get(name)), _size(theirs.get(name))
                return invalid(
                    f"{name} has {here} in {evidence.name} at step {sample.step}, {there} in the "
                    f"control at step {first.step}",
                    sample.step,
                )
            if sample.parameters.sketch.shape != first.parameters.sketch.shape:
                return invalid(f"the sketches of {evidence.name} do not match the control's")
    return passed(f"{len(theirs)} parameters")


@check(Tier.INTEGRITY)
def starts_as_the_control(
    test: Evidence,
    tensors: Comparisons,
    spec: SetSpec | None,
    own_start: bool,  # noqa: FBT001 - an input of the check
) -> CheckResult:
    """A run whose seed checkpoint is not the control's own starts from the same weights.

    Another release, or another machine, made other initial weights from the same seed: the two
    runs then train two models. Give both one seed checkpoint (`trainer.seed_checkpoint`). A
    program of your own has to derive them from the seed alone, before it wraps the model.
    """
    if not own_start:
        detail = "nothing says that it has a seed checkpoint of its own"
        return skipped(detail) if spec is None else passed(detail)
    if not test.steps.size:
        return skipped("the run recorded no step")
    program = spec is not None and not spec.trainer.can.shares_initial_weights
    found = next((each.initial for each in tensors if each.initial is not None), None)
    if found is None and program and not test.sample_steps:
        return skipped("per-tensor evidence is switched off")
    if found is None:
        return invalid(
            f"nothing shows that {test.name} starts from the control's weights, because each "
            f"{'makes its own' if program else 'has a seed checkpoint of its own'} and no sample "
            "of step 0 can be compared",
            0,
        )
    if found.outside.size:
        names = tensors[0].names
        return invalid(
            f"{test.name} starts from other weights than the control ({found.outside.size} of "
            f"{len(names)} parameters, {names[int(found.outside[0])]} for one): "
            f"{_advice(test) if program else _OF_A_CHECKPOINT}",
            0,
        )
    return passed(f"{found.difference.size} initial parameters")


def _advice(test: Evidence) -> str:
    """What a program should do that starts from other weights than its control."""
    for each in test.passes:
        saved = newest_whole_before(test, each.number)
        if saved and each.loaded_step == 0:
            return (
                f"pass {each.number} counts its steps from 1 again, although a checkpoint of step "
                f"{saved} is there; if it loaded the weights of that one, let it load the step, too"
            )
    return _OF_A_PROGRAM


TENSOR_CHECKS: tuple[Question, ...] = (samples_whole, same_parameters, starts_as_the_control)


def _half_sampled(evidence: Evidence) -> Flaw | None:
    """Why a run of torchtitan has not left the per-tensor evidence that it should have."""
    if evidence.sample_steps is None:
        return Flaw("does not record at which steps it should have sampled its tensors")
    without = [each.step for each in evidence.samples if each.step and each.gradients is None]
    if without:
        return Flaw(f"has no gradients in its sample of step {without[0]}", without[0])
    if evidence.problems:
        return Flaw(f"could not be measured in full: {evidence.problems[0]}")
    return unsampled(evidence)


def _size(entries: int | None) -> str:
    return f"{entries:,} entries" if entries is not None else "no trained entries"
