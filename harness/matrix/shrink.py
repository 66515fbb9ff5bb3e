"""Shrinks a failed test set to the smallest set-up that fails the same way, by real runs."""

from __future__ import annotations

from collections.abc import Callable

from converge_harness.errors import ConfigError, ConvergeError, Problem
from converge_harness.matrix.failure import (
    TAKEN,
    Failure,
    PlanRunner,
    failure_of,
    how_often,
    is_failure,
    only_set,
    pairs_to_try,
    trial_of,
    verdict_alone,
)
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.run import gpu_ids
from converge_harness.model import Experiment, Judgement, Verdict
from converge_harness.shrink import Effect, Reduction, Shrunk, Trial, Tried, search, why_not


class NothingToShrinkError(ConvergeError):
    """The set does not fail, or not again."""


class Shrinking:
    """Runs and judges smaller and smaller pairs of a control and a test set."""

    def __init__(
        self, experiment: Experiment, name: str, run: PlanRunner, slots: int | None
    ) -> None:
        """Raises ConfigError if the experiment has no such test set, or one that does not shrink.

        Args:
            experiment: as loaded.
            name: of the test set.
            run: runs a plan.
            slots: how many ranks may run at once on the CPU; None: as usual.
        """
        self._run, self._slots = run, slots
        self._alone = only_set(experiment, name)
        if why := why_not(self._alone.tests[0]):
            raise ConfigError(Problem(str(experiment.path), f"{name!r} {why}"))

    def failure(self, *, failed: bool) -> Failure:
        """How the set fails as it is.

        Raises NothingToShrinkError if it does not fail. If it passes and ``failed`` before, it is
        run twice more, and the error says how often it fails.
        """
        verdict = self._judged(self._alone)
        if not is_failure(verdict):
            said = f"{verdict.judgement.value}, not FAIL"
            said += f": {verdict.cause}" if verdict.cause else ""
            if failed and verdict.judgement is Judgement.PASS:
                said += how_often(lambda: is_failure(self._judged(self._alone, fresh=True)))
            raise NothingToShrinkError(
                f"{self._alone.path}: {verdict.name!r} is {said} (only a set that {TAKEN} can be "
                "shrunk)"
            )
        return failure_of(verdict)

    def start(self, failure: Failure) -> Experiment:
        """The pair that is shrunk: with one repeat of the control, if it fails with that, too.

        Raises NothingToShrinkError if it does not fail again in the same way.
        """
        said = often = ""
        *others, last = pairs_to_try(self._alone)
        for pair in (*others, last):
            trial = self._trial(pair, failure)
            if trial.effect is Effect.SAME:
                return pair
            said = f"{trial.effect.value}: {trial.said}" if trial.said else trial.effect.value
            if pair is last and trial.effect is Effect.PASSES:
                often = how_often(lambda: self.again(last, failure).effect is Effect.SAME)
        name = self._alone.tests[0].name
        why = f"{name!r} does not fail the same way again with the smallest set of runs; it {said}"
        raise NothingToShrinkError(f"{self._alone.path}: {why}{often}")

    def search(
        self,
        start: Experiment,
        failure: Failure,
        may_go_on: Callable[[int], bool],
        tell: Callable[[Shrunk, Tried], None],
    ) -> Shrunk:
        """The smallest pair; see ``converge_harness.shrink.search``."""

        def tried(reduction: Reduction) -> Trial:
            return self._trial(reduction.made, failure)

        return search(start, tried, may_go_on, tell)

    def again(self, found: Experiment, failure: Failure) -> Trial:
        """Run a pair that failed once more, from nothing."""
        return self._trial(found, failure, fresh=True)

    def _trial(
        self, experiment: Experiment, failure: Failure, *, fresh: bool | None = None
    ) -> Trial:
        try:
            verdict = self._judged(experiment, fresh=fresh)
        except ConfigError as error:  # a rule, or the toolchain's own check
            return Trial(Effect.IMPOSSIBLE, error.problems[0].message)
        return trial_of(verdict, failure)

    def _judged(self, experiment: Experiment, *, fresh: bool | None = None) -> Verdict:
        plan = plan_experiment(experiment, on_gpu=bool(gpu_ids()), slots=self._slots)
        return verdict_alone(plan, self._run(plan, fresh=fresh))
