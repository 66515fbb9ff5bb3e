"""Digests of what a run left and was made of: whatever changes afterwards is noticed and named."""

import json
import os
import time

import pytest

from converge_harness import seal
from converge_harness.readers import read_run
from converge_harness.seal import (
    broken_seal,
    changed_source,
    evidence_of,
    other_code,
    sources_of,
)


@pytest.fixture
def folder(tmp_path):
    """A run folder with evidence files and with files that are no evidence, such as logs."""
    made = tmp_path / "store" / "runs" / "ddp2-0123456789ab"
    files = {
        "job.json": {"schema": 1, "name": "ddp2", "sample_steps": [0, 1]},
        "in_force.json": {"schema": 1, "config": {}},
        "metrics.jsonl": {},
        "tensors/step-00000001.npz": {},
        "passes/01/metrics.jsonl.part": {},
        "logs/failures.json": {},
        "checkpoint/step-0/.metadata": {},
        "submission.json": {},
        "imported/rank-00000.json": {"schema": 1, "files": {}},
    }
    for name, content in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(json.dumps(content))
    return made


EVIDENCE = [
    "in_force.json",
    "job.json",
    "metrics.jsonl",
    "passes/01/metrics.jsonl.part",
    "tensors/step-00000001.npz",
]


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_that_was_changed_or_removed_is_named(folder, name):
    sealed = evidence_of(folder)
    assert list(sealed) == EVIDENCE
    assert broken_seal(folder, sealed) == ""
    (folder / name).write_text("{}\n ")
    assert broken_seal(folder, sealed) == f"{name} was changed after the run had finished"
    (folder / name).unlink()
    assert broken_seal(folder, sealed) == f"{name} was removed after the run had finished"


