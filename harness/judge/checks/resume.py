"""The resume tier: whether a run in several passes equals an uninterrupted one.

Asked of runs that were made in passes, or should have been. The curve of all passes is judged like
any other; these checks say what each resume kept, whether the run was broken and resumed as its set
says, whether it recovered, and whether replayed steps have the same values again.

A control or repeat that was interrupted and continued has to be as good as an uninterrupted run
before anything is compared with it (:func:`badly_continued`), so it is asked the same. There is
no other run to compare its samples with: the counter of samples and the replays show whether its
loader kept its place, and a test set that trained on other samples than its control is INVALID
anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.curves import relative_difference
from converge_harness.judge.compare.floors import FLOORS
from converge_harness.judge.compare.random_states import effect, generators, repeats
from converge_harness.judge.compare.tensors import MOST_DEVIATIONS
from converge_harness.judge.degrees import degrees_of
from converge_harness.judge.in_force import unlike_a_repeat
from converge_harness.judge.resume.faults import (
    IN_A_STEP,
    faults_that_ended,
    is_torn,
    nodes_in,
    pass_of,
    steps_after,
    struck_pass,
    torn_checkpoints,
    trained_on_without,
)
from converge_harness.judge.resume.passes import (
    INTERRUPTED,
    NEVER_INTERRUPTED,
    NO_PASSES,
    Load,
    counts_one_rank,
    gaps,
    loads,
    never_interrupted,
    newest_whole_before,
)
from converge_harness.judge.resume.saved_state import (
    BUFFERS,
    PARAMETERS,
    RESTORED,
    StatePart,
    parts,
    says_nothing,
)
from converge_harness.judge.soundness import Flaw
from converge_harness.model import (
    JUDGED_SIGNALS,
    Deviation,
    Evidence,
    Fault,
    FaultKind,
    InForce,
    Limit,
    Outcome,
    Pass,
    Recovery,
    Segment,
    SetSpec,
    Struck,
    Tier,
    Torn,
    ranks,
)
from converge_harness.wording import counted


@check(Tier.RESUME)
def passes_continuous(
    test: Evidence, spec: SetSpec | None, recovery: Recovery | None
) -> CheckResult:
    """Every pass goes on from the newest checkpoint, and the final state has every step once.

    Every checkpoint that the set promises was written. Right after every load the counts of steps,
    tokens, samples and the optimizer's updates are as saved. A count of tokens that the trainer
    keeps and restores per rank is reported and is no failure: only logs read it.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    found = sorted(gaps(test, spec, recovery), key=lambda gap: (not gap.shown, gap.step))
    if not found:
        resumes = list(loads(test))
        text = f"{counted(len(test.passes), 'pass')}, {len(resumes)} from a checkpoint of the run"
        text += f", {INTERRUPTED}" if test.interrupted else ""
        notes = [note for load in resumes if (note := counts_one_rank(load))]
        return passed("; ".join([text, *notes]))
    chosen = [gap for gap in found if gap.shown] or found
    detail = "; ".join(gap.what for gap in chosen[:3])
    more = f" (and {len(chosen) - 3} more)" if len(chosen) > 3 else ""  # noqa: PLR2004 (as many as shown)
    outcome = Outcome.FAIL if chosen[0].shown else Outcome.INVALID
    return CheckResult(outcome, detail + more, onset=chosen[0].step)


