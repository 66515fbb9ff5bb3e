"""Error rates of the whole judge: false alarms, and power against a lasting bias."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from scipy import stats

from characteristics.simulation import LAWS, Law, Simulated, biased, experiments
from converge_harness.judge import calibrate, judge
from converge_harness.model import Calibration, Evidence, Judgement, Outcome, Tier

TIERS = (Tier.FIRST_STEP, Tier.ENVELOPE, Tier.EQUIVALENCE)
CHUNK = 25
"""Experiments per task of a worker."""


class Judged(NamedTuple):
    """The parts of a verdict that matter here."""

    judgement: Judgement
    failed: tuple[str, ...]
    """Names of the checks that failed."""
    tier: Tier | None
    """The first tier that failed."""
    onset: int
    """The first failing check's first step outside its limit; the last step if it has none."""


def judged(test: Evidence, control: Evidence, calibration: Calibration) -> Judged:
    verdict, _ = judge(test, control, calibration)
    failed = [check for check in verdict.checks if check.outcome is Outcome.FAIL]
    tiers = [tier for tier in TIERS if any(check.tier is tier for check in failed)]
    onsets = [check.onset for check in failed if check.onset is not None]
    return Judged(
        verdict.judgement,
        tuple(check.name for check in failed),
        tiers[0] if tiers else None,
        min(onsets, default=int(test.steps[-1])),
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """How often something happened, with its exact 95% interval.

    Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
    binomial" (1934).
    """

    hits: int
    trials: int

    @property
    def interval(self) -> tuple[float, float]:
        missed = self.trials - self.hits
        low = stats.beta.ppf(0.025, self.hits, missed + 1) if self.hits else 0.0
        high = stats.beta.ppf(0.975, self.hits + 1, missed) if missed else 1.0
        return float(low), float(high)

    @property
    def value(self) -> float:
        return self.hits / self.trials if self.trials else 0.0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.2%} ({low:.2%} to {high:.2%})"


# ------------------------------------------------------------- false alarms


class Situation(NamedTuple):
    """From what correct runs are drawn."""

    law: Law
    steps: int
    factor: float
    """How many times as much as a repeat a test set deviates."""


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    """Verdicts on correct test sets."""

    situation: Situation
    experiments: Rate
    """With at least one FAIL."""
    tests: Rate
    """With a FAIL."""
    inconclusive: Rate
    """Test sets that are INCONCLUSIVE."""
    invalid: Rate
    """Test sets that are INVALID, for example because a correct repeat was taken for an outlier."""
    checks: tuple[str, ...]
    """Names of the checks that failed, once per test set."""


SITUATIONS = tuple(
    Situation(law, steps, factor)
    for law in LAWS
    for steps, factor in ((20, 1.0), (100, 2.0), (1000, 2.0), (100, 4.0))
)


def false_alarms(
    situations: Sequence[Situation], count: int, workers: int, seed: int = 1
) -> list[FalseAlarms]:
    """Judge ``count`` experiments of correct runs in every situation."""
    chunks = [
        (situation, size, seed + 1000 * index)
        for situation in situations
        for index, size in enumerate(_sizes(count))
    ]
    found: dict[Situation, list[list[Judged]]] = {situation: [] for situation in situations}
    with ProcessPoolExecutor(workers) as pool:
        for (situation, _, _), part in zip(chunks, pool.map(_right_runs, chunks), strict=True):
            found[situation].extend(part)
    return [_summary(situation, verdicts) for situation, verdicts in found.items()]


def _right_runs(chunk: tuple[Situation, int, int]) -> list[list[Judged]]:
    situation, count, seed = chunk
    drawn = experiments(situation.law, situation.steps, count, factor=situation.factor, seed=seed)
    return [_judge_all(simulated) for simulated in drawn]


def _judge_all(simulated: Simulated) -> list[Judged]:
    calibration = calibrate(simulated.control, simulated.repeats)
    return [judged(test, simulated.control, calibration) for test in simulated.tests]


def _summary(situation: Situation, verdicts: Sequence[Sequence[Judged]]) -> FalseAlarms:
    every = [verdict for experiment in verdicts for verdict in experiment]
    alarms = [verdict for verdict in every if verdict.judgement is Judgement.FAIL]
    inconclusive, invalid = (
        Rate(sum(verdict.judgement is word for verdict in every), len(every))
        for word in (Judgement.INCONCLUSIVE, Judgement.INVALID)
    )
    hit = sum(
        any(verdict.judgement is Judgement.FAIL for verdict in experiment)
        for experiment in verdicts
    )
    return FalseAlarms(
        situation,
        Rate(hit, len(verdicts)),
        Rate(len(alarms), len(every)),
        inconclusive,
        invalid,
        tuple(name for alarm in alarms for name in alarm.failed),
    )


# -------------------------------------------------------------------- power


class Bias(NamedTuple):
    """A loss that is off by a constant relative amount."""

    size: float
    from_middle: bool
    """From the middle of the run, instead of from step 1."""

    def start(self, steps: int) -> int:
        return steps // 2 + 1 if self.from_middle else 1


BIASES = tuple(Bias(size, late) for late in (False, True) for size in (1e-3, 3e-3, 1e-2))
LENGTHS = (20, 50, 100, 300, 1000, 3000)


@dataclass(frozen=True, slots=True)
class Power:
    """Verdicts on test sets with a bias."""

    law: Law
    steps: int
    bias: Bias
    detected: Rate
    """FAIL."""
    doubted: Rate
    """Not PASS."""
    tier: Tier | None
    """The most frequent first tier among the FAILs; None without a FAIL."""
    delay: float | None
    """Median number of steps from the bias's first step to the onset; None without a FAIL."""


def power(
    laws: Sequence[Law], lengths: Sequence[int], count: int, workers: int, seed: int = 2
) -> list[Power]:
    """Judge one test set of ``count`` experiments under every bias, law and length."""
    cells = [(law, steps, count, seed) for law in laws for steps in lengths]
    with ProcessPoolExecutor(workers) as pool:
        return [row for rows in pool.map(_biased_runs, cells) for row in rows]


def _biased_runs(cell: tuple[Law, int, int, int]) -> list[Power]:
    law, steps, count, seed = cell
    found: dict[Bias, list[Judged]] = {bias: [] for bias in BIASES}
    for simulated in experiments(law, steps, count, tests=1, seed=seed):
        calibration = calibrate(simulated.control, simulated.repeats)
        for bias, verdicts in found.items():
            test = biased(simulated.tests[0], bias.size, bias.start(steps))
            verdicts.append(judged(test, simulated.control, calibration))
    return [_power(law, steps, bias, verdicts) for bias, verdicts in found.items()]


def _power(law: Law, steps: int, bias: Bias, verdicts: Sequence[Judged]) -> Power:
    failed = [verdict for verdict in verdicts if verdict.judgement is Judgement.FAIL]
    doubted = sum(verdict.judgement is not Judgement.PASS for verdict in verdicts)
    tiers = [verdict.tier for verdict in failed if verdict.tier is not None]
    delays = [max(verdict.onset - bias.start(steps), 0) for verdict in failed]
    return Power(
        law,
        steps,
        bias,
        Rate(len(failed), len(verdicts)),
        Rate(doubted, len(verdicts)),
        max(TIERS, key=tiers.count) if tiers else None,
        median(delays) if delays else None,
    )


def _sizes(count: int) -> Iterable[int]:
    """Split a number of experiments into chunks."""
    whole, rest = divmod(count, CHUNK)
    return [CHUNK] * whole + ([rest] if rest else [])
