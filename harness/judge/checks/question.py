"""A check is a named, documented function: its parameters are its inputs.

Its name is its slug, the first line of its docstring is the sentence that reports print, and the
rest of the docstring explains a failure. The idea is scientific-python's (sp-repo-review): the
report cannot drift from the code, because it prints the code's docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from converge_harness.model import Check, Deviation, Limit, Outcome, Tier


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found: a :class:`model.Check` without what :class:`Question` adds."""

    outcome: Outcome
    detail: str = ""
    measured: float | None = None
    limit: Limit | None = None
    unit: str = ""
    steps: tuple[int, int] | None = None
    onset: int | None = None
    deviations: tuple[Deviation, ...] = ()
    compare_with: str = ""
    further_seeds: int | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A check that can be asked of any two runs."""

    name: str
    title: str
    tier: Tier
    inputs: tuple[str, ...]
    """Names of the fields that it looks at, of a :class:`judge.comparison.RunComparison` or
    a :class:`converge_harness.judge.rcp.RcpInputs`."""
    ask: Callable[..., CheckResult]

    def __call__(self, compared: object) -> Check:
        finding = self.ask(**{name: getattr(compared, name) for name in self.inputs})
        return Check(
            name=self.name,
            title=self.title,
            tier=self.tier,
            outcome=finding.outcome,
            measured=finding.measured,
            limit=finding.limit,
            unit=finding.unit,
            steps=finding.steps,
            onset=finding.onset,
            detail=finding.detail,
            deviations=finding.deviations,
            compare_with=finding.compare_with,
            further_seeds=finding.further_seeds,
        )


def check(tier: Tier) -> Callable[[Callable[..., CheckResult]], Question]:
    """Make a documented function a :class:`Question` of a tier."""

    def decorate(function: Callable[..., CheckResult]) -> Question:
        title = inspect.cleandoc(function.__doc__ or "").partition("\n")[0]
        if not title:
            raise TypeError(f"check {function.__name__} has no docstring, so nothing to print")
        return Question(
            name=function.__name__.replace("_", "-"),
            title=title,
            tier=tier,
            inputs=tuple(inspect.signature(function).parameters),
            ask=function,
        )

    return decorate


def passed(detail: str = "") -> CheckResult:
    return CheckResult(Outcome.PASS, detail)


def invalid(detail: str, onset: int | None = None, *, compare_with: str = "") -> CheckResult:
    return CheckResult(Outcome.INVALID, detail, onset=onset, compare_with=compare_with)


def skipped(detail: str) -> CheckResult:
    return CheckResult(Outcome.SKIPPED, detail)
