"""Compares the passes of a resumed run with each other: pure questions about one run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.curves import SignalSeries
from converge_harness.judge.degrees import degrees_of, parallelism_of
from converge_harness.judge.resume.faults import is_torn, last_whole_step, pass_of
from converge_harness.model import Evidence, Integers, Pass, Recovery, SetSpec, StateSample, Struck

NO_PASSES = "the run left no passes, so nothing shows what its resumes kept"
INTERRUPTED = "interrupted and continued"
NEVER_INTERRUPTED = "nothing interrupted the run, so there is no resume to judge"

TOKENS_SEEN = "tokens seen"
"""A counter that only logs and dashboards read."""

SAMPLES = "samples consumed"
SCHEDULE = "steps of the learning-rate schedule"
FROM_ELSEWHERE = "started from neither a checkpoint of the run nor the job's seed checkpoint"


class Load(NamedTuple):
    """The start of a pass from a checkpoint of the run itself."""

    step: int
    into: Pass
    source: Pass | None
    """The last pass before that saved it; None when none did."""
    saved: StateSample | None
    """What that pass saved; None when it is not known."""
    interrupted: bool = False
    """``Evidence.interrupted``."""

    @property
    def text(self) -> str:
        """``pass 2, which loads step 4 (FSDP 2 -> one rank)``."""
        how = f" ({INTERRUPTED})" if self.interrupted else ""
        return f"pass {self.into.number}{how}, which loads step {self.step}{self.change}"

    @property
    def change(self) -> str:
        """The degrees before and after, in parentheses; empty when they stay."""
        before = degrees_of(self.source) if self.source else ""
        after = degrees_of(self.into)
        return f" ({before} -> {after})" if before and before != after else ""


class Gap(NamedTuple):
    """Where a pass does not go on from what was saved."""

    what: str
    step: int
    """The first step that it touches."""
    shown: bool = True
    """False: the evidence that would show it is missing."""
    counts: str = ""
    """The counter that is wrong, if it is one."""
    unsaved: bool = False
    """Whether it is a checkpoint that was not written."""
    unplaced: int | None = None
    """Number of the pass, if it started from an unknown place."""
    elsewhere: int = 0
    """Step of the checkpoint that it should have gone on from, if it went on from another step."""
    torn_since: bool = False
    """Whether a fault tore a later checkpoint while or after it was written."""


def superseded(evidence: Evidence) -> dict[int, dict[str, SignalSeries]]:
    """Per pass and signal: the values at steps that a later pass trained again."""
    found = {}
    later: set[int] = set()
    for each in reversed(evidence.passes):
        again = np.isin(each.steps, list(later))
        if again.any():
            found[each.number] = {
                name: SignalSeries(each.steps[again], column.values[again])
                for name, column in each.signals.items()
                if len(column) == each.steps.size
            }
        later.update(each.steps.tolist())
    return found


def never_interrupted(evidence: Evidence) -> bool:
    """Whether a run would have continued after an interruption, and there was none."""
    return evidence.may_continue and len(evidence.passes) == 1


def loads(evidence: Evidence) -> Iterator[Load]:
    """Every load of a checkpoint of the run itself, in order."""
    for each in evidence.passes:
        if each.loaded_step:
            source, saved = saved_before(evidence, each.number, each.loaded_step)
            yield Load(each.loaded_step, each, source, saved, evidence.interrupted)


def saved_before(
    evidence: Evidence, number: int, step: int
) -> tuple[Pass | None, StateSample | None]:
    """The last pass before one that saved a step, and what it saved.

    A torn checkpoint only if there is no whole one.
    """
    found = [
        (each, sample)
        for each in evidence.passes
        for sample in each.saved
        if each.number < number and sample.step == step
    ]
    whole = [pair for pair in found if not is_torn(evidence, pair[0].number, step)]
    if not found:
        reached = [each for each in evidence.passes if each.number < number and step in each.steps]
        return (reached[-1] if reached else None), None
    return (whole or found)[-1]


def newest_whole_before(evidence: Evidence, number: int) -> int:
    """Step of the newest checkpoint that was whole when a pass began; 0: there is none."""
    wrote: dict[int, Pass] = {}
    for each in evidence.passes:
        if each.number < number:
            wrote |= dict.fromkeys((*(sample.step for sample in each.saved), *each.whole), each)
    whole = (
        step
        for step, each in wrote.items()
        if step in each.whole and not is_torn(evidence, each.number, step)
    )
    return max(whole, default=0)


def gaps(
    evidence: Evidence, spec: SetSpec | None = None, recovery: Recovery | None = None
) -> Iterator[Gap]:
    """Where passes do not join: steps that are lost or trained again, and counters that differ.

    A set's checkpoints and a loader that counts samples are required only where the set names them.
    Of a program's own loader nothing is known. ``recovery`` is that of the set, also of one that is
    not audited (``spec`` is None).
    """
    counts = spec is not None and spec.train_config.own_loader and spec.trainer.can.counts_tokens
    for each in evidence.passes:
        if each.loaded_step is not None and each.by_curve:
            yield from _wrong_start_of_curve(evidence, each, each.loaded_step)
        elif each.loaded_step is not None:
            yield from _wrong_start(evidence, each, each.loaded_step)
        elif each.steps.size:
            first = int(each.steps[0])
            if each.started is None:
                yield Gap(f"pass {each.number} has no record of what it loaded", first, shown=False)
            else:
                yield Gap(f"pass {each.number} {FROM_ELSEWHERE}", first, unplaced=each.number)
        if not never_interrupted(evidence):
            yield from _not_saved(evidence, spec, recovery, each)
    for load in loads(evidence) if not evidence.by_curves else ():
        yield from _counters(load, counts=counts)
    steps = evidence.steps
    lost = np.setdiff1d(np.arange(1, steps.max(initial=0) + 1), steps)
    if lost.size:
        last = int(lost[-1])
        text = f"{_steps(int(lost[0]), last)} not part of the final state"
        yield Gap(text, int(lost[0]), shown=not evidence.by_curves)


def _not_saved(
    evidence: Evidence, spec: SetSpec | None, recovery: Recovery | None, each: Pass
) -> Iterator[Gap]:
    """Checkpoints that a pass should have written, and did not."""
    for step in _promised(evidence, spec, recovery, each):
        if step in each.whole or is_torn(evidence, each.number, step):
            continue
        if any(sample.step == step for sample in each.saved):
            text = f"nothing shows that the checkpoint of step {step} of pass {each.number}"
            yield Gap(f"{text} was whole", step, shown=False)
        else:
            text = f"pass {each.number} has left no checkpoint of step {step}"
            yield Gap(text, step, unsaved=True)


def _promised_by_curve(each: Pass, due: Integers) -> list[int]:
    """The same of a start that shows its checkpoints only by what is left of them.

    Older ones may have made room for newer ones, and the newest may not have been complete yet when
    a kill struck.
    """
    recent = due[-1:] if each.ended else due[-2:]
    if recent.size and max(each.whole, default=0) >= recent[0]:
        return []
    return [int(step) for step in (recent if each.ended else recent[:-1])]


def _promised(
    evidence: Evidence, spec: SetSpec | None, recovery: Recovery | None, each: Pass
) -> list[int]:
    """Steps whose checkpoints a pass should have written: the run's last needs none."""
    last = evidence.expected_steps or int(evidence.steps.max(initial=0))
    if recovery is not None:
        reached = min(last_whole_step(evidence, each), last - 1)
        due = each.steps[(each.steps <= reached) & (each.steps % recovery.checkpoint_every == 0)]
        if each.by_curve:
            return _promised_by_curve(each, due)
        # What was still written in the background when the pass died was not promised.
        background = spec is not None and _saves_in_background(
            each, spec.trainer.keys.async_checkpoints
        )
        finished = due if each.ended or not background else due[:-1]
        return [int(step) for step in finished]
    segments = spec.segments if spec else ()
    if each.segment is None or each.segment >= len(segments) or not each.ended:
        return []
    until = segments[each.segment].until
    return [until] if until < last else []


