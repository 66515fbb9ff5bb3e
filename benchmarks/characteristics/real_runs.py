"""Error rates on real runs: repeats of one control, each in turn judged against the others.

All of them are right by construction (a rerun, an ulp on the initial weights, the samples of a
batch dealt out in another order), so every check that fails is a false alarm. But for one: runs
with an ulp on their initial weights do begin with other weights, and the judge says so.
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
"""As many as the harness makes by default."""
RIGHTLY_FAILED = "same-initial-parameters"
"""What an ulp repeat fails by construction."""


@dataclass(frozen=True, slots=True)
class RealRuns:
    """Verdicts on pairs of real runs of one control."""

    runs: int
    steps: int
    controls: Rate
    """Runs that, as the control, raised at least one false alarm."""
    pairs: Rate
    """Pairs with a false alarm. They share runs: the interval takes them as independent."""
    undecided: Rate
    """Pairs without a false alarm that do not pass, either."""
    checks: Counter[str]
    """How often each check failed."""
    correlation: float
    """Of the recomputed loss's differences at neighbouring steps, over all pairs."""
    kurtosis: float
    """Excess kurtosis of the same differences, each step by its own scale: 0 for normal noise."""


def real_runs(runs: Sequence[Evidence], seed: int = 4) -> RealRuns:
    """Judge every run against every other as its control, by :data:`REPEATS` of the rest.

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
    """The control itself is a rerun of any of its repeats, but for what makes them repeats."""
    return replace(run, repeat=run.repeat or RepeatKind.RERUN)


def _alarms(verdict: Judged) -> list[str]:
    """Names of the checks that failed wrongly."""
    return [name for name in verdict.failed if name != RIGHTLY_FAILED]


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
                f"{run.source} and {first.source} are no repeats of one control: their steps or "
                "samples differ"
            )
