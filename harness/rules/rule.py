"""What a rule is, the registry of rules, and their application to an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.errors import Problem, suggest
from harness.model import Experiment, Job, Parallelism


class Finding(NamedTuple):
    """One breach of a rule: which key, what is wrong, what would be right."""

    key: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One job beside its control (a control is its own; the anchor stands beside the first)."""

    experiment: Experiment
    control: Job
    job: Job
    on_cpu: bool = True
    """Whether ranks take CPU slots."""

    @property
    def degrees(self) -> Parallelism:
        return self.job.spec.parallelism


Check = Callable[[Case], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    title: str
    waivable: bool
    check: Check


RULES: dict[str, Rule] = {}
"""Every rule by name, guide rules first."""


def _rule(check: Check, *, waivable: bool) -> Check:
    name = getattr(check, "__name__", "").replace("_", "-")
    title = (check.__doc__ or "").splitlines()[0]
    RULES[name] = Rule(name, title, waivable, check)
    return check


def guide_rule(check: Check) -> Check:
    """Register a rule of the converging guide: a set may waive it by name."""
    return _rule(check, waivable=True)


def necessity(check: Check) -> Check:
    """Register what must hold for the job to run as named."""
    return _rule(check, waivable=False)


class Ruling(NamedTuple):
    """What the rules say of a whole experiment."""

    problems: list[Problem]
    waived: tuple[str, ...]
    """One sentence per rule that is broken and waived."""


def apply_rules(cases: Sequence[Case]) -> Ruling:
    """Every breach of every rule by every job, at once."""
    problems: list[Problem] = []
    waived: list[str] = []
    for case in cases:
        spec = case.job.spec
        problems += _unknown_waivers(case)
        for rule in RULES.values():
            for key, message, hint in rule.check(case):
                if rule.waivable and rule.name in spec.waive:
                    reason = f": {spec.note}" if spec.note else ""
                    waived.append(f"{spec.name} waives {rule.name} ({message}){reason}")
                else:
                    advice = f'if meant, waive = ["{rule.name}"]' if rule.waivable else ""
                    hints = "; ".join(part for part in (hint, advice) if part)
                    problems.append(Problem(_place(case, key), f"{message} [{rule.name}]", hints))
    return Ruling(problems, tuple(waived))


def _place(case: Case, key: str) -> str:
    kind = case.job.role.value
    return f"{case.experiment.path}: {kind} {case.job.spec.name!r}: {key}"


def _unknown_waivers(case: Case) -> Iterator[Problem]:
    waivable = [rule.name for rule in RULES.values() if rule.waivable]
    for name in case.job.spec.waive:
        if name in waivable:
            continue
        if name in RULES:
            yield Problem(_place(case, "waive"), f"{name!r} is a necessity: nothing waives it")
            continue
        yield Problem(_place(case, "waive"), f"no rule {name!r}", suggest(name, waivable))
