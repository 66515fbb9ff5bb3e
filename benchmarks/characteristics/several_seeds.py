"""Error rates of the comparison over seeds, and of its predicted number of seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import signal

from characteristics.rates import Rate
from converge_harness.judge.compare.seeds import Group, OverSeeds, groups_of, over_seeds, trajectory
from converge_harness.judge.compare.tost import ALPHA, Answer
from converge_harness.model import Floats

MARGIN = 5e-3
SPREAD = 2e-3
"""Standard deviation of the level from seed to seed, relative."""
STEPS = 400
EFFECTS = (0.0, 0.5, 1.0, 2.0)
"""True differences of the test set, in margins, through the whole run."""
NOISES = (3e-3, 1.5e-2)
"""Standard deviation of the noise of a step, relative."""
CORRELATIONS = (0.5, 0.9)
MOST_FURTHER = 60
"""Most further seeds per side that are drawn to test the prediction."""
_BURN_IN = 200
_SHARE = ALPHA / 2


class Setting(NamedTuple):
    """From what two groups of runs are drawn."""

    noise: float
    correlation: float
    tests: int
    controls: int
    wider: float = 1.0
    """The test set's spread of levels, as a multiple of the control's."""
    shared: float = 0.0
    """Standard deviation of a seed's effect on both sides; above 0, runs are paired."""

    @property
    def paired(self) -> bool:
        """Whether both sides have the same seeds, as in an experiment."""
        return self.shared > 0


PAIRS = (2, 3, 5)
SETTINGS = tuple(
    Setting(noise, correlation, *sizes)
    for noise in NOISES
    for correlation in CORRELATIONS
    for sizes in (
        *((2, 2), (3, 3), (5, 5), (10, 10), (10, 3), (3, 5, 3.0)),
        *((count, count, 1.0, 10 * SPREAD) for count in PAIRS),
    )
)


@dataclass(frozen=True, slots=True)
class SeveralSeeds:
    """Answers of both questions at one true difference."""

    setting: Setting
    effect: float
    """True difference, in margins."""
    same: tuple[Rate, Rate]
    """FAIL and PASS where the two should be the same: level and trajectory."""
    no_worse: tuple[Rate, Rate]
    """FAIL and PASS where the test set may be lower."""
    by_trajectory: Rate
    """FAIL of the trajectory alone."""
    settled: Rate
    """INCONCLUSIVE answers on the level that predicted further seeds, and were settled by these."""


def several_seeds(
    settings: Sequence[Setting], repetitions: int, workers: int, seed: int = 5
) -> list[SeveralSeeds]:
    """Compare ``repetitions`` pairs of groups for every setting and effect."""
    cells = [
        (setting, effect, repetitions, [seed, number, place])
        for number, setting in enumerate(settings)
        for place, effect in enumerate(EFFECTS)
    ]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(_measure, cells))


def _measure(cell: tuple[Setting, float, int, list[int]]) -> SeveralSeeds:
    setting, effect, repetitions, seed = cell
    chance = np.random.default_rng(seed)
    same, no_worse, apart, settled = [], [], 0, []
    for _ in range(repetitions):
        test, control = _draw(setting, effect, (setting.tests, setting.controls), chance)
        parts = trajectory(test, control, paired=setting.paired, alarm=_SHARE)
        off = any(part.excess > MARGIN for part in parts)
        level = _level(test, control, paired=setting.paired)
        same.append(Answer.DIFFERENT if off else level.outcome)
        no_worse.append(_no_worse(test, control, parts[-1].block))
        apart += off
        if not off and (further := level.further_seeds) is not None and further <= MOST_FURTHER:
            settled.append(_with_more(setting, effect, (test, control), further, chance))
    return SeveralSeeds(
        setting,
        effect,
        _rates(same),
        _rates(no_worse),
        Rate(apart, repetitions),
        Rate(sum(settled), len(settled)),
    )


def _level(test: Floats, control: Floats, *, paired: bool) -> OverSeeds:
    half = slice(STEPS // 2, None)
    groups = groups_of(test[:, half], control[:, half], paired=paired)
    return over_seeds(*groups, MARGIN, alarm=_SHARE)


def _no_worse(test: Floats, control: Floats, last: tuple[int, int]) -> Answer:
    """The check's answer: by the second half, and by the last part if that is higher."""
    windows = (slice(STEPS // 2, None), slice(last[0], last[1] + 1))
    level, end = (
        over_seeds(
            Group.of(test[:, window].mean(axis=1)),
            Group.of(control[:, window].mean(axis=1)),
            MARGIN,
            one_sided=True,
            alarm=_SHARE,
        ).outcome
        for window in windows
    )
    return end if end is Answer.DIFFERENT else level


def _with_more(
    setting: Setting,
    effect: float,
    groups: tuple[Floats, Floats],
    further: int,
    chance: np.random.Generator,
) -> bool:
    """Whether the predicted further seeds settle the question on the level."""
    more = _draw(setting, effect, (further, further), chance)
    grown = [np.concatenate(each) for each in zip(groups, more, strict=True)]
    answer = _level(grown[0], grown[1], paired=setting.paired).outcome
    return answer is not Answer.INCONCLUSIVE


def _draw(
    setting: Setting, effect: float, sizes: tuple[int, int], chance: np.random.Generator
) -> tuple[Floats, Floats]:
    """Losses of test set and control; shape (seeds, steps)."""
    curve = 2.0 + 6.0 * np.arange(1, STEPS + 1) ** -0.3
    shared = setting.shared * chance.standard_normal((sizes[1], 1)) if setting.paired else 0.0
    sides = []
    for count, spread, off in (
        (sizes[0], setting.wider * SPREAD, effect * MARGIN),
        (sizes[1], SPREAD, 0.0),
    ):
        levels = spread * chance.standard_normal((count, 1))
        shocks = chance.standard_normal((count, _BURN_IN + STEPS))
        shocks *= setting.noise * np.sqrt(1 - setting.correlation**2)
        steps = signal.lfilter([1.0], [1.0, -setting.correlation], shocks, axis=1)[:, _BURN_IN:]
        sides.append(
            np.asarray(curve * (1 + off) * (1 + shared + levels + steps), dtype=np.float64)
        )
    return sides[0], sides[1]


def _rates(answers: Sequence[Answer]) -> tuple[Rate, Rate]:
    """How often it was different (FAIL), and how often equivalent (PASS)."""
    return (
        Rate(answers.count(Answer.DIFFERENT), len(answers)),
        Rate(answers.count(Answer.EQUIVALENT), len(answers)),
    )


def not_kept(found: Sequence[SeveralSeeds]) -> Iterator[SeveralSeeds]:
    """Measurements whose rate of wrong answers is surely above 5%: there should be none."""
    for one in found:
        wrong = []
        if one.effect <= 1:
            wrong += [one.same[0], one.no_worse[0]]
        if one.effect >= 1:
            wrong += [one.same[1], one.no_worse[1]]
        if any(rate.interval[0] > ALPHA for rate in wrong):
            yield one
