"""Error rates on real runs: repeats of one control, each judged against the others.

All of them are correct by construction (a rerun, an ulp on the initial weights, the samples of a
batch given to the ranks in another order), so every failed check is a false alarm. There is one
exception: runs with an ulp on their initial weights start from other weights, and the judge says
so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy import stats

from characteristics.rates import Judged, Rate, judged
from converge_harness.judge import calibrate
from converge_harness.judge.compare.curves import pair, signed_difference
from converge_harness.model import Evidence, Judgement, RepeatKind

REPEATS = 6
"""As many as converge makes by default."""
EXPECTED_FAILURE = "same-initial-parameters"
"""The check that an ulp repeat fails by construction."""


@dataclass(frozen=True, slots=True)
class RealRuns:
    """Verdicts on pairs of real runs of one control."""

    runs: int
    steps: int
    controls: Rate
    """Runs with at least one false alarm when used as the control."""
    pairs: Rate
    """Pairs with a false alarm. They share runs, but the interval treats them as independent."""
    undecided: Rate
    """Pairs without a false alarm that do not PASS."""
    checks: Counter[str]
    """How often each check failed."""
    correlation: float
    """Correlation of the recomputed loss's differences at neighbouring steps, over all pairs."""
    kurtosis: float
    """Excess kurtosis of these differences, scaled per step: 0 for normal noise."""


def real_runs(runs: Sequence[Evidence], seed: int = 4) -> RealRuns:
    """Judge every run against every other as its control, with :data:`REPEATS` of the rest.

    Raises ValueError for too few runs, or for runs that are not repeats of one control.
    """
    _refuse_others(runs)
    chance = np.random.default_rng(seed)
    verdicts: dict[str, list[Judged]] = {}
    for place, control in enumerate(runs):
        others = [_as_repeat(runs[i]) for i in chance.permutation(len(runs)) if i != place]
        calibration = calibrate(control, others[:REPEATS])
        verdicts[control.source] = [judged(test, control, calibration) for test in others[REPEATS:]]
    every = [verdict for of_control in verdicts.values() for verdict in of_control]
    alarming = sum(any(map(_alarms, of_control)) for of_control in verdicts.values())
    quiet = [verdict for verdict in every if not _alarms(verdict)]
    undecided = sum(verdict.judgement not in {Judgement.PASS, Judgement.FAIL} for verdict in quiet)
    return RealRuns(
        len(runs),
        int(runs[0].steps.size),
        Rate(alarming, len(runs)),
        Rate(len(every) - len(quiet), len(every)),
        Rate(undecided, len(every)),
        Counter(name for verdict in every for name in _alarms(verdict)),
        *_shape(runs),
    )


def _as_repeat(run: Evidence) -> Evidence:
    """A run as a repeat: the control itself becomes a rerun."""
    return replace(run, repeat=run.repeat or RepeatKind.RERUN)


def _alarms(verdict: Judged) -> list[str]:
    """Names of the checks that failed although the run is correct."""
    return [name for name in verdict.failed if name != EXPECTED_FAILURE]


def _shape(runs: Sequence[Evidence]) -> tuple[float, float]:
    """Autocorrelation at one step, and excess kurtosis, of the recomputed loss's differences."""
    differences = np.array(
        [
            signed_difference(pair(test, control, "loss_recomputed"))
            for test, control in combinations(runs, 2)
        ]
    )
    scaled = differences / np.sqrt(np.mean(differences**2, axis=0))
    neighbours = float(np.mean(scaled[:, 1:] * scaled[:, :-1]))
    return neighbours, float(stats.kurtosis(scaled, axis=None))


def _refuse_others(runs: Sequence[Evidence]) -> None:
    if len(runs) < REPEATS + 2:
        raise ValueError(
            f"{len(runs)} runs: a control, {REPEATS} repeats and a test set make {REPEATS + 2}"
        )
    first = runs[0]
    for run in runs[1:]:
        if not np.array_equal(run.steps, first.steps) or run.batch_digests != first.batch_digests:
            raise ValueError(
                f"{run.source} and {first.source} are not repeats of one control: their steps or "
                "samples differ"
            )
