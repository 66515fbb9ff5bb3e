"""Slurm as a backend, asked of real daemons: what it is told, and what it makes of the answers."""

import os
import time
from dataclasses import replace

import pytest
from launch_jobs import tiny_job
from slurm_daemons import slurm_daemons

from converge_harness.errors import ClusterError
from converge_harness.launch.scheduler.backend import (
    NeverStarts,
    Phase,
    Refused,
    ScriptRequest,
    SubmitRequest,
)
from converge_harness.launch.slurm import commands as slurm_backend
from converge_harness.launch.slurm.batch_script import batch_script
from converge_harness.launch.slurm.commands import Slurm, phase_of, read_sacct
from converge_harness.model import Cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def backend(slurm):
    """Slurm, whose jobs are over when the test is."""
    made = Slurm(slurm.environment)
    yield made
    ids = slurm.ask("squeue", "--me", "--noheader", "--Format=JobID:24").split()
    made.cancel(ids)
    follow(made, ids, lambda state: state.phase in (Phase.ENDED, Phase.UNKNOWN))
    slurm.wait_until_idle()


def request(folder, command="true", *options, name="job", **values):
    """A batch script that asks for what the options say."""
    script = folder / f"{name}.sh"
    lines = "\n".join(f"#SBATCH {option}" for option in (f"--job-name={name}", *options))
    script.write_text(
        f"#!/bin/bash\n{lines}\n#SBATCH --output={folder}/{name}.log\n"
        f"#SBATCH --kill-on-invalid-dep=yes\n{command}\n"
    )
    return SubmitRequest(script, name, **values)


def follow(backend, ids, until, timeout_s=100):
    """The states of jobs once all are so."""
    deadline = time.monotonic() + timeout_s
    while True:
        states = backend.poll(ids)
        if all(until(state) for state in states.values()):
            return states
        assert time.monotonic() < deadline, states
        time.sleep(0.1)


def ended(state):
    return state.phase is Phase.ENDED


# -------------------------------------------------------------- how jobs end


@pytest.fixture(scope="module")
def over_time(slurm_installed, tmp_path_factory):
    """A cluster, and a job there that runs into its time limit: the shortest is a minute."""
    with slurm_daemons(nodes=1) as cluster:
        backend = Slurm(cluster.environment)
        asked = request(tmp_path_factory.mktemp("long"), "sleep 600", "--time=1")
        yield backend, backend.submit(asked)


@pytest.mark.parametrize(
    ("command", "word", "exit_code"),
    [("true", "COMPLETED", 0), ("exit 7", "FAILED", 7), ("kill -9 $$", "FAILED", None)],
)
def test_job_ends_as_its_script_did(over_time, backend, tmp_path, command, word, exit_code):
    job_id = backend.submit(request(tmp_path, command))
    state = follow(backend, [job_id], ended)[job_id]
    assert (state.word, state.exit_code, state.restarts) == (word, exit_code, 0)
    assert (state.nodes, state.name) in (("node1", "job"), ("node2", "job"))
    assert state.ran_s is not None


def test_cancelled_jobs_end_whether_they_run_or_wait(backend, tmp_path):
    running = backend.submit(request(tmp_path, "sleep 600", name="a"))
    waiting = backend.submit(request(tmp_path, "true", name="b", after_any=(running,)))
    states = follow(backend, [running, waiting], lambda state: state.reason or state.nodes)
    assert states[waiting].phase is Phase.PENDING
    assert not states[waiting].never
    backend.cancel([running, waiting, "999999"])
    states = follow(backend, [running, waiting], ended)
    assert {state.word for state in states.values()} == {"CANCELLED"}
    assert {state.exit_code for state in states.values()} == {None}


def test_job_whose_node_fails_is_not_over_but_comes_back(slurm, backend, tmp_path):
    asked = request(tmp_path, 'echo "life $SLURM_RESTART_COUNT"; sleep 600', "--requeue")
    job_id = backend.submit(asked)
    node = follow(backend, [job_id], lambda state: state.phase is Phase.RUNNING)[job_id].nodes
    slurm.down(node)
    seen = set()

    def again(state):
        seen.add(state.phase)
        return state.phase is Phase.RUNNING and state.restarts == 1

    follow(backend, [job_id], again)
    assert Phase.ENDED not in seen


