"""job.json: what a rank is told, and what it says of a file that it cannot read."""

import json

import pytest

from harness.rank.job import Degrees, JobError, read_job

RAW = {
    "schema": 1,
    "name": "fsdp2",
    "role": "test",
    "identity": "00ff",
    "dialect": "titan_0_3",
    "run_folder": "/runs/fsdp2",
    "seed": 42,
    "steps": 20,
    "parallelism": {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "pp": 1, "ep": 1},
    "train_config": {"path": "train_configs/llama3_debug.toml", "module": "llama3"},
    "data": {"folder": "/data/abc", "digest": "abc"},
}


def written(folder, **changes):
    path = folder / "job.json"
    path.write_text(json.dumps({**RAW, **changes}))
    return path


def test_a_job_is_read_with_its_defaults(tmp_path):
    job = read_job(written(tmp_path))
    assert job.parallelism == Degrees(dp_shard=2)
    assert str(job.data_folder) == "/data/abc"
    assert (job.seed_checkpoint, job.repeat, job.techniques, job.device) == (None, None, (), "cpu")
    assert not job.makes_seed_checkpoint


def test_a_seed_checkpoint_job_is_known_by_its_role(tmp_path):
    assert read_job(written(tmp_path, role="seed checkpoint")).makes_seed_checkpoint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, "job schema is 2"),
        ({"parallelism": {"zp": 2}}, "not a complete job"),
        ({"train_config": {}}, "'path'"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path, changes, says):
    with pytest.raises(JobError, match=says):
        read_job(written(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_file_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(JobError, match=r"job\.json"):
        read_job(tmp_path / "job.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(JobError, match="cannot be read"):
        read_job(tmp_path / "none.json")
