"""C6 where the passes of a run show it exactly: what a resume lost, and how it recovered.

Curves only show that something was lost. What was saved and what was restored, sample by sample and
tensor by tensor, shows what; so these are asked before all signatures that use curves, unless the
runs differed before the resume.
"""

from __future__ import annotations

from collections.abc import Iterator

from converge_harness.judge.causes.context import Context
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.causes.updates import initial_difference
from converge_harness.judge.checks.resume import Lost, not_restored
from converge_harness.judge.compare.random_states import repeated
from converge_harness.judge.degrees import owner
from converge_harness.judge.resume.passes import (
    SCHEDULE,
    TOKENS_SEEN,
    Gap,
    gaps,
    loads,
    newest_whole_before,
)
from converge_harness.judge.resume.saved_state import BUFFERS, PARAMETERS
from converge_harness.model import (
    ENDED_WITH_0,
    CauseClass,
    Loader,
    Outcome,
    RestartOwner,
    ResumeAdvice,
)

RESUME_CHECKS = (
    "passes-continuous",
    "state-restored",
    "data-resumed",
    "replays-agree",
    "recovers-in-time",
    "torn-never-loaded",
)


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # Other samples explain everything, even if the checkpoint was whole.
    overrides=("torn_loaded",),
)
def data_lost(context: Context) -> Cause | None:
    """The loader does not go on where it was."""
    if not _first(context, "data-resumed"):
        return None
    sentence = f"data order is lost at the resume: {context.detail('data-resumed')}"
    sentence += _lost_data(context) + _excluded(context, "dataloader") + _shuffled_again(context)
    spec = context.compared.spec
    streaming = spec is not None and spec.train_config.loader is Loader.STREAMING
    return Cause(sentence, CauseClass.DATA, _STREAMING if streaming else advice_of(context).data)


def _gaps(context: Context) -> Iterator[Gap]:
    compared = context.compared
    return gaps(compared.test, compared.spec, compared.recovery)


def _shuffled_again(context: Context) -> str:
    """A clause if numbers of Python or NumPy start over where the samples differ."""
    step = context.checks["data-resumed"].onset
    for each in context.compared.generators:
        again = repeated(each)
        if each.whose in STATES_OF and again is not None and again.step == step:
            return (
                f"; the random numbers (RNG) of {each.whose} start over there, as they were before "
                f"step {again.of}: if samples follow from them, checkpoints have to hold them "
                f"({STATES_OF[each.whose]})"
            )
    return ""


STATES_OF = {
    "Python's random": "random.getstate() and random.setstate()",
    "numpy.random": "numpy.random.get_state() and numpy.random.set_state()",
}
"""How a program saves and restores a global generator, by ``Generators.whose``."""