def test_job_that_must_not_come_back_ends_with_its_node(slurm, backend, tmp_path):
    job_id = backend.submit(request(tmp_path, "sleep 600", "--no-requeue"))
    node = follow(backend, [job_id], lambda state: state.phase is Phase.RUNNING)[job_id].nodes
    slurm.down(node)
    state = follow(backend, [job_id], ended)[job_id]
    assert (state.word, state.exit_code) == ("NODE_FAIL", None)


def test_dependent_job_starts_after_the_others(backend, tmp_path):
    first = backend.submit(request(tmp_path, f"echo 1 >> {tmp_path}/order", name="a"))
    failing = backend.submit(request(tmp_path, "exit 1", name="b"))
    asked = request(
        tmp_path, f"echo 2 >> {tmp_path}/order", name="c", after_ok=(first,), after_any=(failing,)
    )
    last = backend.submit(asked)
    assert follow(backend, [last], ended)[last].word == "COMPLETED"
    assert (tmp_path / "order").read_text() == "1\n2\n"


def test_dependent_of_a_job_that_fails_is_never_started(backend, tmp_path):
    failing = backend.submit(request(tmp_path, "exit 1", name="a"))
    dependent = backend.submit(request(tmp_path, "true", name="b", after_ok=(failing,)))
    state = follow(backend, [dependent], ended)[dependent]
    assert (state.word, state.reason) == ("CANCELLED", "DependencyNeverSatisfied")


# ------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--partition=nowhere", "nowhere"),
        ("--gpus-per-node=9", "Requested node configuration is not available"),
        ("--constraint=h100", "Invalid feature"),
        ("--time=soon", "--time"),
    ],
)
def test_impossible_request_is_refused_in_slurms_words(backend, tmp_path, option, told):
    with pytest.raises(Refused, match=told) as error:
        backend.submit(request(tmp_path, "true", option))
    assert not error.value.for_now


@pytest.mark.usefixtures("slurm_installed")
def test_request_that_pends_for_ever_is_not_taken_for_one_that_waits(tmp_path):
    tight = "PartitionName=main Nodes=node1,node2 Default=YES MaxTime=5 MaxNodes=1 State=UP"
    with slurm_daemons(partitions=[tight], settings={"EnforcePartLimits": "NO"}) as cluster:
        backend = Slurm(cluster.environment)
        wide = backend.submit(request(tmp_path, "true", "--nodes=2", name="a"))
        long = backend.submit(request(tmp_path, "true", "--time=60", name="b"))
        held = backend.submit(request(tmp_path, "true", "--hold", name="c"))
        final = ("PartitionN", "PartitionT", "JobHeld")
        states = follow(backend, [wide, long, held], lambda state: state.reason.startswith(final))
        assert (states[wide].reason, states[wide].never) == (
            "PartitionNodeLimit",
            NeverStarts.REQUEST,
        )
        assert (states[long].reason, states[long].never) == (
            "PartitionTimeLimit",
            NeverStarts.REQUEST,
        )
        assert states[held].reason.startswith("JobHeld")
        assert not states[held].never


@pytest.mark.usefixtures("slurm_installed")
def test_job_that_waits_for_nodes_to_come_back_may_yet_start(tmp_path):
    with slurm_daemons(settings={"ReturnToService": 0}) as cluster:
        backend = Slurm(cluster.environment)
        for node in cluster.nodes:
            cluster.down(node)
        job_id = backend.submit(request(tmp_path))
        state = follow(backend, [job_id], lambda state: "node" in state.reason.lower())[job_id]
        assert (state.phase, state.never) == (Phase.PENDING, None)


@pytest.mark.usefixtures("slurm_installed")
def test_job_that_slurm_has_forgotten_is_unknown(tmp_path):
    with slurm_daemons(settings={"MinJobAge": 2}) as cluster:
        backend = Slurm(cluster.environment)
        job_id = backend.submit(request(tmp_path))
        states = follow(backend, [job_id, "4242"], lambda state: state.phase is Phase.UNKNOWN)
        assert set(states) == {job_id, "4242"}
        backend.cancel([job_id])


