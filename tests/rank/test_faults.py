"""Faults of the script in real ranks, with torch's own checkpoints: what strikes, and only once."""

import json
import math
import signal
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import tiny_trainer as tiny

from converge_harness.run_folder import faults as fault_files
from converge_harness.run_folder.job import RankFault

KILLED = -signal.SIGKILL


@pytest.fixture
def job(tmp_path):
    """A job with faults, of which their installation reads no more than this."""
    return lambda *script: SimpleNamespace(run_folder=tmp_path, faults=script)


def steps(job, rank=0):
    return [step for step, _ in tiny.losses(job, rank)]


def struck(job, index=0):
    return json.loads((job.run_folder / "faults" / f"{index}.json").read_text())


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_a_killed_rank_dies_in_its_step_and_never_again(job):
    killed = job(RankFault("kill", step=3, rank=1))
    assert tiny.run_ranks(killed)[1] == KILLED
    assert steps(killed, rank=1) == [1, 2]
    first = struck(killed)
    assert first["at"] <= time.time()
    del first["at"]
    assert first == {
        "schema": 1,
        "index": 0,
        "kind": "kill",
        "step": 3,
        "pass": 1,
        "rank": 1,
        "torn": False,
    }
    assert tiny.run_ranks(killed, pass_number=2) == [0, 0]
    assert steps(killed, rank=1) == [1, 2, 3, 4, 5]
    assert struck(killed)["pass"] == 1


@pytest.mark.parametrize(
    "fault",
    [
        RankFault("kill", step=3, rank=2),
        RankFault("hang", step=9, rank=1),
        RankFault("nan_batch", step=3, rank=2),
        RankFault("ckpt_torn", step=3),
        RankFault("ckpt_torn", step=3, torn="truncated"),
        RankFault("ckpt_torn", step=2, rank=2, torn="truncated"),
        RankFault("disk_full", step=3, rank=1),
        RankFault("disk_full", step=2, rank=2),
    ],
    ids=str,
)
def test_a_fault_of_another_step_or_rank_does_not_strike(job, fault):
    undisturbed = job(fault)
    assert tiny.run_ranks(undisturbed) == [0, 0]
    assert steps(undisturbed) == [1, 2, 3, 4, 5]
    assert not (undisturbed.run_folder / "faults").exists()


def test_a_hung_rank_answers_to_signals_only(job):
    hung = job(RankFault("hang", step=2, rank=1))
    other, rank = tiny.start_ranks(hung)
    wait_for(hung.run_folder / "faults" / "0.json")
    other.kill()
    other.join()
    rank.join(timeout=0.5)
    assert rank.is_alive()  # a rank in a collective would have seen the other's death
    rank.terminate()
    rank.join()
    assert rank.exitcode == -signal.SIGTERM
    assert steps(hung, rank=1) == [1]
    assert tiny.run_ranks(hung, pass_number=2) == [0, 0]


def test_one_forward_of_one_rank_gives_nan(job):
    poisoned = job(RankFault("nan_batch", step=3, rank=1))
    assert tiny.run_ranks(poisoned) == [0, 0]
    assert [math.isnan(loss) for _, loss in tiny.losses(poisoned, rank=1)[:3]] == [0, 0, 1]
    # The other rank gets it by the gradients, one step later, and trains on: nothing hides it.
    assert [math.isnan(loss) for _, loss in tiny.losses(poisoned)] == [0, 0, 0, 1, 1]
    assert struck(poisoned)["step"] == 3


def test_every_rank_dies_after_the_shards_and_before_the_metadata(job):
    torn = job(RankFault("ckpt_torn", step=4))
    assert tiny.run_ranks(torn) == [KILLED, KILLED]
    checkpoint = torn.run_folder / "checkpoint" / "step-4"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["__0_0.distcp", "__1_0.distcp"]
    assert all(path.stat().st_size > 4 * 4096 for path in checkpoint.iterdir())
    assert struck(torn)["torn"] is True
    assert tiny.run_ranks(torn, pass_number=2) == [0, 0]
    assert steps(torn) == [1, 2, 3, 4, 3, 4, 5]
    assert (checkpoint / ".metadata").exists()


def test_a_checkpoint_that_looks_whole_has_one_shard_cut_short(job):
    torn = job(RankFault("ckpt_torn", step=4, rank=1, torn="truncated"))
    assert tiny.run_ranks(torn) == [KILLED, KILLED]
    checkpoint = torn.run_folder / "checkpoint" / "step-4"
    assert (checkpoint / ".metadata").exists()
    sizes = {
        (step, rank): (checkpoint.parent / f"step-{step}" / f"__{rank}_0.distcp").stat().st_size
        for step in (2, 4)
        for rank in (0, 1)
    }
    assert sizes[4, 0] == sizes[2, 0]
    assert sizes[4, 1] == sizes[2, 1] // 2
    assert tiny.run_ranks(torn, pass_number=2) == [1, 1]  # it cannot be loaded
    assert steps(torn) == [1, 2, 3, 4]
    checkpoint.rename(torn.run_folder / "aside")
    assert tiny.run_ranks(torn, pass_number=3) == [0, 0]


def test_a_full_disk_stops_the_checkpoint_and_has_space_in_the_next_pass(job):
    full = job(RankFault("disk_full", step=4, rank=1))
    assert tiny.run_ranks(full) == [1, 1]
    for rank in (0, 1):
        assert "No space left on device" in (full.run_folder / f"error-{rank}.txt").read_text()
    checkpoint = full.run_folder / "checkpoint" / "step-4"
    assert not (checkpoint / ".metadata").exists()
    assert struck(full)["torn"] is True
    assert tiny.run_ranks(full, pass_number=2) == [0, 0]
    assert (checkpoint / ".metadata").exists()
    assert not (checkpoint / "__1_0.distcp").is_symlink()
    assert steps(full) == [1, 2, 3, 4, 3, 4, 5]


@pytest.mark.parametrize("kind", ["preempt", "agent_loss", "join"])
def test_ranks_hold_still_until_the_harness_has_struck(job, kind):
    held = job(RankFault(kind, step=2))
    ranks = tiny.start_ranks(held)
    wait_for(held.run_folder / "checkpoint" / "step-2" / ".metadata")
    for rank in ranks:
        rank.join(timeout=0.3)
    assert [rank.is_alive() for rank in ranks] == [True, True]
    assert steps(held) == steps(held, rank=1) == [1, 2]
    (held.run_folder / "faults").mkdir()
    (held.run_folder / "faults" / "0.over.json").write_text("{}")
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert steps(held) == [1, 2, 3, 4, 5]


def test_ranks_do_not_hold_for_ever(job, monkeypatch):
    monkeypatch.setattr(fault_files, "HOLD_SECONDS", 0.1)
    forgotten = job(RankFault("join", step=2))
    assert tiny.run_ranks(forgotten) == [0, 0]
    assert not (forgotten.run_folder / "faults").exists()