def _saves_in_background(each: Pass, key: str) -> bool:
    mode = each.in_force.config.get(key) if each.in_force else None
    return mode not in (None, "disabled")


def _wrong_start(evidence: Evidence, each: Pass, loaded: int) -> Iterator[Gap]:
    """A pass that starts from another step than the newest checkpoint's, or trains another next."""
    number = each.number
    source, saved = saved_before(evidence, number, loaded)
    if loaded and source is None:
        yield Gap(
            f"pass {number} starts from step {loaded}, which no pass before it has trained",
            loaded + 1,
            elsewhere=newest_whole_before(evidence, number),
        )
    elif loaded and saved is None:
        yield Gap(f"nothing shows what was saved at step {loaded}", loaded + 1, shown=False)
    yield from _older_start(evidence, each, loaded)
    expected = np.arange(loaded + 1, loaded + 1 + each.steps.size)
    wrong = np.flatnonzero(each.steps != expected)
    if wrong.size:
        step, wanted = int(each.steps[wrong[0]]), int(expected[wrong[0]])
        if step > wanted:
            text = f"trains step {step} next: {_steps(wanted, step - 1)} lost"
        else:
            text = f"trains step {step} next: {_steps(step, wanted - 1)} trained twice"
        after = f"loads step {loaded} and" if wanted == loaded + 1 else f"after step {wanted - 1}"
        yield Gap(f"pass {number} {after} {text}", min(step, wanted))


