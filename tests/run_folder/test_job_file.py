"""job.json: what a rank is told, and what it says of a file that it cannot read."""

import json

import pytest

from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.run_folder.job import Degrees, JobError, read_job

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


def test_a_form_of_checkpoints_may_lack_its_last_file_and_have_further_keys(tmp_path):
    form = {"name": "{step}.pt", "since": 3}
    found = read_job(written(tmp_path, checkpoints=form)).checkpoints
    assert found == CheckpointForm("{step}.pt", None)


def test_a_seed_checkpoint_job_is_known_by_its_role(tmp_path):
    assert read_job(written(tmp_path, role="seed checkpoint")).makes_seed_checkpoint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, "job schema is 2"),
        ({"parallelism": {"zp": 2}}, "not a complete job"),
        ({"train_config": {}}, "'path'"),
        ({"checkpoints": {"last_file": ".metadata"}}, "'name'"),
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


ONE = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1}
SEGMENTS = [
    {"until": 8, "parallelism": {**ONE, "dp_shard": 2}, "local_batch_size": 2},
    {
        "until": 20,
        "parallelism": {**ONE, "pp": 2},
        "local_batch_size": 4,
        "pipeline_schedule": "1F1B",
    },
]


def test_a_segment_replaces_degrees_batch_and_schedule_and_ends_with_a_checkpoint(tmp_path):
    path = written(tmp_path, segments=SEGMENTS, overrides={"training.seq_len": 128})
    first, last = read_job(path, 0), read_job(path, 1)
    assert (first.parallelism, last.parallelism) == (Degrees(dp_shard=2), Degrees(pp=2))
    assert (first.pipeline_schedule, last.pipeline_schedule) == (None, "1F1B")
    assert last.overrides == {"training.seq_len": 128, "training.local_batch_size": 4}
    assert (first.steps, first.last_step, last.last_step) == (20, 8, 20)
    assert [step for step in range(1, 21) if first.saves_at(step)] == [8]
    assert not any(last.saves_at(step) for step in range(1, 21))


@pytest.mark.parametrize("index", [-1, 2])
def test_a_segment_that_is_not_there_is_refused(tmp_path, index):
    with pytest.raises(JobError, match=f"no segment {index}, there are 2"):
        read_job(written(tmp_path, segments=SEGMENTS), index)


def test_checkpoints_are_written_every_so_often_and_not_at_the_end(tmp_path):
    fault = {"kind": "kill", "step": 6, "rank": 1, "node": 1, "torn": "death"}
    job = read_job(written(tmp_path, checkpoint_every=5, faults=[fault]))
    assert [step for step in range(1, 21) if job.saves_at(step)] == [5, 10, 15]
    assert (job.faults[0].kind, job.faults[0].rank) == ("kill", 1)
    assert job.resumes
    plain = read_job(written(tmp_path))
    assert not plain.resumes
    assert not any(plain.saves_at(step) for step in range(1, 21))


def test_with_elastic_nodes_dp_shard_is_what_the_world_leaves_over(tmp_path):
    degrees = {**ONE, "dp_shard": 4, "tp": 2}
    elastic = read_job(written(tmp_path, parallelism=degrees, elastic_nodes=True))
    assert elastic.on_world(4).parallelism == Degrees(dp_shard=2, tp=2)
    with pytest.raises(JobError, match="3 ranks are not a multiple of 2"):
        elastic.on_world(3)
    fixed = read_job(written(tmp_path, parallelism=degrees))
    assert fixed.on_world(4) == fixed
