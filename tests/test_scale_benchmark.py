"""What the benchmark of scale derives; what it measures is the machine's business."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("measured", "word"), [(0.5, "met"), (1.0, "met"), (1.01, "MISSED"), (float("nan"), "MISSED")]
)
def test_a_goal_is_the_most_that_is_allowed(measured, word):
    from scaling.row import Row

    row = Row("polling", measured, "s", goal=1.0)
    assert str(row).endswith(f"at most 1 s: {word}")
    assert row.missed == (word == "MISSED")
    assert not Row("polling", measured, "s").missed


def test_the_sets_that_are_planned_are_right_and_all_different(tmp_path):
    from scaling.experiments import KINDS, write_experiment

    from converge_harness.matrix import load
    from converge_harness.trainers import assume_toolchain

    file = write_experiment(tmp_path, 3 * len(KINDS))
    plan = load.plan_experiment(load.load_with_cluster(file), on_gpu=False, find=assume_toolchain)
    tests = [job for job in plan.jobs if job.name.startswith("set_")]
    assert len({job.identity for job in tests}) == 3 * len(KINDS)
    assert {job.spec.kind.value for job in tests} == {"parallel", "fault", "elastic"}


def test_the_processes_that_a_query_starts_are_counted():
    from scaling.polling import processes_started

    with processes_started() as started:
        subprocess.run(["true"], check=True)
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    subprocess.run(["true"], check=True)
    assert started == ["true", sys.executable]
