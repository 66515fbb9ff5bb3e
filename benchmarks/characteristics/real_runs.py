"""Error rates on real runs: repeats of one control, each in turn judged against the others.

All of them are right by construction (a rerun, an ulp on the initial weights, the samples of a
batch dealt out in another order), so every FAIL is a false alarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from characteristics.rates import Judged, Rate, judged
from harness.judge import calibrate
from harness.model import Evidence, Judgement
from harness.readers import read_run

REPEATS = 6
"""As many as the harness makes by default."""


@dataclass(frozen=True, slots=True)
class RealRuns:
    """Verdicts on pairs of real runs of one control."""

    runs: int
    steps: int
    controls: Rate
    """Runs that, as the control, raised at least one false alarm."""
    pairs: Rate
    """Pairs with a FAIL. They share runs: the interval takes them as independent."""
    undecided: Rate
    """Pairs that are neither PASS nor FAIL."""
    checks: Counter[str]
    """How often each check failed."""


def real_runs(folders: Sequence[Path], seed: int = 4) -> RealRuns:
    """Judge every run against every other as its control, by :data:`REPEATS` of the rest.

    Raises ValueError for too few runs, or for runs that are not repeats of one control.
    """
    runs = [read_run(folder) for folder in folders]
    _refuse_others(runs)
    chance = np.random.default_rng(seed)
    verdicts: dict[str, list[Judged]] = {}
    for place, control in enumerate(runs):
        others = [runs[i] for i in chance.permutation(len(runs)) if i != place]
        calibration = calibrate(control, others[:REPEATS])
        if calibration.problems:
            raise ValueError(f"{control.source} as control: {calibration.problems[0]}")
        verdicts[control.source] = [judged(test, control, calibration) for test in others[REPEATS:]]
    every = [verdict for of_control in verdicts.values() for verdict in of_control]
    alarms = [verdict for verdict in every if verdict.judgement is Judgement.FAIL]
    passed = sum(verdict.judgement is Judgement.PASS for verdict in every)
    alarming = sum(
        any(verdict.judgement is Judgement.FAIL for verdict in of_control)
        for of_control in verdicts.values()
    )
    return RealRuns(
        len(runs),
        int(runs[0].steps.size),
        Rate(alarming, len(runs)),
        Rate(len(alarms), len(every)),
        Rate(len(every) - len(alarms) - passed, len(every)),
        Counter(name for alarm in alarms for name in alarm.failed),
    )


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
