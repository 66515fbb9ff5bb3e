"""Real ranks under Slurm: two nodes of two, a failing rank, a cancelled job, a lost node."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launch_jobs import ROOT

from converge_harness.launch.scheduler.backend import Phase, ScriptRequest, SubmitRequest
from converge_harness.launch.scheduler.submission import job_name
from converge_harness.launch.slurm.batch_script import batch_script
from converge_harness.launch.slurm.commands import Slurm
from converge_harness.model import (
    Cluster,
    Fault,
    FaultKind,
    Parallelism,
    Recovery,
    RestartOwner,
    Segment,
)
from converge_harness.trainers import job_payload
from converge_harness.trainers.failure import rank_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CLUSTER = Cluster(
    ranks_per_node=2,
    device="cpu",
    gres="gpu:2",
    cpus_per_rank=2,
    time="5",
    environment={
        "CONVERGE_HEAD_NODE": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'launch'}",
    },
)


@pytest.fixture
def submitted(slurm, tiny, tmp_path):
    """Gives a tiny job of four ranks to Slurm: the backend, its id and its run folder."""
    backend = Slurm(slurm.environment)
    ids = []

    def submit(name, rank_module="tiny_rank", recovery=None, segments=(), make=tiny, **values):
        job = make(name, ranks=4, **values)
        job = replace(job, spec=replace(job.spec, recovery=recovery, segments=segments))
        folder = tmp_path / f"run {name}"
        folder.mkdir()
        payload = job_payload(job, folder, data=None, seed_checkpoint=None, device="cpu")
        (folder / "job.json").write_text(json.dumps(payload))
        script = folder / "job.sh"
        script.write_text(
            batch_script(
                ScriptRequest(job, folder, CLUSTER, experiment="tiny.toml", rank_module=rank_module)
            )
        )
        ids.append(backend.submit(SubmitRequest(script, job_name(job))))
        return backend, ids[-1], folder

    yield submit
    backend.cancel(ids)
    slurm.wait_until_idle()


def follow(backend, job_id, until, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not until(state := backend.poll([job_id])[job_id]):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def ended(state):
    return state.phase is Phase.ENDED


def steps(folder):
    files = [folder / "metrics.jsonl.part", folder / "metrics.jsonl"]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [json.loads(line)["step"] for line in lines if '"step"' in line.partition(",")[0]]


def processes_of(folder):
    """Ids of processes that were told of a run folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait(until, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_nodes_train_together(submitted):
    backend, job_id, folder = submitted("fine", steps=3)
    state = follow(backend, job_id, ended)
    log = (folder / "slurm.log").read_text()
    assert (state.word, state.exit_code, state.nodes) == ("COMPLETED", 0, "node[1-2]"), log
    assert steps(folder) == [1, 2, 3]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "call-01",
        "call-01.node-1",
    ]
    said = json.loads((folder / "ended.json").read_text())
    assert said == {"schema": 1, "returncode": 0, "restart": 0}
    facts = json.loads((folder / "surroundings.json").read_text())["env"]
    assert (facts["WORLD_SIZE"], facts["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert facts["OMP_NUM_THREADS"] == "1"


def test_failing_rank_ends_both_nodes_and_has_the_word(submitted):
    backend, job_id, folder = submitted("broken", mode="crash", at=2)
    state = follow(backend, job_id, ended)
    assert state.word == "FAILED"
    assert state.exit_code in (1, 143)  # of either agent: srun gives the highest
    error = rank_error(*sorted((folder / "logs").iterdir()))
    assert error.rank == 3
    assert "a tiny rank was told to crash" in error.message
    assert json.loads((folder / "ended.json").read_text())["returncode"] == state.exit_code
    wait(lambda: not processes_of(folder))


def test_cancelled_job_leaves_no_rank(submitted):
    backend, job_id, folder = submitted("cancelled", steps=10_000, seconds=0.1)
    wait(lambda: steps(folder))
    assert len(processes_of(folder)) >= 6  # two agents, four ranks
    backend.cancel([job_id])
    assert follow(backend, job_id, ended).word == "CANCELLED"
    wait(lambda: not processes_of(folder))


def test_job_that_has_lost_a_node_starts_over(slurm, submitted, warm_tiny):
    backend, job_id, folder = submitted("lost", make=warm_tiny, steps=30, seconds=0.2)
    wait(lambda: len(steps(folder)) >= 2)
    slurm.down("node2")
    state = follow(backend, job_id, ended)
    assert (state.word, state.restarts) == ("COMPLETED", 1)
    assert steps(folder) == list(range(1, 31))
    assert {path.name for path in (folder / "logs").iterdir()} == {
        *("call-01", "call-01.node-1", "call-02", "call-02.node-1")
    }
    assert json.loads((folder / "ended.json").read_text())["restart"] == 1


def loaded(folder):
    """Of every pass: the step that it was started from, and its last."""
    passes = sorted((folder / "passes").iterdir())
    files = [next(path.glob("metrics.jsonl*")) for path in passes]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [
        tuple([line["step"] for line in of_pass if "step" in line][index] for index in (0, -1))
        for of_pass in lines
    ]


def test_segments_of_an_elastic_job_have_as_many_nodes_as_they_need(submitted, warm_tiny):
    segments = tuple(
        Segment(until, Parallelism(dp_shard=ranks), 1) for until, ranks in ((2, 4), (4, 1), (6, 4))
    )
    backend, job_id, folder = submitted(
        "elastic", "tiny_passes", segments=segments, make=warm_tiny, steps=6
    )
    state = follow(backend, job_id, ended, timeout_s=240)
    assert state.word == "COMPLETED", (folder / "slurm.log").read_text()
    assert loaded(folder) == [(0, 2), (2, 4), (4, 6)]
    assert {path.name for path in (folder / "logs").iterdir()} == {
        *("call-01", "call-01.node-1", "call-02", "call-03", "call-03.node-1")
    }


def test_torchrun_restarts_the_ranks_of_all_nodes_where_one_is_killed(submitted, warm_tiny):
    recovery = Recovery(
        (Fault(FaultKind.KILL, 4, rank=3),), checkpoint_every=2, restarts=RestartOwner.TORCHRUN
    )
    backend, job_id, folder = submitted(
        "killed", "tiny_passes", recovery=recovery, make=warm_tiny, steps=5
    )
    state = follow(backend, job_id, ended, timeout_s=240)
    assert (state.word, state.restarts) == ("COMPLETED", 0), (folder / "slurm.log").read_text()
    assert loaded(folder) == [(0, 3), (2, 5)]