@pytest.mark.parametrize("name", ["job.json", "in_force.json"])
def test_a_pipe_in_the_place_of_evidence_is_not_waited_for(folder, name):
    sealed = evidence_of(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert broken_seal(folder, sealed) == f"{name} was removed after the run had finished"
    assert sources_of(folder) == {}


def test_evidence_that_was_added_is_named_and_logs_are_none(folder):
    sealed = evidence_of(folder)
    (folder / "logs" / "failures.json").write_text("other")
    (folder / "submission.json").unlink()
    assert broken_seal(folder, sealed) == ""
    (folder / "frozen.npz").write_text("")
    assert broken_seal(folder, sealed) == "frozen.npz was added after the run had finished"


@pytest.mark.parametrize("place", ["output/loss.csv", "output/events"])
def test_the_curve_of_a_program_is_evidence(folder, place, tmp_path):
    curves = folder / place
    file = curves / "events.1" if curves.name == "events" else curves
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("step,loss\n1,2.5\n")
    command = {"probed": False, "curves": str(curves)}
    job = {"name": "program", "run_folder": str(folder), "command": command}
    (folder / "job.json").write_text(json.dumps({"schema": 1, **job}))
    sealed = evidence_of(folder)
    assert broken_seal(folder, sealed) == ""
    moved = folder.rename(tmp_path / "moved")
    assert broken_seal(moved, sealed) == ""
    (moved / file.relative_to(folder)).write_text("step,loss\n1,2.4\n")
    assert broken_seal(moved, sealed).endswith("was changed after the run had finished")


def test_a_run_whose_seal_is_broken_is_no_evidence(folder):
    record = {
        "schema": 1,
        "name": "ddp2",
        "identity": "0" * 64,
        "status": "finished",
        "wall_s": 1.0,
        "argv": [],
        "error": None,
        "evidence": evidence_of(folder),
    }
    (folder / "record.json").write_text(json.dumps(record))
    # The attack: no samples, and a job that asks for none.
    (folder / "tensors" / "step-00000001.npz").unlink()
    (folder / "job.json").write_text(json.dumps({"schema": 1, "name": "ddp2", "sample_steps": []}))
    evidence = read_run(folder)
    assert not evidence.complete
    assert evidence.steps.size == 0
    assert evidence.problems[0].startswith("job.json was changed after the run had finished")


def config_with(folder, **values):
    (folder / "in_force.json").write_text(json.dumps({"schema": 1, "config": values}))


def test_data_that_the_config_names_is_a_source(folder, tmp_path):
    data = tmp_path / "c4"
    data.mkdir()
    (data / "part-0.jsonl").write_text("one")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    config_with(
        folder,
        **{
            "dataloader.dataset_path": str(data),
            "hf_assets_path": "../../../tokenizer.json",
            "job.dump_folder": str(folder),
            "model.name": "llama3/debug",
            "training.steps": 10,
        },
    )
    sources = sources_of(folder)
    assert list(sources) == [str(data), str(tokenizer)]
    assert changed_source(sources) == ""
    (data / "part-1.jsonl").write_text("two")
    assert changed_source(sources) == f"{data}, which it used, has changed"
    (data / "part-1.jsonl").unlink()
    tokenizer.write_text("{ }")
    assert changed_source(sources) == f"{tokenizer}, which it used, has changed"


def test_data_behind_links_in_lists_and_beside_the_seed_checkpoint_is_a_source(folder, tmp_path):
    shards, data = tmp_path / "shards", tmp_path / "data"
    shards.mkdir()
    (shards / "a.jsonl").write_text("one")
    (data / "step-0").mkdir(parents=True)
    (data / "train").symlink_to(shards)
    (data / "train_again").symlink_to(shards)
    (data / "itself").symlink_to(data)
    listed = tmp_path / "listed.jsonl"
    listed.write_text("one")
    (folder / "job.json").write_text(
        json.dumps({"schema": 1, "seed_checkpoint": str(data / "step-0")})
    )
    config_with(folder, dataset_path=str(data), files=[str(listed)])
    sources = sources_of(folder)
    assert list(sources) == [str(data), str(listed)]
    assert changed_source(sources) == ""
    (shards / "a.jsonl").write_text("two")
    assert changed_source(sources) == f"{data}, which it used, has changed"
    (shards / "a.jsonl").write_text("one")
    listed.write_text("two")
    assert changed_source(sources) == f"{listed}, which it used, has changed"


def test_our_own_corpus_and_the_seed_checkpoint_are_in_the_identity_already(folder, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "step-0").mkdir()
    job = {"data": {"folder": str(tmp_path / "data")}, "seed_checkpoint": str(tmp_path / "step-0")}
    (folder / "job.json").write_text(json.dumps({"schema": 1, **job}))
    config_with(folder, a=str(tmp_path / "data" / "tokens.npy"), b=str(tmp_path / "step-0"), c="/")
    (tmp_path / "data" / "tokens.npy").touch()
    assert sources_of(folder) == {}


def test_what_cannot_be_digested_is_never_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(seal, "_MOST", 2)
    for number in range(3):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
        (tmp_path / "many" / str(number) / "file").touch()
    config_with(folder, data=str(tmp_path / "many"))
    sources = sources_of(folder)
    assert sources == {str(tmp_path / "many"): None}
    unknown = "which it used, has no digest, or was written while it trained"
    assert changed_source(sources) == f"{tmp_path / 'many'}, {unknown}"


def imported_by(folder, rank, files, began=None):
    left = {"schema": 1, "files": files} | ({} if began is None else {"began": began})
    (folder / "imported" / f"rank-{rank:05d}.json").write_text(json.dumps(left))


def test_data_that_was_written_while_the_run_trained_is_never_the_same(folder, tmp_path):
    data = tmp_path / "data" / "a.jsonl"
    data.parent.mkdir()
    data.write_text("one")
    config_with(folder, dataset_path=str(data.parent), file=str(data))
    imported_by(folder, 0, {}, began=data.stat().st_ctime + 5)
    imported_by(folder, 1, {}, began=data.stat().st_ctime + 1)
    assert None not in sources_of(folder).values()
    imported_by(folder, 1, {}, began=data.stat().st_ctime - 1)
    assert sources_of(folder) == {str(data.parent): None, str(data): None}


def test_a_lock_that_a_library_made_while_it_read_data_is_none_of_it(folder, tmp_path):
    data = tmp_path / "data" / "a.jsonl"
    data.parent.mkdir()
    data.write_text("one")
    config_with(folder, dataset_path=str(data.parent))
    imported_by(folder, 0, {}, began=data.stat().st_ctime + 0.001)
    time.sleep(0.01)
    (data.parent / ".lock").touch()
    assert None not in sources_of(folder).values()


def test_a_module_that_ranks_found_with_other_contents_is_never_the_same(folder, tmp_path):
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    imported_by(folder, 0, {str(mine): "a", str(other): "b"})
    imported_by(folder, 1, {str(mine): "a", str(other): "c"})
    imported_by(folder, 2, {str(other): "c"})
    assert sources_of(folder) == {str(mine): "a", str(other): None}


def test_packages_that_only_a_container_has_are_its_images(folder, tmp_path):
    there = tmp_path / "site-packages" / "here.py"
    there.parent.mkdir()
    there.touch()
    away = tmp_path / "image" / "site-packages" / "fork-1.dist-info" / "RECORD"
    mine = tmp_path / "image" / "mine.py"
    imported_by(folder, 0, {str(away): "a", str(mine): "b", str(there): "c"})
    assert sources_of(folder) == {str(mine): "b", str(there): "c"}
    assert changed_source({str(mine): "b"}) == f"{mine}, which it used, is not there any more"


CODE = {"titan/__init__.py": "00", "titan/trainer.py": "11"}
IMPORTED_AS_PLANNED = {"/a/titan/titan/__init__.py": "00", "/a/titan/titan/trainer.py": "11"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"/elsewhere/model.py": "77"}, ""),
        ({"/a/titan/titan/trainer.py": "99"}, "is not what it was when the run was planned"),
        ({"/a/titan/titan/trainer.py": None}, "was written while it trained"),
        ({"/a/titan/titan/new.py": "22"}, "is not what it was when the run was planned"),
        ({"/b/titan/__init__.py": "00"}, "imported titan from /a/titan/ and /b/"),
    ],
)
def test_ranks_that_imported_other_code_than_was_planned_are_noticed(changed, says):
    found = other_code(CODE, IMPORTED_AS_PLANNED | changed)
    assert says in found if says else found == ""


def test_ranks_that_imported_the_package_from_somewhere_else_are_noticed():
    assert other_code({}, {"/anything.py": "0"}) == ""
    assert "from the toolchain's packages" in other_code(CODE, {"/elsewhere/model.py": "77"})


def test_a_run_of_other_code_than_was_planned_shows_nothing(folder):
    job = {"schema": 1, "name": "ddp2", "steps": 1, "identity": "0123", "code": CODE}
    (folder / "job.json").write_text(json.dumps(job))
    record = {
        "schema": 1,
        "name": "ddp2",
        "identity": "0123",
        "status": "finished",
        "argv": [],
        "returncode": 0,
        "wall_s": 1.0,
        "error": None,
        "sources": IMPORTED_AS_PLANNED | {"/a/titan/titan/trainer.py": "99"},
    }
    (folder / "record.json").write_text(json.dumps(record))
    evidence = read_run(folder)
    assert not evidence.complete
    (problem,) = evidence.problems
    assert problem.startswith("/a/titan/titan/trainer.py, which its ranks imported, is not what")
