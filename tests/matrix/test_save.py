"""A report folder stands for its runs as long as the experiment means the same."""

import pytest

from converge_harness.errors import StoreError
from converge_harness.matrix.load import load_plan
from converge_harness.matrix.save import SavedMatrix, load_matrix, save_matrix
from converge_harness.model import Job, Role, RunRecord, RunStatus
from converge_harness.store import write_json
from converge_harness.trainers import assume_toolchain, job_payload

TRAIN_CONFIG = """
[training]
steps = 12
local_batch_size = 4
global_batch_size = 8
seq_len = 256
mixed_precision_param = "float32"
[converge]
module = "llama3"
config = "llama3_debugmodel"
[converge.data]
"""
EXPERIMENT = """
schema = 1
repeats = ["rerun"]
[trainer]
train_config = "t.toml"
[control]
parallelism.dp_shard = 2
[[test]]
kind = "elastic"
name = "resized"
segments = [{ until = 4, dp_shard = 2 }, { until = 12, dp_shard = 1 }]
[[test]]
kind = "fault"
name = "killed"
parallelism.dp_shard = 2
checkpoint_every = 4
restarts = "torchrun"
max_restarts = 2
recover_within_s = 90
nodes = [1, 2]
faults = [{ kind = "kill", step = 6, rank = 1 }]
[[test]]
kind = "fault"
name = "hung"
parallelism.dp_shard = 2
checkpoint_every = 4
recover_within_s = 60
faults = [{ kind = "hang", step = 6, rank = 1 }]
"""


def made(job: Job, folder) -> RunRecord:
    """The record of a run, with the job.json that its ranks were told."""
    payload = job_payload(job, folder, data=folder, seed_checkpoint=None, device="cpu")
    write_json(folder / "job.json", {"schema": 1, **payload})
    record = RunRecord(job.name, job.identity, folder, RunStatus.FINISHED, 1.0, ())
    write_json(
        folder / "record.json",
        {
            "schema": 1,
            "name": job.name,
            "identity": job.identity,
            "status": record.status.value,
            "wall_s": record.wall_s,
            "argv": [],
            "error": None,
        },
    )
    return record


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """An experiment file, with the report folder ``out`` of its finished runs beside it."""
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    path, out = tmp_path / "e.toml", tmp_path / "out"
    path.write_text(EXPERIMENT)
    plan = load_plan(path, (), on_gpu=False, find=assume_toolchain)
    records = []
    for index, job in enumerate(plan.jobs):
        folder = tmp_path / "runs" / str(index)
        folder.mkdir(parents=True)
        records.append(made(job, folder))
    out.mkdir()
    save_matrix(out, SavedMatrix(plan, tuple(records), {}, None), (), on_gpu=False)
    return path


def again(experiment) -> SavedMatrix:
    return load_matrix(experiment.parent / "out")


def test_runs_of_every_kind_are_found_again(experiment):
    matrix = again(experiment)
    assert [record.name for record in matrix.records] == [job.name for job in matrix.plan.jobs]


def test_runs_of_a_cluster_are_found_again_without_the_user_s_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    path, out, mine = tmp_path / "e.toml", tmp_path / "out", tmp_path / "mine.toml"
    head = EXPERIMENT.partition("[[test]]")[0]
    path.write_text(head.replace("schema = 1", 'schema = 1\nlauncher = "slurm"') + SLURM)
    mine.write_text(
        'schema = 1\nranks_per_node = 8\nhardware = "H100"\ncheckpoint_every = 4\n'
        'environment = { NCCL_DEBUG = "INFO" }\nprologue = ["true"]\n'
    )
    plan = load_plan(path, (), on_gpu=False, cluster=mine, find=assume_toolchain)
    records = []
    for index, job in enumerate(plan.jobs):
        folder = tmp_path / "runs" / str(index)
        folder.mkdir(parents=True)
        records.append(made(job, folder))
    out.mkdir()
    save_matrix(out, SavedMatrix(plan, tuple(records), {}, None), (), on_gpu=False)
    mine.unlink()
    again = load_matrix(out).plan
    assert again.experiment.cluster == plan.experiment.cluster
    assert [job.identity for job in again.jobs] == [job.identity for job in plan.jobs]
    assert all(job.spec.resumes for job in again.jobs if job.role is not Role.SEED)


SLURM = """
[[test]]
name = "tp"
parallelism = { dp_shard = 2, tp = 2 }
[cluster]
max_jobs = 2
[matrix]
name = "pp"
parallelism = { dp_shard = [2], pp = [2] }
"""


def test_another_time_to_recover_is_judged_anew(experiment):
    experiment.write_text(EXPERIMENT.replace("recover_within_s = 90", "recover_within_s = 30"))
    (killed,) = (job for job in again(experiment).plan.jobs if job.name == "killed")
    assert killed.spec.recovery.within_s == 30


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('restarts = "torchrun"', 'restarts = "harness"', "killed"),
        ("max_restarts = 2", "max_restarts = 3", "killed"),
        ("nodes = [1, 2]", "nodes = [2, 2]", "killed"),
        ("step = 6, rank = 1 }]\n[[test]]", "step = 7, rank = 1 }]\n[[test]]", "killed"),
        ("recover_within_s = 60", "recover_within_s = 30", "hung"),
        ("until = 4", "until = 5", "resized"),
    ],
)
def test_runs_of_another_script_are_not_taken_for_it(experiment, old, new, name):
    experiment.write_text(EXPERIMENT.replace(old, new))
    with pytest.raises(StoreError, match=f"'{name}' was run with other settings"):
        again(experiment)