_STREAMING = (
    "what StreamingDataset orders samples by, besides its seed: num_canonical_nodes (the same for "
    "all degrees, not left to the package), batching_method (device_per_stream depends on the "
    "ranks), epoch_size (a multiple of the global batch) and shuffle_algo; whether dataloader is "
    "in checkpoint.exclude_from_loading"
)


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # A restart that loaded nothing explains the samples that it went on with.
    overrides=("data_lost",),
)
def nothing_loaded(context: Context) -> Cause | None:
    """A restart loaded nothing, or something from an unknown place, and trained on from there.

    If that pass begins again at step 1, its start is the run's first sample: wrong weights there
    are not a failure of the job's initial load.
    """
    check = context.checks.get("passes-continuous")
    if check is None or check.outcome is not Outcome.FAIL:
        return None
    test = context.compared.test
    found = next((gap for gap in _gaps(context) if gap.unplaced is not None), None)
    if found is None or found.unplaced is None or found.unplaced <= 1:
        return None
    before = context.first_failure("recovers-in-time")
    if before is not None and max(before, 1) < found.step:
        return None
    untorn = newest_whole_before(test, found.unplaced)
    when = "" if untorn else "while no checkpoint of the run was whole, "
    sample = context.sample(0) if found.step == 1 else None
    weights = initial_difference(sample) if sample is not None else ""
    others = f", and so not with the control's weights: {weights}" if weights else ""
    return Cause(
        f"state is lost at the resume: {when}{found.what}{others}",
        CauseClass.STATE,
        advice_of(context).chosen if untorn else advice_of(context).nothing_whole,
    )


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # Half a checkpoint explains the state that was not restored.
    overrides=("state_lost",),
)
def torn_loaded(context: Context) -> Cause | None:
    """A resume loaded a checkpoint that was only half written."""
    if not _first(context, "torn-never-loaded"):
        return None
    return Cause(
        f"a torn checkpoint was loaded: {context.detail('torn-never-loaded')}",
        CauseClass.STATE,
        advice_of(context).torn,
    )


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # State that was not restored says more than where a pass went on.
    overrides=("not_continued",),
)
def state_lost(context: Context) -> Cause | None:
    """Tensors, the learning rate or counters were not restored as they were saved."""
    if not _first(context, "state-restored"):
        return None
    found = next(
        (lost for load in loads(context.compared.test) if _lost(lost := not_restored(load))), None
    )
    if found is None:
        return None
    names = [part.name for part in found.off]
    what = []
    if PARAMETERS in names:
        what.append("parameters")
    if BUFFERS in names:
        what.append("buffers")
    states = [name for name in names if name not in (PARAMETERS, BUFFERS)]
    if states:
        what.append(f"optimizer state ({', '.join(states)})")
    if found.lr is not None:
        what.append("the learning rate")
    sentence = f"{' and '.join(what)} lost at the resume: {context.detail('state-restored')}"
    sentence += _excluded(context, "optimizer", "lr_scheduler")
    return Cause(sentence, CauseClass.STATE, advice_of(context).loaded)


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # A pass that goes on from another step draws other numbers, and has other values.
    overrides=("random_numbers_lost", "replayed_otherwise"),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.CURVES),
)
def not_continued(context: Context) -> Cause | None:
    """A pass went on from another place, or with other counters."""
    if not _first(context, "passes-continuous"):
        return None
    found = [gap for gap in _gaps(context) if gap.shown]
    if all(gap.unsaved for gap in found):
        return Cause(
            f"a checkpoint is missing: {context.detail('passes-continuous')}",
            CauseClass.STATE,
            advice_of(context).saved,
        )
    if all(gap.counts == TOKENS_SEEN for gap in found):
        return Cause(
            f"only the trainer's count of tokens is lost at the resume: "
            f"{context.detail('passes-continuous')}; samples and state were restored",
            CauseClass.METRIC_ONLY,
            advice_of(context).tokens,
        )
    if all(gap.counts == SCHEDULE for gap in found):
        return Cause(
            f"the learning-rate schedule is lost at the resume: "
            f"{context.detail('passes-continuous')}{_excluded(context, 'lr_scheduler')}",
            CauseClass.LEARNING_RATE,
            advice_of(context).loaded,
        )
    given = next((gap.elsewhere for gap in found if gap.elsewhere), 0)
    ignored = f"{_IGNORED.format(given)}: " if given and _is_program(context) else ""
    return Cause(
        f"state is lost at the resume: {ignored}{context.detail('passes-continuous')}",
        CauseClass.STATE,
        f"{advice_of(context).chosen}, {advice_of(context).counted}"
        + (_REPLACED if any(gap.torn_since for gap in found) else ""),
    )


