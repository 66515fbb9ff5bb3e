"""What a rule is, the registry of rules, and their application to an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import NamedTuple

from harness.errors import Problem, suggest
from harness.model import Experiment, Job, Parallelism
from harness.rules.stretches import stretches


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


def of_titan(check: Check) -> Check:
    """Let a rule about torchtitan's own parallelism or loaders be silent on other trainers."""

    @wraps(check)
    def guarded(case: Case) -> Iterable[Finding]:
        return check(case) if case.job.spec.trainer.can.guided else ()

    return guarded


class Ruling(NamedTuple):
    """What the rules say of a whole experiment."""

    problems: list[Problem]
    waived: tuple[str, ...]
    """One sentence per rule that is broken and waived."""


def apply_rules(cases: Sequence[Case]) -> Ruling:
    """Every breach of every rule by every job, at once.

    A job whose degrees change is looked at in every one of its stretches. What is wrong in all of
    them is said once, and of the job.
    """
    problems: list[Problem] = []
    waived: list[str] = []
    for case in cases:
        spec = case.job.spec
        problems += _unknown_waivers(case)
        parts = [(each.name, replace(case, job=each.job)) for each in stretches(case.job)]
        for rule in RULES.values():
            for stretch, (key, message, hint) in _breaches(rule, parts):
                if rule.waivable and rule.name in spec.waive:
                    reason = f": {spec.note}" if spec.note else ""
                    said = f"{stretch}: {message}" if stretch else message
                    waived.append(f"{spec.name} waives {rule.name} ({said}){reason}")
                else:
                    advice = f'if meant, waive = ["{rule.name}"]' if rule.waivable else ""
                    hints = "; ".join(part for part in (hint, advice) if part)
                    place = _place(case, f"{stretch}: {key}" if stretch else key)
                    problems.append(Problem(place, f"{message} [{rule.name}]", hints))
    return Ruling(problems, tuple(waived))


def _breaches(rule: Rule, parts: Sequence[tuple[str, Case]]) -> Iterator[tuple[str, Finding]]:
    """Every finding, with the name of the stretch that it is about; empty: the whole job."""
    found = {name: list(rule.check(case)) for name, case in parts}
    first, *others = found.values()
    throughout = [each for each in first if all(each in other for other in others)]
    yield from (("", each) for each in throughout)
    for name, findings in found.items():
        yield from ((name, each) for each in findings if each not in throughout)


def _place(case: Case, key: str) -> str:
    kind = case.job.role.value
    return f"{case.experiment.path}: {kind} {case.job.spec.name!r}: {key}"


def _unknown_waivers(case: Case) -> Iterator[Problem]:
    if not case.job.spec.waive:
        return
    waivable = [rule.name for rule in RULES.values() if rule.waivable]
    for name in case.job.spec.waive:
        if name in waivable:
            continue
        if name in RULES:
            yield Problem(_place(case, "waive"), f"{name!r} is a necessity: nothing waives it")
            continue
        yield Problem(_place(case, "waive"), f"no rule {name!r}", suggest(name, waivable))
