"""Whether a control or repeat that a scheduler requeued is as good as an uninterrupted run.

A test set answers for its resumes in the resume tier. A reference has to be right before anything
is compared with it, so it is asked the same questions first. There is no other run to compare its
samples with: whether its loader kept its place, the counter of samples and the replays tell, and a
test set that trained on other samples than its control is INVALID in any case.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.judge.check import Finding
from harness.judge.in_force import unlike_a_repeat
from harness.judge.replay_checks import replays_agree
from harness.judge.resume_checks import passes_continuous, state_restored
from harness.judge.soundness import Flaw
from harness.model import Evidence, Outcome, RestartOwner, SetSpec


def badly_requeued(evidence: Evidence, spec: SetSpec | None = None) -> Flaw | None:
    """What a resume lost, or what nothing tells of it, of a run that a scheduler may interrupt.

    None for any other run. ``spec`` says which checkpoints the run should have written.
    """
    if evidence.restarts is not RestartOwner.CLUSTER:
        return None
    how = "was requeued by the scheduler, and" if evidence.requeued else "is not in one piece:"
    for finding in _findings(evidence, spec):
        if finding.outcome in (Outcome.FAIL, Outcome.INVALID):
            return Flaw(f"{how} {finding.detail}", finding.onset)
    return _other_config(evidence)


def _findings(evidence: Evidence, spec: SetSpec | None) -> Iterator[Finding]:
    yield passes_continuous.ask(test=evidence, spec=spec)
    yield state_restored.ask(test=evidence, control=evidence, spec=spec)
    yield replays_agree.ask(test=evidence)


def _other_config(evidence: Evidence) -> Flaw | None:
    """A pass that ran with another configuration than the first, or does not tell."""
    trained = [each for each in evidence.passes if each.steps.size]
    for each in trained:
        first = int(each.steps[0])
        if each.in_force is None:
            return Flaw(f"left no record of what ran in pass {each.number}", first)
        keys = unlike_a_repeat(each.in_force, trained[0].in_force or {})
        if keys:
            return Flaw(f"went on otherwise in pass {each.number}: {', '.join(keys[:3])}", first)
    return None
