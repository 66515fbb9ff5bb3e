"""Shrinks a failed test set to the smallest set-up that fails the same way, by real runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from converge_harness.errors import ConfigError, ConvergeError, Problem
from converge_harness.matrix.calibrate import calibration_for
from converge_harness.matrix.judge import judge_pair, pairs_of, read_evidence
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.run import Ran, gpu_ids
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
from converge_harness.shrink import (
    Effect,
    Reduction,
    Shrunk,
    Trial,
    Tried,
    search,
    smallest_pair,
    why_not,
)

_LAYER = re.compile(r"\.\d+(?=\.|$)")


class NothingToShrinkError(ConvergeError):
    """The set does not fail, or not again."""


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

    def is_that_of(self, other: Failure) -> bool:
        """Whether it is the same failure: of one class, module, and at least one common tensor.

        A compiled module stands for all in it. Where a side names no module or no tensors the rest
        decides; the class alone does unless it is unknown.
        """
        if self.cause_class is not other.cause_class:
            return False
        if self.module and other.module:
            one, two = sorted((f"{self.module}.", f"{other.module}."), key=len)
            if not two.startswith(one):
                return False
        if self.tensors and other.tensors:
            return bool(self.tensors & other.tensors)
        return self.cause_class not in (None, CauseClass.UNKNOWN)


def failure_of(verdict: Verdict) -> Failure:
    failed = [check for check in verdict.checks if check.outcome is Outcome.FAIL]
    named = next((check.deviations for check in failed if check.deviations), ())
    tensors = frozenset(_LAYER.sub(".*", each.tensor) for each in named)
    return Failure(verdict.cause_class, tensors, verdict.cause, _LAYER.sub(".*", verdict.module))


class Shrinking:
    """Runs and judges smaller and smaller pairs of a control and a test set."""

    def __init__(
        self, experiment: Experiment, name: str, run: Callable[[Plan], Ran], slots: int | None
    ) -> None:
        """Raises ConfigError if the experiment has no such test set, or one that does not shrink.

        Args:
            experiment: as loaded.
            name: of the test set.
            run: runs a plan, or reuses what has finished.
            slots: how many ranks may run at once on the CPU; None: as usual.
        """
        self._run, self._slots = run, slots
        # Other seeds would not be judged here.
        self._alone = replace(select(experiment, [name]), other_seeds=())
        place = str(experiment.path)
        if len(self._alone.tests) != 1:
            raise ConfigError(Problem(place, f"{name!r} is no single test set"))
        (test,) = self._alone.tests
        if why := why_not(test):
            raise ConfigError(Problem(place, f"{name!r} {why}"))

    def failure(self) -> Failure:
        """How the set fails as it is. Raises NothingToShrinkError if it does not fail."""
        verdict = self._judged(self._alone)
        if verdict.judgement is not Judgement.FAIL:
            said = f"{verdict.judgement.value}, not FAIL"
            said += f": {verdict.cause}" if verdict.cause else ""
            raise NothingToShrinkError(
                f"{self._alone.path}: {verdict.name!r} is {said} (only a set that fails can be "
                "shrunk)"
            )
        return failure_of(verdict)

    def start(self, failure: Failure) -> Experiment:
        """The pair that is shrunk: with one repeat of the control, if it fails with that, too.

        Raises NothingToShrinkError if it does not fail again in the same way.
        """
        repeats = self._alone.repeats
        moved = [each for each in repeats if each.kind in (RepeatKind.ULP, RepeatKind.ROUNDING)]
        one: tuple[Repeat, ...] = tuple(moved[:1] or repeats[:1])
        said = ""
        for kept in dict.fromkeys((one, repeats)):
            pair = smallest_pair(self._alone, kept, WAIVED)
            trial = self._trial(pair, failure)
            if trial.effect is Effect.SAME:
                return pair
            said = f"{trial.effect.value}: {trial.said}" if trial.said else trial.effect.value
        name = self._alone.tests[0].name
        why = f"{name!r} does not fail the same way again with the smallest set of runs; it {said}"
        raise NothingToShrinkError(f"{self._alone.path}: {why}")

    def search(
        self,
        start: Experiment,
        failure: Failure,
        may_go_on: Callable[[int], bool],
        tell: Callable[[Shrunk, Tried], None],
    ) -> Shrunk:
        """The smallest pair; see ``converge_harness.shrink.search``."""

        def trial_of(reduction: Reduction) -> Trial:
            return self._trial(reduction.made, failure)

        return search(start, trial_of, may_go_on, tell)

    def _trial(self, experiment: Experiment, failure: Failure) -> Trial:
        try:
            verdict = self._judged(experiment)
        except ConfigError as error:  # a rule, or the toolchain's own check
            return Trial(Effect.IMPOSSIBLE, error.problems[0].message)
        if verdict.judgement is Judgement.PASS:
            return Trial(Effect.PASSES)
        if verdict.judgement is not Judgement.FAIL:
            return Trial(Effect.UNDECIDED, f"{verdict.judgement.value}: {verdict.cause}")
        same = failure_of(verdict).is_that_of(failure)
        return Trial(Effect.SAME if same else Effect.OTHER, verdict.cause)

    def _judged(self, experiment: Experiment) -> Verdict:
        plan = plan_experiment(experiment, on_gpu=bool(gpu_ids()), slots=self._slots)
        ran = self._run(plan)
        evidences = read_evidence(plan, ran.records)
        name = experiment.tests[0].name
        (pair,) = (each for each in pairs_of(plan) if each.test.name == name)
        calibration = calibration_for(plan, pair.control, evidences)
        verdict, _ = judge_pair(pair, evidences, calibration)
        return verdict


WAIVED = tuple(rule.name for rule in RULES.values() if rule.waivable)
"""Every rule of the converging guide."""
