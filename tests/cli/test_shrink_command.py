"""What ``converge shrink`` says and leaves when its search ends; real runs: ``tests/e2e``."""

import json
import time
from pathlib import Path

import pytest

from converge_harness.cli.main import main
from converge_harness.cli.shrinking import failed_in
from converge_harness.errors import Interrupted, StoreError
from converge_harness.experiment import load_experiment
from converge_harness.matrix import pair_files
from converge_harness.matrix import shrink as matrix_shrink
from converge_harness.matrix.failure import Failure
from converge_harness.model import CauseClass
from converge_harness.plan import select
from converge_harness.shrink import Effect, Shrunk, Trial, search, smallest_pair

SMOKE = Path(__file__).parents[2] / "experiments" / "smoke.toml"


class Searching:
    """Shrinks by a rule instead of runs, and may be interrupted after some trials."""

    after: int | None = None
    fails_again = Trial(Effect.SAME)

    def __init__(self, experiment, name, run, slots):
        self.pair = smallest_pair(select(experiment, [name]), (), ())

    def failure(self, *, failed):
        return Failure(CauseClass.GRADIENT_SCALE, frozenset(), "gradients are scaled by 2")

    def start(self, failure):
        return self.pair

    def search(self, start, failure, may_go_on, tell):
        made = []

        def trial(reduction):
            if len(made) == self.after:
                raise Interrupted("SIGINT")
            made.append(reduction)
            tp = reduction.made.tests[0].parallelism.tp
            return Trial(Effect.SAME if tp > 1 else Effect.PASSES)

        return search(start, trial, may_go_on, tell)

    def again(self, found, failure):
        return self.fails_again


def shrunk(folder, monkeypatch, *more, **changed):
    monkeypatch.setattr(matrix_shrink, "Shrinking", type("S", (Searching,), changed))
    out = ("--out", str(folder / "out"), "--store", str(folder / "store"))
    return main(["shrink", str(SMOKE), "--set", "fsdp2_tp2", *out, *more])


def test_a_search_that_ended_says_what_the_failure_needs(tmp_path, monkeypatch, capsys):
    assert shrunk(tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "smallest set-up: tp 2\n  against one rank, 2 steps, sequences of 32 tokens" in said
    assert "converge repro reports/fsdp2_tp2-shrunk --set fsdp2_tp2  # a draft" in said
    left = json.loads((tmp_path / "out" / "shrunk.json").read_text())
    assert left["needs"] == ["needs tp 2: without it, it passes"]
    assert left["does_not_need"] == ["does not need dp_shard 2"]
    assert left["done"] is True
    (test,) = load_experiment(tmp_path / "out" / "experiment.toml").tests
    assert (test.parallelism.tp, test.parallelism.world_size) == (2, 2)


@pytest.mark.parametrize(("more", "after", "code"), [(("--trials", "3"), None, 3), ((), 3, 130)])
def test_a_search_that_was_ended_keeps_the_smallest_so_far(
    tmp_path, monkeypatch, capsys, more, after, code
):
    assert shrunk(tmp_path, monkeypatch, *more, after=after) == code
    assert "smallest set-up (the search was cut short): tp 2\n" in capsys.readouterr().out
    left = json.loads((tmp_path / "out" / "shrunk.json").read_text())
    assert (left["trials"], left["done"]) == (3, False)
    (test,) = load_experiment(tmp_path / "out" / "experiment.toml").tests
    assert test.setting("training.steps") == 2


def test_a_failure_that_comes_and_goes_is_reported(tmp_path, monkeypatch, capsys):
    passes = Trial(Effect.PASSES)
    assert shrunk(tmp_path, monkeypatch, fails_again=passes) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: run once more, from nothing, it passes. The failure comes and goes" in said
    assert "smallest set-up: tp 2 against one rank" in said
    left = json.loads((tmp_path / "out" / "shrunk.json").read_text())
    assert (left["fails_again"], (tmp_path / "out" / "experiment.toml").is_file()) == (False, True)


def test_a_smallest_set_up_that_could_not_be_run_again_is_no_flaky_one(
    tmp_path, monkeypatch, capsys
):
    assert shrunk(tmp_path, monkeypatch, fails_again=Trial(Effect.UNDECIDED, "ERROR: hung")) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "it cannot be judged (ERROR: hung). Try again" in said
    assert json.loads((tmp_path / "out" / "shrunk.json").read_text())["fails_again"] is None


def test_the_smallest_set_up_is_not_run_again_after_the_minutes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Searching, "search", lambda self, start, *_: Shrunk(start, done=True))
    clock = iter([0.0])  # when the command begins; after that two minutes are over
    monkeypatch.setattr(time, "monotonic", lambda: next(clock, 120.0))
    assert shrunk(tmp_path, monkeypatch, "--minutes", "1") == 3
    assert "not run once more: the minutes are over" in capsys.readouterr().out


def test_a_set_counts_as_failed_if_its_report_says_so(tmp_path):
    tests = [{"name": "a", "verdict": "FAIL"}, {"name": "b", "verdict": "PASS"}]
    (tmp_path / "report.json").write_text(json.dumps({"schema": 1, "tests": tests}))
    assert [failed_in(tmp_path, name) for name in "abc"] == [True, False, False]
    assert not failed_in(SMOKE, "a")
    assert not failed_in(tmp_path / "none", "a")


@pytest.mark.parametrize("error", [StoreError("the disk is full"), KeyboardInterrupt()])
def test_what_was_found_is_said_though_it_cannot_be_written(tmp_path, monkeypatch, capsys, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(pair_files, "write_pair", broken)
    assert shrunk(tmp_path, monkeypatch) == (2 if isinstance(error, StoreError) else 130)
    printed = capsys.readouterr()
    assert "needs tp 2: without it, it passes" in printed.out
    assert "disk is full" in printed.err or isinstance(error, KeyboardInterrupt)


def test_interrupted_before_anything_was_smaller_it_leaves_nothing(tmp_path, monkeypatch):
    assert shrunk(tmp_path, monkeypatch, after=0) == 130
    assert not (tmp_path / "out" / "experiment.toml").exists()


def test_a_set_that_is_not_there_is_named(tmp_path, capsys):
    out = ("--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"))
    assert main(["shrink", str(SMOKE), "--set", "fsdp2_tq2", *out]) == 2
    assert "did you mean 'fsdp2_tp2'?" in " ".join(capsys.readouterr().err.split())
