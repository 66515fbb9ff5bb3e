"""Whether the two runs' per-tensor evidence is whole, and of one model that starts as one."""

from __future__ import annotations

from harness.judge.check import Finding, Question, check, invalid, passed, skipped
from harness.judge.sketches import sizes_of
from harness.judge.soundness import Flaw, unsampled
from harness.judge.tensors import Comparisons
from harness.model import Evidence, SetSpec, Tier

_OF_A_CHECKPOINT = (
    "its seed checkpoint is not what the control started from, so the runs cannot be compared"
)
_OF_A_PROGRAM = (
    "let the program make them of {seed} alone, on every rank the same, before it wraps the model"
)


@check(Tier.INTEGRITY)
def samples_whole(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Per-tensor evidence is there at every step at which it was asked for.

    What was not looked at cannot be taken for right: the probe failed, or the files are damaged.
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
def same_parameters(test: Evidence, control: Evidence) -> Finding:
    """Both runs train the same parameters.

    Another model, or a parameter that one side does not train.
    """
    if not test.samples or not control.samples:
        return skipped("no per-tensor evidence on one side")
    reference = control.samples[0]
    theirs = sizes_of(reference)
    for evidence in (control, test):
        for sample in evidence.samples:
            ours = sizes_of(sample)
            other = sorted(set(ours.items()) ^ set(theirs.items()))
            if other:
                name = other[0][0]
                here, there = _size(ours.get(name)), _size(theirs.get(name))
                return invalid(
                    f"{name} has {here} in {evidence.name} at step {sample.step}, {there} in the "
                    f"control at step {reference.step}",
                    sample.step,
                )
            if sample.parameters.sketch.shape != reference.parameters.sketch.shape:
                return invalid(f"the sketches of {evidence.name} are no match for the control's")
    return passed(f"{len(theirs)} parameters")


@check(Tier.INTEGRITY)
def starts_as_the_control(
    test: Evidence,
    tensors: Comparisons,
    spec: SetSpec | None,
    own_start: bool,  # noqa: FBT001 - an input of the check
) -> Finding:
    """A run whose seed checkpoint is not the control's own starts from the same weights.

    Another release, or another machine, has made other initial weights of the same seed: the two
    runs then train two models. Give both one seed checkpoint (`trainer.seed_checkpoint`). A
    program of one's own has to make them of the seed alone, before it wraps the model.
    """
    if not own_start:
        detail = "nothing says that it has a seed checkpoint of its own"
        return skipped(detail) if spec is None else passed(detail)
    if not test.steps.size:
        return skipped("the run left no step at all")
    program = spec is not None and not spec.trainer.can.shares_initial_weights
    found = next((each.initial for each in tensors if each.initial is not None), None)
    if found is None and program and not test.sample_steps:
        return skipped("per-tensor evidence is switched off")
    if found is None:
        return invalid(
            f"nothing shows that {test.name} starts from the control's weights, for each "
            f"{'makes its own' if program else 'has a seed checkpoint of its own'} and no sample "
            "of step 0 can be compared",
            0,
        )
    if found.outside.size:
        names = tensors[0].names
        return invalid(
            f"{test.name} starts from other weights than the control ({found.outside.size} of "
            f"{len(names)} parameters, {names[int(found.outside[0])]} for one): "
            f"{_OF_A_PROGRAM if program else _OF_A_CHECKPOINT}",
            0,
        )
    return passed(f"{found.difference.size} initial parameters")


CHECKS: tuple[Question, ...] = (samples_whole, same_parameters, starts_as_the_control)


def _half_sampled(evidence: Evidence) -> Flaw | None:
    """Why a run of ours has not left the per-tensor evidence that it should have."""
    if evidence.sample_steps is None:
        return Flaw("does not tell at which steps it should have sampled its tensors")
    without = [each.step for each in evidence.samples if each.step and each.gradients is None]
    if without:
        return Flaw(f"has no gradients in its sample of step {without[0]}", without[0])
    if evidence.problems:
        return Flaw(f"could not be measured in full: {evidence.problems[0]}")
    return unsampled(evidence)


def _size(entries: int | None) -> str:
    return f"{entries:,} entries" if entries is not None else "no trained entries"