def test_one_query_tells_of_many_jobs_among_those_of_others(slurm, backend, tmp_path, monkeypatch):
    array = request(tmp_path, "sleep 600", "--array=1-50%2", name="array")
    backend.submit(array)
    ids = [backend.submit(request(tmp_path, "true", name=f"job{n}")) for n in range(20)]
    asked = []
    call = backend._call
    monkeypatch.setattr(backend, "_call", lambda *told: asked.append(told[0][0]) or call(*told))
    states = backend.poll(ids)
    assert asked == ["squeue"]
    assert set(states) == set(ids)
    assert Phase.UNKNOWN not in {state.phase for state in states.values()}


def test_job_that_may_be_there_is_looked_for_by_its_name(backend, tmp_path):
    asked = request(tmp_path, "sleep 600", name="cv-fsdp2-0123456789ab")
    first = backend.submit(replace(asked, perhaps_there=True))
    assert backend.submit(replace(asked, perhaps_there=True)) == first
    assert backend.submit(asked) != first


def test_variables_of_a_user_change_neither_requests_nor_formats(slurm, backend, tmp_path):
    around = {
        "SBATCH_PARTITION": "nowhere",
        "SBATCH_ARRAY_INX": "1-4",
        "SQUEUE_FORMAT": "%u",
        "SQUEUE_STATES": "PENDING",
        "SLURM_JOB_ID": "1",
        "SLURM_MEM_PER_CPU": "1",
        "RANK": "7",
        "CONVERGE_JOB": "/another/job.json",
    }
    told = Slurm({**slurm.environment, **around})
    job_id = told.submit(request(tmp_path, "env"))
    assert follow(told, [job_id], ended)[job_id].word == "COMPLETED"
    found = {line.partition("=")[0] for line in (tmp_path / "job.log").read_text().splitlines()}
    assert not found & {"SLURM_MEM_PER_CPU", "RANK", "CONVERGE_JOB"}


def test_sbatch_takes_a_script_full_of_hostile_text_for_one_job(backend, tmp_path):
    text = "$(touch pwned)\n#SBATCH --array=0-9\n'\""
    cluster = Cluster(
        ranks_per_node=1, device="cpu", srun=(text,), environment={"TEXT": text}, time="1"
    )
    folder = tmp_path / "it's `run` #1"
    folder.mkdir()
    job = tiny_job(text, ranks=1)
    script = folder / "job.sh"
    script.write_text(batch_script(ScriptRequest(job, folder, cluster, experiment=text)))
    job_id = backend.submit(SubmitRequest(script, "hostile"))
    assert follow(backend, [job_id], ended)[job_id].word == "FAILED"  # there is no such program
    assert sorted(path.name for path in folder.iterdir()) == ["ended.json", "job.sh", "slurm.log"]


# ----------------------------------------------------- when Slurm has no answer


def test_controller_that_is_away_is_an_error_that_says_what_to_do(slurm, tmp_path):
    conf = tmp_path / "slurm.conf"
    lines = slurm.conf.read_text().splitlines()
    lines = ["SlurmctldPort=1" if x.startswith("SlurmctldPort=") else x for x in lines]
    conf.write_text("\n".join([*lines, "MessageTimeout=2"]))
    backend = Slurm({**slurm.environment, "SLURM_CONF": str(conf)})
    with pytest.raises(ClusterError, match="scontrol ping"):
        backend.poll(["1"])


def test_missing_slurm_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="--launcher local"):
        Slurm().submit(request(tmp_path))


def test_a_slurm_that_lets_wait_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_backend, "_SLOW_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "squeue").write_text(  # it answers once the waiting has been told
        f"#!/bin/sh\nuntil [ -e {tmp_path}/told ]; do sleep 0.05; done\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    told = []

    def say(message):
        told.append(message)  # of squeue, then perhaps of sacct, which may be slow as well
        (tmp_path / "told").touch()

    Slurm(say=say).poll(["1"])
    assert told[0] == "waiting at most 120 s for Slurm to answer squeue"


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """Has sbatch give an answer that daemons without accounting cannot be brought to give."""

    def answer(complaint, queue="", code=1):
        for program, text in (
            ("sbatch", f"#!/bin/sh\necho '{complaint}' >&2; exit {code}\n"),
            ("squeue", f"#!/bin/sh\necho '{queue}'\n"),
        ):
            (tmp_path / program).write_text(text)
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return Slurm()

    return answer


