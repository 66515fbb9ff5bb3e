"""What a rule is, the registry of rules, and how they are applied to an experiment.

A rule checks every segment of a job: a part in which its degrees do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import NamedTuple

from converge_harness.errors import Problem, suggest
from converge_harness.model import Experiment, Job, Parallelism


class Breach(NamedTuple):
    """One breach of a rule: the key, what is wrong, and what would be right."""

    key: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job with its control (a control's is itself; the anchor's is the first control)."""

    experiment: Experiment
    control: Job
    job: Job
    on_cpu: bool = True
    """Whether ranks take CPU slots."""

    @property
    def degrees(self) -> Parallelism:
        return self.job.spec.parallelism


RuleCheck = Callable[[PlannedJob], Iterable[Breach]]


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    title: str
    waivable: bool
    check: RuleCheck


RULES: dict[str, Rule] = {}
"""Every rule by name, guide rules first."""


def _rule(check: RuleCheck, *, waivable: bool) -> RuleCheck:
    name = getattr(check, "__name__", "").replace("_", "-")
    title = (check.__doc__ or "").splitlines()[0]
    RULES[name] = Rule(name, title, waivable, check)
    return check


def guide_rule(check: RuleCheck) -> RuleCheck:
    """Register a rule of the converging guide: a set may waive it by name."""
    return _rule(check, waivable=True)


def necessity(check: RuleCheck) -> RuleCheck:
    """Register a rule that must hold for the job to run as the file says."""
    return _rule(check, waivable=False)


def where_guided(check: RuleCheck) -> RuleCheck:
    """Skip a rule of the converging guide for trainers to which the guide does not apply."""

    @wraps(check)
    def guarded(planned: PlannedJob) -> Iterable[Breach]:
        return check(planned) if planned.job.spec.trainer.can.guided else ()

    return guarded


class Ruling(NamedTuple):
    """The result of all rules for an experiment."""

    problems: list[Problem]
    waived: tuple[str, ...]
    """One sentence per waived breach."""


def apply_rules(cases: Sequence[PlannedJob]) -> Ruling:
    """Every breach of every rule by every job.

    A job whose degrees change is checked in each of its segments. A breach in all of them is
    reported once, for the job.
    """
    problems: list[Problem] = []
    waived: list[str] = []
    for planned in cases:
        spec = planned.job.spec
        problems += _unknown_waivers(planned)
        parts = [(each.name, replace(planned, job=each.job)) for each in job_segments(planned.job)]
        for rule in RULES.values():
            for segment, (key, message, hint) in _breaches(rule, parts):
                if rule.waivable and rule.name in spec.waive:
                    reason = f": {spec.note}" if spec.note else ""
                    said = f"{segment}: {message}" if segment else message
                    waived.append(f"{spec.name} waives {rule.name} ({said}){reason}")
                else:
                    advice = f'if meant, waive = ["{rule.name}"]' if rule.waivable else ""
                    hints = "; ".join(part for part in (hint, advice) if part)
                    place = _place(planned, f"{segment}: {key}" if segment else key)
                    problems.append(Problem(place, f"{message} [{rule.name}]", hints))
    return Ruling(problems, tuple(waived))


def _breaches(rule: Rule, parts: Sequence[tuple[str, PlannedJob]]) -> Iterator[tuple[str, Breach]]:
    """Every breach with the name of its segment; empty: the whole job."""
    found = {name: list(rule.check(planned)) for name, planned in parts}
    first, *others = found.values()
    throughout = [each for each in first if all(each in other for other in others)]
    yield from (("", each) for each in throughout)
    for name, findings in found.items():
        yield from ((name, each) for each in findings if each not in throughout)


def _place(planned: PlannedJob, key: str) -> str:
    kind = planned.job.role.value
    return f"{planned.experiment.path}: {kind} {planned.job.spec.name!r}: {key}"


def _unknown_waivers(planned: PlannedJob) -> Iterator[Problem]:
    if not planned.job.spec.waive:
        return
    waivable = [rule.name for rule in RULES.values() if rule.waivable]
    for name in planned.job.spec.waive:
        if name in waivable:
            continue
        if name in RULES:
            yield Problem(_place(planned, "waive"), f"{name!r} is required: it cannot be waived")
            continue
        yield Problem(_place(planned, "waive"), f"no rule {name!r}", suggest(name, waivable))


class JobSegment(NamedTuple):
    """A part of a job, as a job of its own."""

    name: str
    """Its name in messages: ``segments[1]``, ``on 1 of 2 nodes``; empty: the whole job."""
    job: Job


def job_segments(job: Job) -> Iterator[JobSegment]:
    """The segments of an elastic job; a fault job on every possible number of nodes.

    Any other job is its own only segment.
    """
    segments, recovery = job.spec.segments, job.spec.recovery
    if segments:
        for index, segment in enumerate(segments):
            yield JobSegment(f"segments[{index}]", job.in_segment(segment))
        return
    yield JobSegment("", job)
    if recovery is not None:
        fewest, most = recovery.nodes
        for nodes in range(most - 1, fewest - 1, -1):
            yield JobSegment(f"on {nodes} of {most} nodes", _on(job, nodes, most))


def _on(job: Job, nodes: int, most: int) -> Job:
    """The job on fewer nodes, with the degrees that are left."""
    left = job.spec.parallelism.on_nodes(nodes, most)
    return replace(job, spec=replace(job.spec, parallelism=left))


def microbatch_size(job: Job) -> int:
    """Samples of a pipeline microbatch; 1 where the trainer has no key for them."""
    size = job.spec.setting(job.spec.trainer.keys.pipeline_microbatch_size, 1)
    return size if isinstance(size, int) and size > 0 else 1


def count_microbatches(job: Job) -> int:
    return job.local_batch_size // microbatch_size(job)
