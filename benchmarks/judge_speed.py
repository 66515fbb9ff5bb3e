"""Time and memory of the judge, each measurement in its own process.

``nox -s bench -- judge`` prints a row per measurement, with its goal and whether it is met: two
curves of a million steps, and a thousand pairs of three thousand steps, each with all signals, a
calibration by five repeats, all tiers. Times are for calibrating and judging, as wall and CPU time:
on a busy machine they differ, and the goals are for wall time. Memory is the peak of the whole
process, imports and the curves themselves included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from converge_harness.judge import calibrate, judge
from converge_harness.model import Evidence, Judgement

REPEATS = 5
MB = 1e6


@dataclass(frozen=True, slots=True)
class Goal:
    """Largest allowed values of a measurement; None: no goal."""

    what: str
    seconds: float
    megabytes: float | None = None


def one_long_pair(steps: int = 1_000_000) -> Callable[[], None]:
    """Two foreign curves."""
    control, test = _curves("control", steps, seed=1), _curves("test", steps, seed=2)
    return lambda: _expect_pass(test, control)


def one_long_calibrated_pair(steps: int = 1_000_000) -> Callable[[], None]:
    """The same, with repeats to calibrate from."""
    control, test = _curves("control", steps, seed=1), _curves("test", steps, seed=2)
    repeats = [_curves(f"repeat {i}", steps, seed=3 + i) for i in range(REPEATS)]
    return lambda: _expect_pass(test, control, repeats)


def many_pairs(pairs: int = 1000, steps: int = 3000) -> Callable[[], None]:
    """Test sets of one control with one calibration."""
    control = _curves("control", steps, seed=1)
    repeats = [_curves(f"repeat {i}", steps, seed=3 + i) for i in range(REPEATS)]
    tests = [_curves(f"test {i}", steps, seed=100 + i) for i in range(10)]

    def measure() -> None:
        calibration = calibrate(control, repeats)
        for index in range(pairs):
            verdict, _ = judge(tests[index % len(tests)], control, calibration)
            if verdict.judgement is not Judgement.PASS:
                raise RuntimeError(f"{verdict.name} is {verdict.judgement}: {verdict.cause}")

    return measure


MEASUREMENTS: dict[str, tuple[Callable[[], Callable[[], None]], Goal]] = {
    "pair": (one_long_pair, Goal("two curves of 1,000,000 steps", 2.0, 500.0)),
    "calibrated": (
        one_long_calibrated_pair,
        Goal("the same, calibrated by 5 repeats (no goal of its own)", float("inf")),
    ),
    "pairs": (many_pairs, Goal("1,000 pairs of 3,000 steps", 10.0)),
}


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only)))
        return 0
    print(f"{'judging':<54}{'seconds':>9}{'CPU s':>8}{'peak MB':>9}   goal")
    missed = False
    for name, (_, goal) in MEASUREMENTS.items():
        command = [sys.executable, __file__, "--only", name]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        words, met = _against(goal, found["seconds"], found["megabytes"])
        missed = missed or not met
        seconds = f"{found['seconds']:>9.2f}{found['cpu_seconds']:>8.2f}"
        print(f"{goal.what:<54}{seconds}{found['megabytes']:>9.0f}   {words}")
    return int(missed)


def measure(name: str) -> dict[str, float]:
    """Seconds of one measurement, and the peak memory of this process after it."""
    work = MEASUREMENTS[name][0]()
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "megabytes": peak_kib * 1024 / MB}


def _against(goal: Goal, seconds: float, megabytes: float) -> tuple[str, bool]:
    met = seconds <= goal.seconds and (goal.megabytes is None or megabytes <= goal.megabytes)
    if goal.seconds == float("inf"):
        return "", True
    memory = f" and {goal.megabytes:g} MB" if goal.megabytes else ""
    return f"{goal.seconds:g} s{memory}: {'met' if met else 'MISSED'}", met


def _expect_pass(test: Evidence, control: Evidence, repeats: list[Evidence] | None = None) -> None:
    verdict, _ = judge(test, control, calibrate(control, repeats) if repeats else None)
    if verdict.judgement is not Judgement.PASS:
        raise RuntimeError(f"{verdict.name} is {verdict.judgement}: {verdict.cause}")


def _curves(name: str, steps: int, seed: int) -> Evidence:
    """All signals of a correct run, which equals every other run up to rounding."""
    at = np.arange(1, steps + 1, dtype=np.float64)
    loss = 2.0 + 6.0 * at**-0.1
    norm = 0.5 + 0.4 * at**-0.1
    chance = np.random.default_rng(seed)

    def off(curve: np.ndarray) -> np.ndarray:
        return curve * (1 + 1e-8 * chance.standard_normal(steps))

    return Evidence(
        name=name,
        source=name,
        steps=np.arange(1, steps + 1),
        signals={
            "loss": off(loss),
            "grad_norm": off(norm),
            "loss_recomputed": off(loss),
            "grad_norm_recomputed": off(norm),
            "lr": 1e-3 * at**-0.5,
            "tokens": np.full(steps, 8192.0),
        },
        expected_steps=steps,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure how fast the judge is.")
    parser.add_argument("--only", choices=MEASUREMENTS, help="one measurement, in this process")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