def _older_start(evidence: Evidence, each: Pass, loaded: int) -> Iterator[Gap]:
    """A pass that starts from an older step than the newest checkpoint's."""
    newest = newest_whole_before(evidence, each.number)
    if loaded < newest:
        which = f"step {loaded}" if loaded else "the initial weights"
        text = f"pass {each.number} starts from {which} although step {newest} was saved"
        torn = _torn_since(evidence, each, newest)
        text += f", once {torn.kind} had torn that of step {torn.step}" if torn else ""
        yield Gap(text, loaded + 1, elsewhere=newest, torn_since=torn is not None)


def _torn_since(evidence: Evidence, each: Pass, newest: int) -> Struck | None:
    """The fault that tore a later checkpoint than ``newest`` right before a pass."""
    found = (
        fault
        for fault in evidence.struck
        if fault.torn and fault.step > newest and pass_of(evidence, fault) == each.number - 1
    )
    return next(found, None)


def _wrong_start_of_curve(evidence: Evidence, each: Pass, loaded: int) -> Iterator[Gap]:
    """The same where only a curve shows where a pass starts: a row may also be missing in it."""
    number, newest = each.number, newest_whole_before(evidence, each.number)
    yield from _older_start(evidence, each, loaded)
    if loaded > newest:
        before = [other.steps for other in evidence.passes if other.number < number]
        if any(loaded in steps for steps in before):
            text = f"pass {number} starts from step {loaded}, of which no checkpoint is whole"
            yield Gap(text, loaded + 1)
        else:
            text = f"pass {number} goes on from step {newest}, and its curve begins with step "
            yield Gap(f"{text}{loaded + 1}", newest + 1, shown=False)
    missing = np.setdiff1d(np.arange(loaded + 1, each.steps.max(initial=loaded)), each.steps)
    if missing.size:
        text = f"the curve of pass {number} has no row of step {missing[0]}"
        yield Gap(text, int(missing[0]), shown=False)


def _steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def _counters(load: Load, *, counts: bool) -> Iterator[Gap]:
    """Counters right after a load that are not those that were saved.

    ``counts``: the loader counts the samples that it gives, so their count must be recorded.
    """
    first = load.step + 1
    loaded, saved = load.into.loaded, load.saved
    if loaded is None or saved is None:
        if load.into.steps.size:
            yield Gap(f"no record of the counters of {load.text}", first, shown=False)
        return
    if loaded.trainer_step != load.step:
        yield Gap(f"the trainer is at step {loaded.trainer_step} in {load.text}", first)
    for what, now, before in (
        (TOKENS_SEEN, loaded.tokens_seen, saved.tokens_seen),
        (SAMPLES, loaded.samples_consumed, saved.samples_consumed),
        (SCHEDULE, loaded.schedule_steps, saved.schedule_steps),
    ):
        if now is None and before is None:
            if counts and what == SAMPLES:
                yield Gap(f"no record of the {what} of {load.text}", first, shown=False)
            continue
        if now is None or before is None:
            yield Gap(f"{what} are recorded on one side only of {load.text}", first, shown=False)
        elif now != before and not (what == TOKENS_SEEN and counts_one_rank(load)):
            # Without the degrees it is not known whether this is the count of one rank.
            shown = what != TOKENS_SEEN or _degrees_known(load)
            text = f"{what}: {now} in {load.text}, {before} were saved"
            yield Gap(text, first, shown, counts=what)
    if loaded.names == saved.names:
        yield from _updates_counted(load, saved, loaded)


