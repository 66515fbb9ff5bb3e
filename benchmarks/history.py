"""Speed of queries to a long history: 10,000 nights of 20 test sets, each with 40 checks.

``nox -s bench -- history`` makes such a file (a few minutes, most of the time), then prints a row
per question with its goal and whether it is met. Times are the best of five, in a process that made
the query once before, so that the file is cached as it is after any other query.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from converge_harness.history import Filter, History, Measurement, Night, Result, Series, SetNight
from converge_harness.history.overview import overview
from converge_harness.history.trend import trends
from converge_harness.model import CauseClass, Judgement, Outcome, Tier

NIGHTS, SETS = 10_000, 20
CHECKS, MEASURING = 40, 24
"""Checks of a result, and how many of them measure a deviation, as in real results."""
START = datetime(2000, 1, 1, 3, tzinfo=UTC)
EXPERIMENT, TEST_SET = "nightly", "set_07"
GOAL_MS = 200.0
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Question:
    what: str
    ask: Callable[[], object]
    goal_ms: float | None = GOAL_MS
    """None: no goal was set."""


def main() -> int:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "history.sqlite")
        began = time.perf_counter()
        history.append_all(nights(arguments.nights))
        took = time.perf_counter() - began
        size = history.path.stat().st_size / 1e6
        print(f"{arguments.nights:,} nights x {SETS} sets: {size:.0f} MB, made in {took:.0f} s\n")
        return ask(history, arguments.nights)


def ask(history: History, count: int) -> int:
    """Print a row per question; return 1 if one takes longer than its goal."""
    late = START + timedelta(days=count * 9 // 10)
    extra = iter(nights(count + REPEATS + 1, first=count))
    questions = (
        Question("the newest 50 results", lambda: history.listing(Filter(limit=50))),
        Question(
            "the newest 50 FAILs of one set",
            lambda: history.listing(
                Filter(EXPERIMENT, TEST_SET, Judgement.FAIL, limit=50),
            ),
        ),
        Question(
            "FAILs of the last tenth of the nights",
            lambda: history.listing(Filter(EXPERIMENT, None, Judgement.FAIL, late, 1000)),
        ),
        Question("one set's trend: every night and one signal", lambda: _ask_trend(history)),
        Question("its steps", _finding(history), None),
        Question(
            "one set's trends of all signals over its newest 365 nights",
            lambda: overview(history, experiment=EXPERIMENT, test_set=TEST_SET, newest=365),
        ),
        Question("append a night", lambda: history.append(next(extra)), None),
    )
    missed = False
    print(f"{'question':<60}{'ms':>8}   goal")
    for question in questions:
        found = _milliseconds(question.ask)
        met = question.goal_ms is None or found <= question.goal_ms
        missed = missed or not met
        goal = f"{question.goal_ms:g} ms: {'met' if met else 'MISSED'}" if question.goal_ms else ""
        print(f"{question.what:<60}{found:>8.1f}   {goal}")
    return int(missed)


def nights(end: int, first: int = 0) -> Iterator[Night]:
    """Nights number ``first`` to ``end``: deviations scatter, and double once in 1,000 nights."""
    chance = np.random.default_rng(first)
    for number in range(first, end):
        level = 1e-7 * 2.0 ** (number // 1000 % 3)
        sizes = level * 10 ** (0.2 * chance.standard_normal((SETS, MEASURING)))
        failed = chance.random(SETS) < 0.01  # noqa: PLR2004 - one result in a hundred
        yield Night(
            experiment=EXPERIMENT,
            source="experiments/nightly.toml",
            finished=START + timedelta(days=number),
            circumstances={"torch": f"2.{number // 100}", "commit": f"{number:040x}"},
            runs=f"{number:064x}",
            wall_s=600.0,
            report="reports/nightly",
            results=tuple(
                _result(f"set_{index:02d}", sizes[index].tolist(), failed=bool(failed[index]))
                for index in range(SETS)
            ),
        )


def _result(name: str, sizes: list[float], *, failed: bool) -> Result:
    measured: list[float | None] = [*sizes, *([None] * (CHECKS - MEASURING))]
    return Result(
        test_set=name,
        control="fsdp2",
        verdict=Judgement.FAIL if failed else Judgement.PASS,
        cause_class=CauseClass.GRADIENT_SCALE if failed else None,
        cause="Gradients are half of the control's at every step." if failed else "",
        onset=1 if failed else None,
        wall_s=40.0,
        reused=False,
        definition="d" * 64,
        measurements=tuple(
            Measurement(
                check=f"check_{index:02d}",
                tier=Tier.ENVELOPE,
                outcome=Outcome.PASS,
                measured=size,
                limit=None if size is None else 2e-6,
                unit="" if size is None else "relative",
            )
            for index, size in enumerate(measured)
        ),
    )


def _ask_trend(history: History) -> tuple[tuple[SetNight, ...], tuple[Series, ...]]:
    return (
        history.nights(EXPERIMENT, TEST_SET),
        history.series(EXPERIMENT, TEST_SET, check="check_00"),
    )


def _finding(history: History) -> Callable[[], object]:
    kept, series = _ask_trend(history)
    return lambda: trends(kept, series)


def _milliseconds(ask: Callable[[], object]) -> float:
    ask()
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return 1e3 * min(taken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure how fast a long history answers.")
    parser.add_argument("--nights", type=int, default=NIGHTS, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
