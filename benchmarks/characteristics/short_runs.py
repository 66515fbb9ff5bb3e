"""The equivalence tier on short runs, by how much correct runs may differ before it applies."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from characteristics.rates import Rate
from characteristics.simulation import BF16, FLOAT8, Law, biased, experiments
from converge_harness.judge import calibrate
from converge_harness.judge.checks.equivalence import SAME_REGIME, usual
from converge_harness.judge.compare.curves import pair, second_half, signed_difference
from converge_harness.judge.compare.limits import MEAN_ALARMS, USUAL
from converge_harness.judge.compare.tost import equivalence

UNSTABLE = replace(BF16, name="bf16, unstable", growth=1.5, most=2e-3, correlation=0.9)
"""Like tied weights at a learning rate of 4e-3: means of repeats differ by 0.2%."""
RUNS = ((BF16, 20), (BF16, 50), (FLOAT8, 20), (FLOAT8, 50), (UNSTABLE, 16), (UNSTABLE, 32))
"""Laws and steps."""
BIASES = (0.0, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2)
"""Biases of the loss from the middle of the run: no earlier tier sees their start."""
LEVELS = (1.0, 0.1, USUAL, 0.01, MEAN_ALARMS)
"""Probability that the check applies to a correct run that deviates as repeats do; 1: whenever it
is outside of the margin, whatever the repeats show.
"""
_SIGNAL = "loss_recomputed"


@dataclass(frozen=True, slots=True)
class ShortRuns:
    """How often the check applies to runs of one law, length and bias, for each of LEVELS."""

    law: Law
    steps: int
    bias: float
    asked: tuple[Rate, ...]


def short_runs(count: int, workers: int, seed: int = 4) -> list[ShortRuns]:
    """Check one test set of ``count`` experiments under every law, length and bias."""
    cells = [(law, steps, count, seed) for law, steps in RUNS]
    with ProcessPoolExecutor(workers) as pool:
        return [row for rows in pool.map(_measure, cells) for row in rows]


def _measure(cell: tuple[Law, int, int, int]) -> Sequence[ShortRuns]:
    law, steps, count, seed = cell
    hits = {bias: [0] * len(LEVELS) for bias in BIASES}
    for simulated in experiments(law, steps, count, tests=1, seed=seed):
        calibration = calibrate(simulated.control, simulated.repeats)
        known, repeats = calibration.signals[_SIGNAL], calibration.taught_by
        limits = [usual(_SIGNAL, known, repeats, level) for level in LEVELS]
        for bias, asked in hits.items():
            test = biased(simulated.tests[0], bias, steps // 2 + 1)
            window = second_half(pair(test, simulated.control, _SIGNAL))
            found = equivalence(signed_difference(window), SAME_REGIME)
            outside = max(abs(found.mean), abs(found.end)) > SAME_REGIME
            for index, limit in enumerate(limits):
                asked[index] += outside and not limit.covers(found, SAME_REGIME)
    return [
        ShortRuns(law, steps, bias, tuple(Rate(hit, count) for hit in asked))
        for bias, asked in hits.items()
    ]