@pytest.mark.parametrize(
    ("complaint", "for_now"),
    [
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", True),
        ("sbatch: error: AssocMaxSubmitJobLimit", True),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("sbatch: error: QOSMaxNodePerJobLimit: Job violates accounting/QOS policy", False),
        ("sbatch: error: Invalid account or account/partition combination specified", False),
    ],
)
def test_refusal_says_whether_the_job_may_come_later(answering, tmp_path, complaint, for_now):
    with pytest.raises(Refused) as error:
        answering(complaint).submit(request(tmp_path))
    assert error.value.for_now is for_now
    assert str(error.value) == complaint.removeprefix("sbatch: error: ")


@pytest.mark.parametrize(("queue", "for_now"), [("77", True), ("", False)])
def test_a_policy_without_a_name_refuses_for_good_once_no_job_of_ours_is_there(
    answering, tmp_path, queue, for_now
):
    complaint = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    with pytest.raises(Refused) as error:
        answering(complaint, queue=queue).submit(request(tmp_path))
    assert error.value.for_now is for_now


LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


def test_job_whose_answer_was_lost_is_looked_for(answering, tmp_path):
    assert answering(LOST, queue="77").submit(request(tmp_path)) == "77"
    with pytest.raises(Refused) as error:
        answering(LOST).submit(request(tmp_path))
    assert error.value.for_now


def test_job_whose_id_was_not_printed_is_looked_for(answering, tmp_path):
    assert answering("", queue="77", code=0).submit(request(tmp_path)) == "77"
    with pytest.raises(ClusterError, match="the id of job"):
        answering("", code=0).submit(request(tmp_path))


def test_job_whose_sbatch_was_killed_is_looked_for(answering, tmp_path):
    backend = answering("", queue="77")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nkill -KILL $$\n")
    assert backend.submit(request(tmp_path)) == "77"


def test_interrupt_of_the_terminal_does_not_reach_slurms_commands(answering, tmp_path):
    backend = answering("")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nps -o pgid= -p $$\n")
    assert backend.submit(request(tmp_path)) != str(os.getpgid(0))


def test_jobs_are_not_unknown_because_squeue_prints_something_else(answering):
    with pytest.raises(ClusterError, match="squeue should have printed jobs: 'welcome to login1'"):
        answering("", queue="welcome to login1").poll(["1"])
    for empty in ("", "CLUSTER: main"):
        assert answering("", queue=empty).poll(["1"])["1"].phase is Phase.UNKNOWN


# -------------------------------------------------------------- Slurm's words


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.PENDING, "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD"),
        (
            Phase.RUNNING,
            "RUNNING CONFIGURING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED REVOKED",
        ),
        (
            Phase.ENDED,
            "BOOT_FAIL CANCELLED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT",
        ),
    ],
)
def test_every_state_of_slurms_has_its_phase(phase, words):
    assert {phase_of(word) for word in words.split()} == {phase}


def test_accounting_tells_of_jobs_that_squeue_has_forgotten():
    states = read_sacct(
        "12|OUT_OF_MEMORY|0:125|61|node1\n"
        "13|CANCELLED by 1000|0:0|0|None assigned\n"
        "14|FAILED|3:0|7|node[1-2]|cv-a|b\n"
        "15_3|COMPLETED|0:0|7|node1\n"
    )
    assert set(states) == {"12", "13", "14"}
    assert (states["12"].word, states["12"].exit_code) == ("OUT_OF_MEMORY", None)
    assert (states["13"].word, states["13"].reason) == ("CANCELLED", "by 1000")
    assert (states["13"].exit_code, states["13"].nodes) == (None, "")
    assert (states["14"].exit_code, states["14"].ran_s) == (3, 7.0)
    assert (states["14"].name, states["12"].name) == ("cv-a|b", "")


# ------------------------------------------- last, for it began with the first


@pytest.mark.slow
def test_job_at_its_time_limit_is_timed_out(over_time):
    backend, job_id = over_time
    state = follow(backend, [job_id], ended, timeout_s=200)[job_id]
    assert (state.word, state.reason, state.exit_code) == ("TIMEOUT", "TimeLimit", None)