_REPLACED = (
    "; whether the older checkpoint is removed or overwritten before the new one is complete: "
    "write the new one to another file, and rename that"
)
_IGNORED = "the program does not go on from the checkpoint of step {}"


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # Wrong numbers are worse than late ones.
    overrides=("recovered_late",),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.CURVES),
)
def replayed_otherwise(context: Context) -> Cause | None:
    """A replay differs although all known state was restored."""
    if not _first(context, "replays-agree"):
        return None
    return Cause(
        f"a replay differs from the first time: {context.detail('replays-agree')}",
        CauseClass.REPLAY,
        "what a checkpoint does not hold and a step depends on: random numbers, buffers that are "
        "not persistent, state of kernels or of a loss scaler, and the order of the samples",
    )


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # NaN after a resume that lost something is its consequence.
    overrides=("not_finite",),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.CURVES),
)
def recovered_late(context: Context) -> Cause | None:
    """Training is right, and went on too late or not at all."""
    failed = {name for name, check in context.checks.items() if check.outcome is Outcome.FAIL}
    if failed != {"recovers-in-time"}:
        return None
    error = context.compared.test.error
    if error is not None and f"{ENDED_WITH_0} after " in error.message:  # and not without a fault
        return Cause(
            f"no recovery in time: {context.detail('recovers-in-time')}",
            CauseClass.RECOVERY,
            "the exit code of what starts the training: a shell script has that of its last "
            "command, and subprocess.run raises an error only with check=True",
        )
    if _is_program(context) and _lost_to_the_next(context):
        return Cause(
            f"no recovery in time: {context.detail('recovers-in-time')}",
            CauseClass.RECOVERY,
            f"{advice_of(context).chosen}, which may be half of one{_REPLACED}",
        )
    recovery = context.compared.recovery
    in_place = recovery is not None and recovery.restarts is RestartOwner.TORCHRUN
    saw = (
        "torchrun saw the fault (heartbeats, --monitor-interval, timeouts of collectives)"
        if in_place
        else "the last rank ended after the fault (timeouts of collectives)"
    )
    return Cause(
        f"no recovery in time: {context.detail('recovers-in-time')}",
        CauseClass.RECOVERY,
        f"where the time goes: logs/ says when {saw}, when the ranks met again, and how long they "
        "took to load",
    )


def _lost_to_the_next(context: Context) -> bool:
    """Whether training never went on after a fault that tore a checkpoint."""
    check, test = context.checks["recovers-in-time"], context.compared.test
    never = check.measured is None
    return never and any(each.torn and each.step == check.onset for each in test.struck)


def follows_from_resume(context: Context, name: str) -> bool:
    """Whether other samples, tokens or rates follow from a resume that failed a check."""
    since = context.checks[name].onset
    if name not in ("same-data", "same-tokens", "same-lr") or since is None:
        return False
    found = (context.checks[each] for each in RESUME_CHECKS if each in context.checks)
    failed = [check.onset for check in found if check.outcome is Outcome.FAIL]
    return any(onset is not None and onset <= since for onset in failed)


def of_pass(context: Context, step: int) -> str:
    """Which pass a step belongs to, if that loads a checkpoint, and what its config leaves out."""
    each = owner(context.compared.test, step)
    load = next((load for load in loads(context.compared.test) if load.into is each), None)
    if load is None:
        return ""
    return f"; step {step} is part of {load.text}{_excluded(context, 'dataloader', 'lr_scheduler')}"


def advice_of(context: Context) -> ResumeAdvice:
    """That of the trainer; of any program where only curves are known, or nothing of the set."""
    spec = context.compared.spec
    if spec is None or context.compared.test.by_curves:
        return ResumeAdvice()
    return spec.trainer.advice


def _is_program(context: Context) -> bool:
    """Whether only what is visible from outside is known of what trained."""
    spec = context.compared.spec
    return context.compared.test.by_curves or (
        spec is not None and not spec.trainer.can.all_signals
    )


def _lost(found: Lost | None) -> bool:
    return found is not None and found.any


def _first(context: Context, name: str) -> bool:
    """Whether a check of resumes failed, and no other had before, late recoveries aside."""
    check = context.checks.get(name)
    if check is None or check.outcome is not Outcome.FAIL:
        return False
    before = context.first_failure("recovers-in-time")
    return before is None or check.onset is None or check.onset <= before


def _excluded(context: Context, *parts: str) -> str:
    """Whether the run's own config leaves such a part out of what is loaded."""
    key = context.compared.test.keys.not_loaded
    for each in context.compared.test.passes:
        left_out = each.in_force.config.get(key) if each.in_force else None
        found = [part for part in parts if part in (left_out or ())]
        if found:
            return f"; {key} leaves out {' and '.join(found)}"
    return ""


def _lost_data(context: Context) -> str:
    """What the counter of samples shows about lost data; empty when it shows nothing."""
    check = context.checks["passes-continuous"]
    return f"; {check.detail}" if check.outcome is Outcome.FAIL else ""
