"""How a test set fails, and whether another run of it fails the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from converge_harness.errors import ConfigError, Problem
from converge_harness.judge.checks.comparability import named_in_force
from converge_harness.matrix.calibrate import calibration_for
from converge_harness.matrix.judge import judge_pair, pairs_of, read_evidence
from converge_harness.matrix.run import Ran
from converge_harness.model import (
    CauseClass,
    Experiment,
    Judgement,
    Plan,
    Repeat,
    RepeatKind,
    Verdict,
)
from converge_harness.plan import select
from converge_harness.plan.rules import RULES
from converge_harness.shrink import Effect, Trial, smallest_pair

_NAMED = re.compile(r" (?:is|are) named\b(?! but cannot be verified)")
"""In a clause on what did not run. Not if a run recorded nothing about it, or has no such key."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
TAKEN = "FAILs, or is INVALID because a technique, degree or setting that it names did not run,"
"""Of which sets smaller set-ups or other revisions can be asked for the same, in a clause."""
_LAYER = re.compile(r"\.\d+(?=\.|$)")
_MORE_RUNS = 2
"""How often a set that should fail, and passed, is run again."""
WAIVED = tuple(rule.name for rule in RULES.values() if rule.waivable)
"""Every rule of the converging guide."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a set fails, as far as a smaller one has to fail the same way."""

    cause_class: CauseClass | None
    tensors: frozenset[str]
    """The tensors of the first failed check that names any (at most 20), without the numbers of
    their layers: a smaller model has fewer of them."""
    cause: str
    module: str = ""
    """The module that is wrong first, without numbers of layers; empty if unknown."""
    onset: int | None = None
    """The first bad step, if one is known."""
    checks: frozenset[str] = frozenset()
    """The names of all failed checks."""
    not_in_force: frozenset[str] = frozenset()
    """What the set names and did not run, without numbers, which a smaller set-up has fewer of.
    The set is then INVALID: its numbers are those of another set-up and were not compared."""

    def is_that_of(self, other: Failure) -> bool:
        """Whether it is the same failure: of one class, module, and at least one common tensor.

        A compiled module stands for all in it. Where a side names no module or no tensors the rest
        decides: the class alone, or if it is unknown, the failed checks. Where something that is
        named did not run, it is the same if one of these did not run either.
        """
        if self.not_in_force or other.not_in_force:
            return bool(self.not_in_force & other.not_in_force)
        if self.cause_class is not other.cause_class:
            return False
        if self.module and other.module:
            one, two = sorted((f"{self.module}.", f"{other.module}."), key=len)
            if not two.startswith(one):
                return False
        if self.tensors and other.tensors:
            return bool(self.tensors & other.tensors)
        if self.cause_class in (None, CauseClass.UNKNOWN):
            return bool(self.checks) and self.checks == other.checks
        return True


class PlanRunner(Protocol):
    """What runs a plan."""

    def __call__(self, plan: Plan, *, fresh: bool | None = None) -> Ran:
        """Reuse what has finished, unless ``fresh``; None: as its command line says."""


def is_failure(verdict: Verdict) -> bool:
    """Whether smaller set-ups or other revisions can be asked for the same.

    So it is of a FAIL, and of a set that is INVALID because something that it names did not run.
    """
    return verdict.judgement is Judgement.FAIL or bool(_not_in_force(verdict))


def failure_of(verdict: Verdict) -> Failure:
    failed = verdict.decided_by
    named = next((check.deviations for check in failed if check.deviations), ())
    tensors = frozenset(_LAYER.sub(".*", each.tensor) for each in named)
    module = _LAYER.sub(".*", verdict.module)
    checks = frozenset(check.name for check in failed)
    return Failure(
        verdict.cause_class,
        tensors,
        verdict.cause,
        module,
        verdict.onset_step,
        checks,
        _not_in_force(verdict),
    )


def _not_in_force(verdict: Verdict) -> frozenset[str]:
    """What an INVALID set names and did not run: ``async_tp``, ``tp #``."""
    if verdict.judgement is not Judgement.INVALID:
        return frozenset()
    clauses = (
        _NAMED.split(clause, maxsplit=1)
        for check in verdict.decided_by
        if check.name == named_in_force.name
        for clause in check.detail.split("; ")
    )
    return frozenset(_NUMBER.sub("#", what) for what, *after in clauses if after)


def only_set(experiment: Experiment, name: str) -> Experiment:
    """The experiment with one test set, its control, and no other seeds, which nobody judges here.

    Raises ConfigError if it has no such test set.
    """
    found = replace(select(experiment, [name]), other_seeds=())
    if len(found.tests) != 1:
        raise ConfigError(Problem(str(experiment.path), f"{name!r} is not a single test set"))
    return found


def verdict_alone(plan: Plan, ran: Ran) -> Verdict:
    """The verdict on the only test set of a plan."""
    evidences = read_evidence(plan, ran.records, ran.kept)
    name = plan.experiment.tests[0].name
    (pair,) = (each for each in pairs_of(plan) if each.test.name == name)
    verdict, _ = judge_pair(pair, evidences, calibration_for(plan, pair.control, evidences))
    return verdict


def trial_of(verdict: Verdict, failure: Failure) -> Trial:
    """A verdict as a trial of whether the set fails that way."""
    if verdict.judgement is Judgement.PASS:
        return Trial(Effect.PASSES)
    if is_failure(verdict) and failure_of(verdict).is_that_of(failure):
        return Trial(Effect.SAME, verdict.cause)
    if verdict.judgement is Judgement.FAIL:
        return Trial(Effect.OTHER, verdict.cause)
    return Trial(Effect.UNDECIDED, f"{verdict.judgement.value}: {verdict.cause}")


def how_often(fails_again: Callable[[], bool]) -> str:
    """How often a set fails that has just passed, as a clause; empty: not in more runs either.

    Args:
        fails_again: trains and judges it once more, from nothing.
    """
    count = sum(fails_again() for _ in range(_MORE_RUNS))
    return f"; it failed in {count} of {1 + _MORE_RUNS} runs" if count else ""


def pairs_to_try(alone: Experiment) -> Iterator[Experiment]:
    """Pairs of control and test set in which a failure may show: the cheapest first.

    Args:
        alone: an experiment of one control and one test set.
    """
    repeats = alone.repeats
    moved = [each for each in repeats if each.kind in (RepeatKind.ULP, RepeatKind.ROUNDING)]
    one: tuple[Repeat, ...] = tuple(moved[:1] or repeats[:1])
    for kept in dict.fromkeys((one, repeats)):
        yield smallest_pair(alone, kept, WAIVED)
