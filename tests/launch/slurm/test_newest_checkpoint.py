"""What a batch script says that a requeued program goes on from."""

import json

import pytest
from batch_jobs import program

from converge_harness.rank.start import newest
from converge_harness.run_folder.checkpoints import CheckpointForm, write_manifest
from converge_harness.run_folder.layout import NEWEST_CHECKPOINT
from converge_harness.run_folder.passes import pass_folder
from converge_harness.trainers import job_payload
from converge_harness.trainers.command.settings import RankLauncher

FORM = CheckpointForm("step-{step}.pt", None)


@pytest.fixture
def folder(tmp_path):
    """A run folder with checkpoints of steps 4 and 8, the newer of which is cut short."""
    payload = job_payload(
        program(RankLauncher.TORCHRUN), tmp_path, data=None, seed_checkpoint=None, device="cpu"
    )
    payload["command"] |= {"checkpoints": {"name": FORM.name, "last_file": None}}
    (tmp_path / "job.json").write_text(json.dumps({"schema": 1, **payload}))
    (tmp_path / "checkpoint").mkdir()
    of_pass = pass_folder(tmp_path, 1)
    (of_pass / "state").mkdir(parents=True)
    for step in (4, 8):
        FORM.path(tmp_path, step).write_text("whole")
        write_manifest(FORM.path(tmp_path, step), step, of_pass, FORM)
    FORM.path(tmp_path, 8).write_text("who")
    return tmp_path


def test_the_newest_whole_checkpoint_is_named_and_others_are_set_aside(folder, capsys):
    newest.main(str(folder / "job.json"))
    assert capsys.readouterr().out == f"{NEWEST_CHECKPOINT}{folder}/checkpoint/step-4.pt\n"
    assert [each.name for each in folder.glob("torn/*")] == ["step-8.pt"]


def test_only_the_first_node_sets_any_aside(folder, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "1")
    newest.main(str(folder / "job.json"))
    assert capsys.readouterr().out == f"{NEWEST_CHECKPOINT}{folder}/checkpoint/step-4.pt\n"
    assert not (folder / "torn").exists()


def test_without_a_whole_one_it_names_none(folder, capsys):
    FORM.path(folder, 4).unlink()
    newest.main(str(folder / "job.json"))
    assert capsys.readouterr().out == f"{NEWEST_CHECKPOINT}\n"


def test_a_checkpoint_that_cannot_be_moved_ends_the_script_in_words(folder):
    (folder / "torn").write_text("in the way")
    with pytest.raises(SystemExit, match="cannot set the torn checkpoint aside"):
        newest.main(str(folder / "job.json"))
