"""How a test set fails, and whether another run of it fails the same way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from converge_harness.errors import ConfigError, Problem
from converge_harness.matrix.calibrate import calibration_for
from converge_harness.matrix.judge import judge_pair, pairs_of, read_evidence
from converge_harness.matrix.run import Ran
from converge_harness.model import (
    CauseClass,
    Experiment,
    Judgement,
    Outcome,
    Plan,
    Repeat,
    RepeatKind,
    Verdict,
)
from converge_harness.plan import select
from converge_harness.plan.rules import RULES
from converge_harness.shrink import Effect, Trial, smallest_pair

_LAYER = re.compile(r"\.\d+(?=\.|$)")
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

    def is_that_of(self, other: Failure) -> bool:
        """Whether it is the same failure: of one class, module, and at least one common tensor.

        A compiled module stands for all in it. Where a side names no module or no tensors the rest
        decides: the class alone, or if it is unknown, the failed checks.
        """
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


def failure_of(verdict: Verdict) -> Failure:
    failed = [check for check in verdict.checks if check.outcome is Outcome.FAIL]
    named = next((check.deviations for check in failed if check.deviations), ())
    tensors = frozenset(_LAYER.sub(".*", each.tensor) for each in named)
    module = _LAYER.sub(".*", verdict.module)
    checks = frozenset(check.name for check in failed)
    return Failure(verdict.cause_class, tensors, verdict.cause, module, verdict.onset_step, checks)


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
    if verdict.judgement is not Judgement.FAIL:
        return Trial(Effect.UNDECIDED, f"{verdict.judgement.value}: {verdict.cause}")
    same = failure_of(verdict).is_that_of(failure)
    return Trial(Effect.SAME if same else Effect.OTHER, verdict.cause)


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
