"""Two lives of one job that a scheduler requeued: what the later one takes, and what it leaves."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from gloo_ranks import run_on_ranks

from harness.rank.passes import Pass, _claim, begin_pass
from harness.rank.torn import set_torn_aside
from harness.rank.writer import MetricsWriter, SupersededError, write_json


def checkpoint(run, step, *, number=1, size=100, metadata=True, manifest=100):
    """A checkpoint of one shard, and what the pass that saved it left of the save."""
    folder = run / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(size))
    if metadata:
        (folder / ".metadata").write_bytes(b"0")
    state = run / "passes" / f"{number:03d}" / "state"
    state.mkdir(parents=True, exist_ok=True)
    (state / f"saved-step-{step:08d}.npz").touch()
    if manifest:
        files = {"__0_0.distcp": manifest, ".metadata": 1}
        write_json(state / f"saved-step-{step:08d}.json", {"schema": 1, "files": files})


def names(folder):
    return sorted(path.name for path in folder.glob("*"))


def test_only_whole_checkpoints_are_left_to_load(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, metadata=False, manifest=None)  # death in the middle of the save
    checkpoint(tmp_path, 6, manifest=None)  # death before the save had returned
    checkpoint(tmp_path, 8, size=50)  # a shard that never came to the disk
    (tmp_path / "checkpoint" / "step-10").mkdir()  # whose pass left nothing of it
    set_torn_aside(tmp_path)
    assert names(tmp_path / "checkpoint") == ["step-2"]
    assert names(tmp_path / "torn") == ["step-10", "step-4", "step-6", "step-8"]


def test_a_step_that_is_torn_once_more_is_set_aside_beside_the_first(tmp_path):
    for number in (1, 2):
        checkpoint(tmp_path, 4, number=number, metadata=False, manifest=None)
        set_torn_aside(tmp_path)
    assert names(tmp_path / "torn") == ["step-4", "step-4.2"]


def test_the_last_save_of_a_step_decides_whether_it_is_whole(tmp_path):
    checkpoint(tmp_path, 4)
    (tmp_path / "passes" / "002" / "state").mkdir(parents=True)
    (tmp_path / "passes" / "002" / "state" / "saved-step-00000004.npz").touch()
    set_torn_aside(tmp_path)
    assert names(tmp_path / "checkpoint") == []


@pytest.mark.parametrize("requeued", [True, False])
def test_torn_checkpoints_are_gone_before_any_rank_goes_on(tmp_path, requeued):
    checkpoint(tmp_path, 4, metadata=False, manifest=None)

    def begin():
        this = begin_pass(tmp_path, requeued=requeued)
        assert this.number == 2
        assert (tmp_path / "checkpoint" / "step-4").exists() is not requeued

    run_on_ranks(begin, 2)


def test_lives_that_begin_at_the_same_time_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(_claim, [tmp_path / "passes"] * 16))
    assert sorted(numbers) == list(range(1, 17))


def test_a_life_that_another_has_followed_writes_no_checkpoint(tmp_path):
    passes = [Pass(number, tmp_path / f"{number:03d}") for number in (1, 2)]
    for each in passes:
        each.folder.mkdir()
    passes[1].require_newest()
    with pytest.raises(SupersededError, match="pass 2 of this run has begun elsewhere"):
        passes[0].require_newest()


def test_a_run_that_starts_over_keeps_nothing_of_the_life_before(tmp_path):
    before = MetricsWriter(tmp_path, {"life": 1})
    before.step({"step": 1})
    (tmp_path / "tensors").mkdir()
    (tmp_path / "tensors" / "step-00000008.npz").touch()
    write_json(tmp_path / "in_force.json", {})
    after = MetricsWriter(tmp_path, {"life": 2})
    assert names(tmp_path / "tensors") == []
    assert names(tmp_path) == ["metrics.jsonl.part", "tensors"]
    with pytest.raises(SupersededError, match="started again"):
        before.step({"step": 2})
    with pytest.raises(SupersededError, match="started again"):
        before.finish(2)
    before._stream.close()
    after.step({"step": 1})
    after.finish(1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("life") for line in lines] == [2, None, None]


def test_a_finished_run_that_starts_over_is_unfinished_again(tmp_path):
    MetricsWriter(tmp_path, {"life": 1}).finish(0)
    after = MetricsWriter(tmp_path, {"life": 2})
    assert names(tmp_path) == ["metrics.jsonl.part"]
    after.finish(0)
    assert '"life": 2' in (tmp_path / "metrics.jsonl").read_text()
