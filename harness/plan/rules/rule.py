"""What a rule is, the registry of rules, and their application to an experiment.

A rule looks at every phase of a job: a part of it in which its degrees stay as they are. Pipeline
stages and microbatches are counted as torchtitan counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import NamedTuple

from converge_harness.errors import Problem, suggest
from converge_harness.model import Experiment, Job, Parallelism


class Breach(NamedTuple):
    """One breach of a rule: which key, what is wrong, what would be right."""

    key: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job beside its control (a control is its own; the anchor stands beside the first)."""

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
    """Register what must hold for the job to run as named."""
    return _rule(check, waivable=False)


def of_titan(check: RuleCheck) -> RuleCheck:
    """Let a rule about torchtitan's own parallelism or loaders be silent on other trainers."""

    @wraps(check)
    def guarded(planned: PlannedJob) -> Iterable[Breach]:
        return check(planned) if planned.job.spec.trainer.can.guided else ()

    return guarded


class Ruling(NamedTuple):
    """What the rules say of a whole experiment."""

    problems: list[Problem]
    waived: tuple[str, ...]
    """One sentence per rule that is broken and waived."""


def apply_rules(cases: Sequence[PlannedJob]) -> Ruling:
    """Every breach of every rule by every job, at once.

    A job whose degrees change is looked at in every one of its phases. What is wrong in all of
    them is said once, and of the job.
    """
    problems: list[Problem] = []
    waived: list[str] = []
    for planned in cases:
        spec = planned.job.spec
        problems += _unknown_waivers(planned)
        parts = [(each.name, replace(planned, job=each.job)) for each in phases(planned.job)]
        for rule in RULES.values():
            for phase, (key, message, hint) in _breaches(rule, parts):
                if rule.waivable and rule.name in spec.waive:
                    reason = f": {spec.note}" if spec.note else ""
                    said = f"{phase}: {message}" if phase else message
                    waived.append(f"{spec.name} waives {rule.name} ({said}){reason}")
                else:
                    advice = f'if meant, waive = ["{rule.name}"]' if rule.waivable else ""
                    hints = "; ".join(part for part in (hint, advice) if part)
                    place = _place(planned, f"{phase}: {key}" if phase else key)
                    problems.append(Problem(place, f"{message} [{rule.name}]", hints))
    return Ruling(problems, tuple(waived))


def _breaches(rule: Rule, parts: Sequence[tuple[str, PlannedJob]]) -> Iterator[tuple[str, Breach]]:
    """Every breach, with the name of the phase that it is about; empty: the whole job."""
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
            yield Problem(_place(planned, "waive"), f"{name!r} is a necessity: nothing waives it")
            continue
        yield Problem(_place(planned, "waive"), f"no rule {name!r}", suggest(name, waivable))


class Phase(NamedTuple):
    """A part of a job, as a job."""

    name: str
    """As messages name it: ``segments[1]``, ``on 1 of 2 nodes``; empty: the job itself."""
    job: Job


def phases(job: Job) -> Iterator[Phase]:
    """The segments of an elastic job; a fault job on every number of nodes that it may have.

    Any other job is its only phase.
    """
    segments, recovery = job.spec.segments, job.spec.recovery
    if segments:
        for index, segment in enumerate(segments):
            yield Phase(f"segments[{index}]", job.in_segment(segment))
        return
    yield Phase("", job)
    if recovery is not None:
        fewest, most = recovery.nodes
        for nodes in range(most - 1, fewest - 1, -1):
            yield Phase(f"on {nodes} of {most} nodes", _on(job, nodes, most))


def _on(job: Job, nodes: int, most: int) -> Job:
    """The job with fewer nodes: each that is gone has taken its part of dp_shard with it."""
    degrees = job.spec.parallelism
    left = replace(degrees, dp_shard=degrees.dp_shard * nodes // most)
    return replace(job, spec=replace(job.spec, parallelism=left))


SINGLE_STAGE_SCHEDULES = frozenset({"1F1B", "GPipe"})
"""Pipeline schedules with one stage a rank; torchtitan gives every other schedule two."""


def effective_layers(job: Job) -> int | None:
    """Layers that torchtitan spreads over stages, the ends counted as layers; None if unknown."""
    layers = job.spec.train_config.model.get("n_layers")
    return None if layers is None else layers + sum(_less_layers(job))


def pipeline_stages(job: Job) -> int:
    """How many stages torchtitan cuts the model into (``distributed/pipeline_parallel.py``)."""
    per_stage = job.spec.setting("parallelism.pipeline_parallel_layers_per_stage")
    layers = effective_layers(job)
    if isinstance(per_stage, int) and per_stage > 0 and layers is not None:
        return -(-layers // per_stage)
    ranks = job.spec.parallelism.pp
    return ranks if job.spec.pipeline_schedule in SINGLE_STAGE_SCHEDULES else 2 * ranks


def _less_layers(job: Job) -> Iterator[int]:
    for end in ("first", "last"):
        less = job.spec.setting(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1)
        yield less if isinstance(less, int) else 1


def microbatch_size(job: Job) -> int:
    size = job.spec.setting("parallelism.pipeline_parallel_microbatch_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def count_microbatches(job: Job) -> int:
    return job.local_batch_size // microbatch_size(job)