@check(Tier.RESUME)
def state_restored(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Parameters, optimizer state, buffers and lr right after every load are those that were saved.

    Compared by sketches of whole tensors, so across a change of degrees too: all tensors that the
    runs' samples know. A run that never loaded a checkpoint of its own tests no resume.
    """
    if unknown := _not_shown(test, "what a resume restored"):
        return unknown
    limit = Limit(RESTORED, "rounding of sums in float64")
    compared: list[Lost] = []
    silent: list[Load] = []
    resumes = list(loads(test))
    for load in resumes:
        lost = not_restored(load)
        if lost is not None and lost.any:
            return _not_restored(load, lost, limit)
        if lost is not None:
            compared.append(lost)
        elif load.into.steps.size:  # one that made no step may have died before it was looked at
            silent.append(load)
    if silent:
        return invalid(f"nothing shows what was restored in {silent[0].text}", silent[0].step + 1)
    for load in resumes:
        if empty := says_nothing(load, test, control):
            return invalid(f"in {load.text}, nothing shows {empty}", load.step + 1)
    if not compared:
        detail = "no pass loaded a checkpoint of the run"
        asked = spec is not None and spec.resumes and not test.may_continue
        return invalid(f"{detail}, so no resume was tested") if asked else skipped(detail)
    return CheckResult(
        Outcome.PASS,
        _restored(compared),
        measured=max(lost.worst for lost in compared),
        limit=limit,
        unit="relative",
    )


def _not_shown(test: Evidence, what: str) -> CheckResult | None:
    """The answer about a run whose evidence cannot show ``what``; None if it may."""
    if not test.passes:
        return invalid(NO_PASSES)
    if test.by_curves:
        return skipped(f"a curve does not show {what}: the probe does (docs/probe.md)")
    return None


def _restored(compared: list[Lost]) -> str:
    text = f"{counted(len(compared), 'load')} of "
    text += ", ".join(part.name for part in compared[0].parts)
    not_finite = max(part.not_finite for lost in compared for part in lost.parts)
    if not not_finite:
        return text
    return f"{text}; {counted(not_finite, 'buffer')} not compared: not finite on either side"


class Lost(NamedTuple):
    """What a load did not restore."""

    parts: tuple[StatePart, ...]
    """All that were compared."""
    lr: tuple[float, float] | None
    """Rate as saved and as loaded, where they differ."""

    @property
    def off(self) -> list[StatePart]:
        return [part for part in self.parts if part.off.size]

    @property
    def any(self) -> bool:
        return bool(self.off) or self.lr is not None

    @property
    def worst(self) -> float:
        return max(float(part.difference.max(initial=0.0)) for part in self.parts)


def not_restored(load: Load) -> Lost | None:
    """What a load did not restore; None when the evidence of it is missing."""
    saved, loaded = load.saved, load.into.loaded
    if saved is None or loaded is None:
        return None
    rates = None if saved.lr == loaded.lr else (saved.lr, loaded.lr)
    return Lost(tuple(parts(saved, loaded)), rates)


def _not_restored(load: Load, lost: Lost, limit: Limit) -> CheckResult:
    step = load.step + 1
    deviations = [
        Deviation(
            part.tensors[index] + (f" ({part.name})" if part.name != PARAMETERS else ""),
            load.step,
            float(part.difference[index]),
            RESTORED,
        )
        for part in lost.off
        for index in part.off.tolist()
    ]
    deviations.sort(key=lambda each: -each.measured)
    return CheckResult(
        Outcome.FAIL,
        f"in {load.text}, {lost_text(lost)}",
        measured=lost.worst if lost.off else None,
        limit=limit if lost.off else None,
        unit="relative" if lost.off else "",
        onset=step,
        deviations=tuple(deviations[:MOST_DEVIATIONS]),
    )


def lost_text(lost: Lost) -> str:
    """``exp_avg of 12 of 12 parameters is off by up to 1 (output.weight)``, every part."""
    parts = []
    for part in lost.off:
        what = part.name if part.name not in (PARAMETERS, BUFFERS) else "the value"
        kind = BUFFERS if part.name == BUFFERS else "parameters"
        most = float(part.difference[part.off[0]])
        off = f"off by up to {most:.2g}" if np.isfinite(most) else "missing, zero or NaN"
        parts.append(
            f"{what} of {part.off.size} of {len(part.tensors)} {kind} is {off} "
            f"({part.tensors[part.off[0]]})"
        )
    if lost.lr is not None:
        parts.append(f"lr is {lost.lr[1]!r}, {lost.lr[0]!r} was saved")
    return "; ".join(parts)


class Other(NamedTuple):
    """The first step of a pass whose samples are not the control's."""

    number: int
    step: int
    digest: str | None
    first: bool
    """Whether it is the first step of its pass."""
    change: str
    """Degrees before and after the resume, where they differ."""


@check(Tier.RESUME)
def data_resumed(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Every pass goes on with the samples that the control trains on, replayed steps too.

    The loader lost its place at a resume: it starts over, skips samples or gives them twice.
    """
    unknown = _not_shown(test, "which samples a resume goes on with")
    if unknown or never_interrupted(test):
        return unknown or skipped(NEVER_INTERRUPTED)
    expected = digests_of(control)
    if not expected or not any(any(each.batch_digests) for each in test.passes):
        detail = "no batch digests: nothing shows which samples a resume went on with"
        return skipped(detail) if spec is None else invalid(detail)
    other = other_samples(test, control)
    if other is None:
        return passed(
            f"{counted(sum(each.steps.size for each in test.passes), 'step')} of all passes"
        )
    if other.digest is None or other.step not in expected:
        return invalid(f"no batch digest at step {other.step} of pass {other.number}", other.step)
    if other.number == test.passes[0].number:
        detail = f"the samples differ at step {other.step}, before any resume"
        return invalid(detail, other.step)
    return CheckResult(Outcome.FAIL, data_sentence(other, control), onset=other.step)


def digests_of(evidence: Evidence) -> dict[int, str]:
    """Batch digests by step, where the run left one."""
    pairs = zip(evidence.steps.tolist(), evidence.batch_digests, strict=False)
    return {step: digest for step, digest in pairs if digest is not None}


def other_samples(test: Evidence, control: Evidence) -> Other | None:
    """The first step, pass by pass, that was trained on other samples than the control's."""
    expected = digests_of(control)
    for index, each in enumerate(test.passes):
        for step, digest in zip(each.steps.tolist(), each.batch_digests, strict=True):
            if digest is None or digest != expected.get(step):
                before = degrees_of(test.passes[index - 1]) if index else ""
                after = degrees_of(each)
                change = f" ({before} -> {after})" if index and before != after else ""
                return Other(each.number, step, digest, step == int(each.steps[0]), change)
    return None


def data_sentence(other: Other, control: Evidence) -> str:
    """A sentence that says what a resume did to the samples."""
    seen = [step for step, digest in digests_of(control).items() if digest == other.digest]
    when = "right after" if other.first else "after"
    text = (
        f"step {other.step}, {when} the resume of pass {other.number}{other.change}, is trained on "
        "other samples than the control's"
    )
    if seen and seen[0] == int(control.steps[0]):
        return f"{text}: those of step {seen[0]}, so the data started over from the beginning"
    return f"{text}: those of step {seen[0]}" if seen else text


CHECKS: tuple[Question, ...] = (passes_continuous, state_restored, data_resumed)


@check(Tier.RESUME)
def segments_as_scheduled(test: Evidence, segments: tuple[Segment, ...]) -> CheckResult:
    """Each segment of the schedule is one pass with its steps and its number of ranks.

    A run with another schedule is another experiment.
    """
    if not segments:
        return skipped("no segments are named")
    if not test.passes:
        return invalid(NO_PASSES)
    wrong = next(_unscheduled(test, segments), None)
    return invalid(*wrong) if wrong else passed(counted(len(segments), "segment"))


def _unscheduled(test: Evidence, segments: tuple[Segment, ...]) -> Iterator[tuple[str, int]]:
    """How the passes differ from the schedule, and from which step on."""
    first = 1
    for index, segment in enumerate(segments):
        text = f"segment {index + 1} (steps {first} to {segment.until}, {segment.parallelism})"
        if index >= len(test.passes):
            yield f"{text} never started", first
            return
        each = test.passes[index]
        if each.segment != index:
            yield f"pass {each.number} should be of {text}", first
        if each.world_size != segment.parallelism.world_size:
            yield f"{text} ran on {ranks(each.world_size)}", first
        if not np.array_equal(each.steps, np.arange(first, segment.until + 1)):
            trained = f"{each.steps[0]} to {each.steps[-1]}" if each.steps.size else "none"
            yield f"{text} trained steps {trained}", first
        if not each.ended:
            yield f"{text} did not come to its end", first
        first = segment.until + 1
    more = len(test.passes) - len(segments)
    if more:
        yield f"{counted(len(test.passes), 'pass')} for {counted(len(segments), 'segment')}", first


@check(Tier.RESUME)
def faults_struck(test: Evidence, spec: SetSpec | None, recovery: Recovery | None) -> CheckResult:
    """Every fault of the script happened, once, and ended the pass that it struck; no other did.

    A program may train on after a full disk, if it does not report that checkpoint as saved.
    A run that was not interrupted shows no recovery, nor does one that broke down by itself.
    """
    if recovery is None:
        return skipped("no faults are named")
    if test.may_continue:
        return _not_by_script(test)
    asked = [_unscripted(test, recovery.faults), _without_effect(test), _without_fault(test)]
    if spec is not None and recovery.nodes[0] != recovery.nodes[1]:
        first, later = test.passes[:1], test.passes[1:]
        asked.insert(1, _other_world(test, spec, first))
        asked.append(_other_world(test, spec, later))
    asked.append(_not_saved(test, recovery.faults))
    wrong = next(chain(*asked), None)
    if wrong:
        return invalid(*wrong)
    notes = (*_struck_by_curve(test), *(text for text, _ in _saved_nothing(test)))
    return passed("; ".join((counted(len(test.struck), "fault"), *notes)))


def _struck_by_curve(test: Evidence) -> Iterator[str]:
    """At which step a program without the probe really was: nothing holds it at the named one."""
    for fault in test.struck:
        if fault.curve_step is not None:
            yield (
                f"{fault.kind} at step {fault.step} struck pass {pass_of(test, fault)} when "
                f"converge had read step {fault.curve_step} of its curve"
            )


def _not_by_script(test: Evidence) -> CheckResult:
    """Interruptions that are in no script: with one it is another experiment."""
    if wrong := next(_unscripted(test, ()), None):
        return invalid(*wrong)
    if not test.interrupted:
        return skipped(NEVER_INTERRUPTED)
    reached = [int(each.steps.max(initial=each.loaded_step or 0)) for each in test.passes[:-1]]
    steps = ", ".join(str(step) for step in reached)
    return skipped(f"{INTERRUPTED}, which is in no script: after step {steps}")


def _unscripted(test: Evidence, script: tuple[Fault, ...]) -> Iterator[tuple[str, int]]:
    """Faults that did not strike as the script says."""
    struck = {fault.index: fault for fault in test.struck}
    for index, fault in enumerate(script):
        text = f"fault {index + 1} ({fault.kind.value} at step {fault.step})"
        found = struck.get(index)
        if found is None:
            why = _NOTHING_TO_CUT if fault.kind is FaultKind.CKPT_TORN else _TOO_FAST
            yield f"{text} never struck{why if test.by_curves else ''}", fault.step
            return
        if (found.kind, found.step) != (fault.kind.value, fault.step):
            yield f"{text} was {found.kind} at step {found.step}", fault.step
        if fault.kind in (FaultKind.CKPT_TORN, FaultKind.DISK_FULL) and not found.torn:
            other = "the write that was cut short was not to a file of the checkpoint folder"
            yield f"{text} left no torn checkpoint: {other}", fault.step
        if elsewhere := _elsewhere(fault, found):
            yield f"{text} {elsewhere}", fault.step
    more = test.struck[len(script) :]
    if more:
        text = f"{counted(len(test.struck), 'fault')} struck, {len(script)} are named"
        yield text, more[0].step


def _elsewhere(fault: Fault, struck: Struck) -> str:
    """Where a fault struck, if not on the rank or node that the script names."""
    if fault.kind is FaultKind.AGENT_LOSS:
        if struck.node not in (None, fault.node):
            return f"struck node {struck.node}, node {fault.node} is named"
    elif _names_rank(fault) and struck.rank not in (None, fault.rank):
        return f"struck rank {struck.rank}, rank {fault.rank} is named"
    return ""


def _names_rank(fault: Fault) -> bool:
    if fault.kind is FaultKind.CKPT_TORN:
        return fault.torn is Torn.TRUNCATED
    return fault.kind not in (FaultKind.PREEMPT, FaultKind.JOIN)


def _without_effect(test: Evidence) -> Iterator[tuple[str, int]]:
    """Faults that broke nothing: the pass went on to its end or to another fault."""
    ended = {fault.index for fault in faults_that_ended(test)}
    for fault in test.struck:
        number, each = pass_of(test, fault), struck_pass(test, fault)
        if each is None:
            text = f"struck pass {number}, which left no evidence"
            if number is None:
                text = "struck an unknown pass"
            yield f"{fault.kind} at step {fault.step} {text}", fault.step
            continue
        last = int(each.steps.max(initial=0))
        if fault.kind == FaultKind.HANG and last == test.expected_steps:
            text = f"hang at step {fault.step} did not hold pass {number}, which trained its last "
            yield f"{text}step{_NOT_HELD}", fault.step
        if fault.index in ended or trained_on_without(fault, each):
            continue
        text = f"{fault.kind} at step {fault.step} did not end pass {number}"
        if fault.kind == FaultKind.DISK_FULL and fault.step in each.whole:
            text += (
                f", which reported the checkpoint of step {fault.step} as saved although its "
                "writing had failed"
            )
        text = f"{text}, which went on to step {last}"
        if fault.kind == FaultKind.PREEMPT:
            text += _TOO_SHORT
        elif fault.curve_step is not None:
            text += _TOO_FAST
        yield text, fault.step


_TOO_FAST = (
    ": the program ended before converge could interrupt it, so let it write every row of its "
    "curve at once (flush=True), and name an earlier step or train longer; or its environment, by "
    "which converge finds a rank, is hidden (setproctitle)"
)
_NOTHING_TO_CUT = (
    ": converge read the next step too late, so let the program write every row of its curve at "
    "once (flush=True) and train longer; or by then the checkpoint was not there, or a later one "
    "was, so let it save before the next step, and raise checkpoint_every; or a start began after "
    "that step; or the program's environment, by which converge finds a rank, is hidden "
    "(setproctitle)"
)
_NOT_HELD = (
    ": the others do not wait for that rank, or the step is too late, so name an earlier one"
)
_TOO_SHORT = (
    ": the steps after SIGTERM took less time than the program may take to stop, so name an "
    "earlier step for the fault, or train more steps"
)


def _not_saved(test: Evidence, script: tuple[Fault, ...]) -> Iterator[tuple[str, int]]:
    """Preemptions after which the program should have saved (``saves``), and did not."""
    for text, fault in _saved_nothing(test):
        if script[fault.index].saves:
            given = f"{script[fault.index].grace_s:g} s"
            promise = f"By saves = true it saves before it stops, for which it has {given}"
            yield f"{text}. {promise}: if it needs longer, raise grace_s", fault.step


def _saved_nothing(test: Evidence) -> Iterator[tuple[str, Struck]]:
    """Preemptions after which a program saved no later step, so that it trained steps again."""
    for fault in test.struck:
        each = struck_pass(test, fault)
        if fault.kind != FaultKind.PREEMPT or each is None:
            continue
        if max(each.whole, default=0) < fault.step:
            newest = newest_whole_before(test, each.number + 1)
            text = f"pass {each.number} saved no step after SIGTERM at step {fault.step}"
            text += f", or not before it was killed: training goes on from step {newest}"
            yield text, fault


def _without_fault(test: Evidence) -> Iterator[tuple[str, int]]:
    """Passes that died without a fault of the script."""
    last = 0
    ended = {pass_of(test, fault) for fault in faults_that_ended(test)}
    for index, each in enumerate(test.passes, 1):
        if each.number != index:
            yield f"pass {index} left no evidence, and no fault of the script ended it", last + 1
            return
        last = int(each.steps.max(initial=last))
        if not each.ended and each.number not in ended:
            yield f"pass {each.number} died, and not by a fault of the script", last + 1


def _other_world(
    test: Evidence, spec: SetSpec, passes: tuple[Pass, ...]
) -> Iterator[tuple[str, int]]:
    """Passes on other nodes than the script says: some never came, or never left."""
    recovery = spec.recovery
    if recovery is None:
        return
    most = recovery.nodes[1]
    for each in passes:
        nodes = nodes_in(test, recovery, each)
        wanted = spec.parallelism.world_size * nodes // most
        if each.world_size != wanted:
            verb = "start" if each is test.passes[0] else "go on"
            text = f"{nodes} of {most} nodes should {verb} with {ranks(wanted)}"
            has = f"pass {each.number} has {ranks(each.world_size)}"
            yield f"{text}, {has}", (each.loaded_step or 0) + 1


@check(Tier.RESUME)
def recovers_in_time(test: Evidence, recovery: Recovery | None) -> CheckResult:
    """After every fault that ended a pass, a step is finished within the stated time.

    Training never went on, or took longer to recover than was promised. If it never went on because
    a port was taken, it is not known whose: nothing is said about the training.
    """
    if recovery is None or test.may_continue:
        return skipped("no time to recover is named")
    if not test.passes:
        return invalid(NO_PASSES)
    broke = faults_that_ended(test)
    if not broke:
        return skipped("no fault ended a pass")
    limit = Limit(recovery.within_s, "time to recover")
    longest, details = 0.0, []
    late: Struck | None = None
    for fault in broke:
        name = f"{fault.kind} at step {fault.step}"
        after = steps_after(test, fault)
        if after is None:
            return invalid(f"for some step it is not recorded when it ended: {name}", fault.step)
        if not after:
            return _never_again(test, fault, name, limit)
        seconds = after[0][0] - fault.at
        details.append(f"{name}: {seconds:.1f} s")
        if seconds > limit.value and late is None:
            late = fault
        longest = max(longest, seconds)
    return CheckResult(
        Outcome.FAIL if late else Outcome.PASS,
        "; ".join(details),
        measured=longest,
        limit=limit,
        unit="s",
        onset=late.step if late else None,
    )


def _never_again(test: Evidence, fault: Struck, name: str, limit: Limit) -> CheckResult:
    """Of a fault after which no step ended; ``name`` says which."""
    if test.error is not None and test.error.port_taken:
        taken = f"after the fault {name} a port was taken: {test.error.text}"
        return invalid(taken, fault.step)
    return CheckResult(
        Outcome.FAIL,
        f"no step ended after the fault {name}",
        limit=limit,
        unit="s",
        onset=fault.step,
    )


@check(Tier.RESUME)
def torn_never_loaded(test: Evidence) -> CheckResult:
    """No pass loads a checkpoint that was torn when it was written.

    Half a checkpoint means a wrong state, or a crash at the next resume.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    torn = sorted(torn_checkpoints(test), key=lambda each: (each[1], each[0] or 0))
    if not torn:
        return skipped("no checkpoint was torn")
    for number, step in torn:
        for each in test.passes:
            later = number is None or each.number > number
            if later and each.loaded_step == step and not _saved_whole(test, each, step):
                return CheckResult(
                    Outcome.FAIL,
                    f"pass {each.number} loads the checkpoint of step {step}, which was torn when "
                    f"pass {number or 'before'} wrote it",
                    onset=step + 1,
                )
    return passed(counted(len(torn), "torn checkpoint"))


def _saved_whole(test: Evidence, loading: Pass, step: int) -> bool:
    """Whether the last pass that saved a step, before another loaded it, saved it whole."""
    savers = [
        each.number
        for each in test.passes
        if each.number < loading.number and any(sample.step == step for sample in each.saved)
    ]
    return bool(savers) and not is_torn(test, savers[-1], step)


FAULT_CHECKS: tuple[Question, ...] = (
    segments_as_scheduled,
    faults_struck,
    recovers_in_time,
    torn_never_loaded,
)


def badly_continued(
    evidence: Evidence, spec: SetSpec | None = None, *, other: Evidence | None = None
) -> Flaw | None:
    """What a run that continues after interruptions lost at a resume, or what no evidence shows.

    None for any other run. ``spec`` says which checkpoints the run should have written. ``other``
    is a run that it is compared with: without one nothing shows whether random numbers that are
    drawn again change anything, and they are no flaw.
    """
    if not evidence.may_continue:
        return None
    how = f"was {INTERRUPTED}, and" if evidence.interrupted else "has several passes:"
    for finding in _findings(evidence, spec):
        if finding.outcome in (Outcome.FAIL, Outcome.INVALID):
            return Flaw(f"{how} {finding.detail}", finding.onset)
    again = _draws_again(evidence, other, how) if other else None
    return again or _other_config(evidence)


def _findings(evidence: Evidence, spec: SetSpec | None) -> Iterator[CheckResult]:
    recovery = spec.recovery if spec else None
    yield passes_continuous.ask(test=evidence, spec=spec, recovery=recovery)
    yield state_restored.ask(test=evidence, control=evidence, spec=spec)
    yield replays_agree.ask(test=evidence)


def _draws_again(evidence: Evidence, other: Evidence, how: str) -> Flaw | None:
    """Random numbers that start over where a pass begins, and that its model uses.

    Its second step counts, too: in the first one a loader may draw a seed of its own.
    """
    begins = {each.loaded_step for each in evidence.passes if each.loaded_step}
    for each in generators(evidence, other):
        for found in repeats(each.test, each.control):
            at_a_resume = not begins.isdisjoint({found.step - 1, found.step - 2})
            if at_a_resume and effect(each, found):
                what = f"draws the random numbers of step {found.of} again, from {each.whose}"
                return Flaw(f"{how} {what}", found.step)
    return None


def _other_config(evidence: Evidence) -> Flaw | None:
    """A pass that ran with another configuration than the first, or left no record of it."""
    trained = [each for each in evidence.passes if each.steps.size]
    for each in trained:
        first = int(each.steps[0])
        if each.in_force is None:
            return Flaw(f"left no record of what ran in pass {each.number}", first)
        then = trained[0].in_force or InForce()
        keys = unlike_a_repeat(each.in_force, then, evidence.keys.of_repeats)
        if keys:
            what = f"went on with another configuration in pass {each.number}"
            return Flaw(f"{what}: {', '.join(keys[:3])}", first)
    return None


class Replay(NamedTuple):
    """A step that was trained once more."""

    step: int
    first: tuple[Pass, int]
    """The first pass that trained it, and the index of the step there."""
    again: tuple[Pass, int]


@check(Tier.RESUME)
def replays_agree(test: Evidence) -> CheckResult:
    """A replayed step has the values of the first time: samples, tokens, lr, loss, grad norm.

    A run whose restarts change what follows cannot be reproduced.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    unknown = next(_without_values(test), None)
    if unknown:
        return invalid(*unknown)
    found = list(replays(test))
    if not found:
        return skipped("no step was replayed")
    worst, measured, limit = -1.0, 0.0, Limit(0.0, "exact")
    floors = FLOORS[test.precision]
    origin = f"floor of {test.precision.value} arithmetic"
    for replay in found:
        text = _differs_exactly(replay)
        if text:
            return CheckResult(
                Outcome.FAIL, f"step {replay.step} {text}{_of(replay)}", onset=replay.step
            )
        for signal in () if _poisoned(test, replay.step, replay.first[0]) else JUDGED_SIGNALS:
            before, again = _value(replay.first, signal), _value(replay.again, signal)
            if before is None and again is None:
                continue
            allowed = float(floors[signal].at(np.array([replay.step]))[0])
            difference = _apart(before, again)
            if not difference <= allowed:
                return CheckResult(
                    Outcome.FAIL,
                    f"{signal} of step {replay.step} is {_spelled(again)}, {_spelled(before)} "
                    f"the first time{_of(replay)}",
                    measured=difference,
                    limit=Limit(allowed, origin),
                    unit="relative",
                    onset=replay.step,
                )
            if difference / allowed > worst:
                worst, measured = difference / allowed, difference
                limit = Limit(allowed, origin)
    steps = [replay.step for replay in found]
    return CheckResult(
        Outcome.PASS,
        f"{counted(len(found), 'step')} replayed" + ("" if measured else ", with equal values"),
        measured=measured,
        limit=limit,
        unit="relative",
        steps=(min(steps), max(steps)),
    )


def _without_values(test: Evidence) -> Iterator[tuple[str, int]]:
    """Steps that a pass had trained when a fault struck, but whose values it did not record."""
    passes = {each.number: each for each in test.passes}
    for fault in test.struck:
        each = passes.get(pass_of(test, fault) or 0)
        if each is None or (each.loaded_step is None and fault.curve_step is None):
            continue
        last = fault.step - (fault.kind in IN_A_STEP and not each.by_curve)
        if fault.curve_step is not None:
            last = fault.curve_step  # converge had read that row, and so all before it
        loaded = last - 1 if each.loaded_step is None else each.loaded_step
        missing = np.setdiff1d(np.arange(loaded + 1, last + 1), each.steps)
        if missing.size:
            text = f"pass {each.number}, which {fault.kind} struck at step {fault.step}"
            yield f"{text}, left nothing of step {missing[0]}", int(missing[0])


def replays(test: Evidence) -> Iterator[Replay]:
    """Every step that a pass trained again, with the first pass that had trained it.

    Values that a fault made NaN are compared once, and the next ones replace them.
    """
    first: dict[int, tuple[Pass, int]] = {}
    for each in test.passes:
        for index, step in enumerate(each.steps.tolist()):
            if step in first:
                yield Replay(step, first[step], (each, index))
            if step not in first or _poisoned(test, step, first[step][0]):
                first[step] = (each, index)


def _differs_exactly(replay: Replay) -> str:
    """Which of the inputs differs, in a clause; empty when none does."""
    digests = [each.batch_digests[index] for each, index in (replay.first, replay.again)]
    if digests[0] != digests[1]:
        return "is trained on other samples"
    for signal in ("tokens", "lr"):
        before, again = _value(replay.first, signal), _value(replay.again, signal)
        if before != again:
            return f"has {signal} {again!r}, {before!r} the first time"
    return ""


def _poisoned(test: Evidence, step: int, each: Pass) -> bool:
    """Whether a fault made a pass's values of a step NaN: a replay has to have others."""
    return any(
        fault.kind == FaultKind.NAN_BATCH
        and fault.step == step
        and pass_of(test, fault) == each.number
        for fault in test.struck
    )


def _of(replay: Replay) -> str:
    (first, _), (again, _) = replay.first, replay.again
    before, after = degrees_of(first), degrees_of(again)
    change = f", {before} -> {after}" if before != after else ""
    return f" (pass {again.number} after pass {first.number}{change})"


def _value(where: tuple[Pass, int], signal: str) -> float | None:
    each, index = where
    column = each.signals.get(signal)
    return None if column is None else column[index]


def _apart(before: float | None, again: float | None) -> float:
    if before is None or again is None:
        return np.inf
    return float(relative_difference(np.array(before), np.array(again)))


def _spelled(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.8g}"


REPLAY_CHECKS: tuple[Question, ...] = (replays_agree,)
