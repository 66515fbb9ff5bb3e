"""Checkpoints that are not surely whole are set aside, and passes get folders of their own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from converge_harness.run_folder.checkpoints import (
    CheckpointForm,
    is_whole,
    newest_whole,
    set_torn_aside,
    write_manifest,
)
from converge_harness.run_folder.documents import write_json
from converge_harness.run_folder.metrics import SupersededError
from converge_harness.run_folder.passes import PassFolder, claim_pass


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


def test_without_the_probe_the_manifest_alone_says_what_is_whole(tmp_path):
    for step, size in ((4, 100), (8, 50)):
        checkpoint(tmp_path, step, size=size)
        (tmp_path / "passes/001/state" / f"saved-step-{step:08d}.npz").unlink()
    assert newest_whole(tmp_path) == 4


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


def test_passes_that_begin_at_the_same_time_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(claim_pass, [tmp_path] * 16))
    assert sorted(numbers) == list(range(1, 17))


def test_a_pass_with_a_successor_writes_no_checkpoint(tmp_path):
    passes = [PassFolder(number, tmp_path / f"{number:03d}") for number in (1, 2)]
    for each in passes:
        each.folder.mkdir()
    passes[1].require_newest()
    with pytest.raises(SupersededError, match="pass 2 of this run has begun elsewhere"):
        passes[0].require_newest()


def saved(run, step, form, *, number=1):
    """What a pass of a program leaves once ``probe.saved`` has returned."""
    of_pass = run / "passes" / f"{number:03d}"
    (of_pass / "state").mkdir(parents=True, exist_ok=True)
    (of_pass / "state" / f"saved-step-{step:08d}.npz").touch()
    write_manifest(form.path(run, step), step, of_pass, form)


def test_files_of_a_program_are_whole_as_large_as_they_were_saved(tmp_path):
    form = CheckpointForm("model_{step}.pt", last_file=None)
    (tmp_path / "checkpoint").mkdir()
    for step in (2, 4, 6):
        form.path(tmp_path, step).write_bytes(b"weights")
    (tmp_path / "checkpoint" / "model_last.pt").write_bytes(b"weights")  # nobody asked for it
    saved(tmp_path, 2, form)
    saved(tmp_path, 4, form)
    assert newest_whole(tmp_path, form) == 4
    form.path(tmp_path, 4).write_bytes(b"weig")  # it never came to the disk
    assert newest_whole(tmp_path, form) == 2
    assert set_torn_aside(tmp_path, form) == (4, 6)  # and 6 died before it was saved
    assert names(tmp_path / "checkpoint") == ["model_2.pt", "model_last.pt"]
    assert names(tmp_path / "torn") == ["model_4.pt", "model_6.pt"]


def test_folders_of_a_program_have_the_file_that_is_written_last(tmp_path):
    form = CheckpointForm("{step}", last_file="done")
    shard = form.path(tmp_path, 2) / "shards" / "0"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"weights")
    saved(tmp_path, 2, form)
    assert newest_whole(tmp_path, form) is None  # it was not finished
    (form.path(tmp_path, 2) / "done").touch()
    saved(tmp_path, 2, form)
    assert newest_whole(tmp_path, form) == 2
    shard.unlink()
    assert newest_whole(tmp_path, form) is None


LAST = CheckpointForm("last.pt", last_file=None)


def overwritten(run, *steps):
    """The one file of a program that has saved these steps into it."""
    (run / "checkpoint").mkdir()
    for step in steps:
        LAST.path(run, step).write_bytes(b"weights and moments")
        saved(run, step, LAST)


def test_one_file_that_is_overwritten_is_of_the_last_step_that_was_saved(tmp_path):
    overwritten(tmp_path, 4, 8)
    assert newest_whole(tmp_path, LAST) == 8
    assert not is_whole(tmp_path, 4, LAST)  # nothing is left of it
    assert set_torn_aside(tmp_path, LAST) == ()
    # The next start went on from an older step, so the file is older now.
    saved(tmp_path, 6, LAST, number=2)
    assert newest_whole(tmp_path, LAST) == 6


def test_one_file_stays_while_the_next_is_written_to_another(tmp_path):
    overwritten(tmp_path, 4)
    (tmp_path / "checkpoint" / "last.tmp").write_bytes(b"wei")
    assert set_torn_aside(tmp_path, LAST) == ()
    assert newest_whole(tmp_path, LAST) == 4


def test_half_of_a_file_in_the_place_of_the_last_leaves_none(tmp_path):
    overwritten(tmp_path, 4)
    LAST.path(tmp_path, 8).write_bytes(b"weights")
    assert newest_whole(tmp_path, LAST) is None
    assert set_torn_aside(tmp_path, LAST) == (4,)
    assert names(tmp_path / "torn") == ["last.pt"]
    assert newest_whole(tmp_path, LAST) is None  # and 4 does not come back by its manifest


def test_one_file_of_which_no_save_has_returned_is_set_aside(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    LAST.path(tmp_path, 4).write_bytes(b"weights")
    assert newest_whole(tmp_path, LAST) is None
    assert set_torn_aside(tmp_path, LAST) == (0,)
    assert names(tmp_path / "checkpoint") == []


def test_a_folder_in_the_place_of_the_one_file_is_no_checkpoint(tmp_path):
    LAST.path(tmp_path, 4).mkdir(parents=True)
    saved(tmp_path, 4, LAST)
    assert not list((tmp_path / "passes/001/state").glob("*.json"))
    assert newest_whole(tmp_path, LAST) is None