def _degrees_known(load: Load) -> bool:
    ran = (load.source.in_force if load.source else None, load.into.in_force)
    return all(parallelism_of(each) is not None for each in ran)


def counts_one_rank(load: Load) -> str:
    """How a count of tokens that is kept per rank was restored, in a clause; empty when correctly.

    torchtitan saves ``ntokens_seen`` of one rank, and every rank loads it as its own
    (``Trainer.state_dict``, 0.3.0 and 0.2.2): with other degrees the sum changes. Only logs read
    it, so training is not affected; any other difference is a gap.
    """
    saved, loaded = load.saved, load.into.loaded
    if load.source is None or saved is None or loaded is None:
        return ""
    before, after = parallelism_of(load.source.in_force), parallelism_of(load.into.in_force)
    kept, now = saved.tokens_seen, loaded.tokens_seen
    if before is None or after is None or kept is None or now is None or kept == now:
        return ""
    if kept * after.dp * after.cp != now * before.dp * before.cp:
        return ""
    return (
        f"{TOKENS_SEEN}: {now} in {load.text}, {kept} were saved, because the trainer restores "
        "the count of one rank on every rank (a metric; nothing else reads it)"
    )


def tokens_off(evidence: Evidence) -> dict[int, int]:
    """Steps from which on a count of tokens that is kept per rank is off, and by how many."""
    off: dict[int, int] = {}
    found: dict[int, int] = {}
    for load in loads(evidence):
        number = load.into.number
        off[number] = off.get(load.source.number, 0) if load.source else 0
        if counts_one_rank(load) and load.saved and load.into.loaded:
            off[number] += (load.into.loaded.tokens_seen or 0) - (load.saved.tokens_seen or 0)
            found[load.step + 1] = off[number]
    return found


def _updates_counted(load: Load, saved: StateSample, loaded: StateSample) -> Iterator[Gap]:
    now, before = loaded.state_steps, saved.state_steps
    off = np.flatnonzero((now != before) & ~(np.isnan(now) & np.isnan(before)))
    if off.size:
        index = off[0]
        text = f"{off.size} of {len(saved.names)} parameters differ"
        yield Gap(
            f"the optimizer counts {now[index]:g} updates of {saved.names[index]} in {load.text}, "
            f"{before[index]:g} were saved ({text})",
            load.step + 1,
        )


def at_resume(evidence: Evidence, spec: SetSpec | None) -> str:
    """Where a run ended, if at a resume: `` at the resume after step 4 (FSDP 2 -> one rank)``.

    Its last pass made no step, or the next segment never started. Empty for other ends.
    """
    passes = evidence.passes
    if not passes:
        return ""
    last = passes[-1]
    if last.steps.size and last.ended:
        before, after = last, (last.segment or 0) + 1
        if spec is None or after >= len(spec.segments):
            return ""
        if spec.segments[after - 1].until not in last.whole:
            return ""  # it broke when it saved its last step
    elif last.steps.size or len(passes) == 1:
        return ""
    else:
        before, after = passes[-2], last.segment or 0
    trained = [int(each.steps[-1]) for each in passes if each.steps.size]
    step = last.loaded_step if not last.steps.size else None
    change = ""
    if spec is not None and after < len(spec.segments):
        change = f" ({degrees_of(before)} -> {spec.segments[after].parallelism})"
    known = step if step is not None else (trained[-1] if trained else 0)
    return f" at the resume after step {known}{change}"
