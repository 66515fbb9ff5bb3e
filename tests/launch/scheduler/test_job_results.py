"""What came of a job, from what Slurm says of it and what lies in its run folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from launch_jobs import tiny_job

from converge_harness.errors import StoreError
from converge_harness.launch.scheduler.backend import JobState, Known, NeverStarts, Phase
from converge_harness.launch.scheduler.follow import follow_from
from converge_harness.launch.scheduler.result import result_of
from converge_harness.launch.scheduler.script_end import read_script_end
from converge_harness.launch.scheduler.submission import (
    Submission,
    read_submission,
    write_submission,
)
from converge_harness.launch.scheduler.submit import Chains, chains_of
from converge_harness.launch.slurm.commands import Slurm, job_end_of
from converge_harness.model import (
    Cluster,
    Experiment,
    Parallelism,
    RankError,
    Role,
    RunRecord,
    RunStatus,
    Segment,
)
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command, RankLauncher

CLUSTER = Cluster(ranks_per_node=8, time="04:00:00")
SUBMITTED = Submission("identity", "cv-job-identity", "2026-11-22T03:00:00+00:00", "7")
UNKNOWN = JobState(Phase.UNKNOWN)
HELD = JobState(Phase.PENDING, reason="JobHoldMaxRequeue", never=NeverStarts.REQUEUES)


def ended(word, **values):
    end = job_end_of(word, values.get("reason", ""))
    return JobState(Phase.ENDED, word, end=end, nodes="node[1-2]", ran_s=60.0, **values)


def known(folder, state, *, job=None, **values):
    submission = replace(SUBMITTED, **values.pop("submission", {}))
    job = job or tiny_job("job", steps=20)
    return Known(job, folder, submission, state, CLUSTER, Slurm({}), **values)


def with_steps(folder, last, *, complete=False):
    lines = [{"kind": "step", "step": step, "loss": 1.0} for step in range(1, last + 1)]
    path = folder / ("metrics.jsonl" if complete else "metrics.jsonl.part")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_end(folder, returncode, restart=0):
    told = {"schema": 1, "returncode": returncode, "restart": restart}
    (folder / "ended.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"returncode": 1}, "lacks restart"),
        ({"returncode": "1", "restart": 0}, "returncode is '1', which is not a count"),
        ({"returncode": 1, "restart": 0, "ran_s": "7"}, "ran_s is '7', which is not a time"),
    ],
)
def test_a_damaged_end_of_a_script_is_named(tmp_path, told, words):
    (tmp_path / "ended.json").write_text(json.dumps({"schema": 1, **told}))
    with pytest.raises(StoreError, match=rf"ended\.json: is damaged: {words}"):
        read_script_end(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 1, "returncode": 1}'])
def test_a_damaged_end_leaves_it_to_slurm_how_a_job_ended(tmp_path, content):
    with_steps(tmp_path, 20, complete=True)
    (tmp_path / "ended.json").write_text(content)
    over = ended("COMPLETED", exit_code=0)
    assert result_of(known(tmp_path, over)).status is RunStatus.FINISHED
    unknown = result_of(known(tmp_path, UNKNOWN))
    assert unknown.status is RunStatus.CRASHED
    assert "unknown how it ended, after step 20 of 20: " in unknown.error.message
    assert "ended.json: is damaged: " in unknown.error.message


def with_error(logs, rank, message):
    logs.mkdir(parents=True)
    error = logs / "error.json"
    error.write_text(json.dumps({"message": {"message": message, "extraInfo": {}}}))
    failure = {"rank": rank, "exitcode": 1, "error_file": str(error)}
    (logs / "failures.json").write_text(json.dumps({"failures": [failure]}))


@pytest.mark.parametrize("state", [JobState(Phase.PENDING), JobState(Phase.RUNNING)])
def test_a_job_in_the_queue_has_no_record(tmp_path, state):
    assert result_of(known(tmp_path, state)) is None


@pytest.mark.parametrize(
    ("state", "status", "message"),
    [
        (
            ended("TIMEOUT", reason="TimeLimit"),
            RunStatus.TIMED_OUT,
            "reached its time limit of 04:00:00 ([cluster] time) after step 5 of 20",
        ),
        (
            ended("NODE_FAIL", reason="NodeDown"),
            RunStatus.CRASHED,
            "Slurm: NODE_FAIL (NodeDown) on node[1-2], after step 5 of 20",
        ),
        (
            ended("OUT_OF_MEMORY", exit_code=125),
            RunStatus.CRASHED,
            "Slurm: OUT_OF_MEMORY on node[1-2], after step 5 of 20",
        ),
        (
            ended("PREEMPTED"),
            RunStatus.CRASHED,
            "Slurm: PREEMPTED on node[1-2], after step 5 of 20",
        ),
        (
            ended("CANCELLED", reason="by 1000"),
            RunStatus.CANCELLED,
            "cancelled by 1000 (a user's number), after step 5 of 20",
        ),
        (
            UNKNOWN,
            RunStatus.CRASHED,
            "Slurm no longer knows job 7, and its end was not recorded (after step 5 of 20)",
        ),
        (
            JobState(Phase.PENDING, reason="PartitionNodeLimit", never=NeverStarts.REQUEST),
            RunStatus.REFUSED,
            "Slurm will never start it: PartitionNodeLimit; see {folder}/job.sh",
        ),
        (
            replace(HELD, restarts=6),
            RunStatus.REFUSED,
            (
                "was requeued 6 times, more often than the cluster allows (JobHoldMaxRequeue): "
                "find out why (see {folder}/slurm.log), and submit it again"
            ),
        ),
        (
            replace(HELD, reason="launch failed requeued held", never=NeverStarts.LAUNCH),
            RunStatus.REFUSED,
            (
                "Slurm could not launch it on a node, requeued it and holds it (launch failed "
                "requeued held): find out why (the log of slurmd on the node), and submit it again"
            ),
        ),
        (
            HELD,
            RunStatus.REFUSED,
            (
                "was requeued more often than the cluster allows (JobHoldMaxRequeue): find out why "
                "(see {folder}/slurm.log), and submit it again"
            ),
        ),
    ],
)
def test_slurms_words_become_ours(tmp_path, state, status, message):
    with_steps(tmp_path, 5)
    record = result_of(known(tmp_path, state))
    assert record.status is status
    assert (record.error.rank, record.error.message) == (None, message.format(folder=tmp_path))


@pytest.mark.parametrize("state", [ended("COMPLETED", exit_code=0), UNKNOWN])
def test_finished_is_what_ended_well_and_left_all_its_evidence(tmp_path, state):
    with_end(tmp_path, 0)
    with_steps(tmp_path, 20)
    record = result_of(known(tmp_path, state))
    assert record.status is RunStatus.CRASHED
    assert "training is not complete (after step 20 of 20)" in record.error.message
    with_steps(tmp_path, 20, complete=True)
    assert result_of(known(tmp_path, state)).status is RunStatus.FINISHED


def test_the_end_of_an_earlier_start_says_nothing(tmp_path):
    with_end(tmp_path, 0, restart=0)
    with_steps(tmp_path, 20, complete=True)
    record = result_of(known(tmp_path, ended("FAILED", restarts=1)))
    assert record.status is RunStatus.CRASHED


def test_the_words_are_those_of_the_rank_that_failed_in_the_newest_call(tmp_path):
    with_error(tmp_path / "logs" / "call-01", 0, "ValueError: of an earlier life")
    with_error(tmp_path / "logs" / "call-02.node-1", 3, "ValueError: of the last life")
    (tmp_path / "logs" / "call-02").mkdir()
    record = result_of(known(tmp_path, ended("FAILED", exit_code=1, restarts=1)))
    assert (record.error.rank, record.error.message) == (3, "ValueError: of the last life")


def test_a_failing_segment_is_named(tmp_path):
    job = tiny_job("job", steps=20)
    segments = tuple(Segment(until, Parallelism(dp_shard=2), 1) for until in (10, 20))
    job = replace(job, spec=replace(job.spec, segments=segments))
    with_error(tmp_path / "logs" / "call-02", 1, "ValueError: no")
    record = result_of(known(tmp_path, ended("FAILED", exit_code=1), job=job))
    assert record.error.message == "segment 2 (steps 11 to 20): ValueError: no"


def test_a_script_that_dies_before_its_ranks_tells_why(tmp_path):
    (tmp_path / "slurm.log").write_text(
        "bash: module: unknown cuda/99\nsrun: error: node1: task 0: Exited with exit code 1\n"
    )
    record = result_of(known(tmp_path, ended("FAILED", exit_code=1)))
    assert (record.error.rank, record.error.message) == (None, "bash: module: unknown cuda/99")


@pytest.mark.parametrize(
    "state",
    [
        JobState(Phase.PENDING, reason="DependencyNeverSatisfied", never=NeverStarts.NEEDED),
        ended("CANCELLED", reason="DependencyNeverSatisfied"),
    ],
)
@pytest.mark.parametrize(
    ("seed", "status"),
    [(RunStatus.CRASHED, RunStatus.SKIPPED), (RunStatus.FINISHED, RunStatus.CANCELLED)],
)
def test_what_needs_a_failed_seed_is_skipped(tmp_path, state, seed, status):
    needed = RunRecord("seed", "s", tmp_path, seed, 1.0, (), RankError(0, "no"))
    job = tiny_job("job", role=Role.TEST, needs="s")
    assert result_of(known(tmp_path, state, job=job, needed=needed)).status is status


def test_what_converge_has_cancelled_says_so(tmp_path):
    why = {"cancelled": "cancelled by converge cancel (me on login1)"}
    record = result_of(known(tmp_path, ended("CANCELLED"), submission=why))
    assert record.status is RunStatus.CANCELLED
    assert record.error.message.startswith("cancelled by converge cancel (me on login1), before")
    stuck = {"cancelled": "no step finished for 300 s", "hung": True}
    assert result_of(known(tmp_path, ended("CANCELLED"), submission=stuck)).status is RunStatus.HUNG


def test_a_submission_is_read_as_it_was_written(tmp_path):
    assert read_submission(tmp_path) is None
    submission = replace(SUBMITTED, after_ok=("1",), after_any=("2", "3"), hung=True, uid=1000)
    write_submission(tmp_path, submission)
    assert read_submission(tmp_path) == submission


# --------------------------------------------------------- programs of a user's


def program_job(**command):
    job = tiny_job("job", steps=20)
    made = Command(("train.py",), Path("/mine"), **command)
    return replace(job, spec=replace(job.spec, trainer=trained_by(made)))


CURVES = {"probed": False, "curves": "{output}/loss.csv", "launcher": RankLauncher.NONE}


def test_a_program_that_ends_without_its_curve_is_told_where_it_belongs(tmp_path):
    job = program_job(**CURVES)
    state = ended("COMPLETED", exit_code=0)
    record = result_of(known(tmp_path, state, job=job))
    assert record.error.message == (
        f"the program ended with 0, but there is no {tmp_path}/output/loss.csv: it has to write "
        "its curve there (trainer.curves)"
    )
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "loss.csv").touch()
    assert result_of(known(tmp_path, state, job=job)).status is RunStatus.FINISHED


def test_a_program_that_runs_into_its_limit_shows_what_it_printed(tmp_path):
    logs = tmp_path / "logs" / "call-01"
    logs.mkdir(parents=True)
    (logs / "program.log").write_text("epoch 3\n")
    record = result_of(known(tmp_path, ended("TIMEOUT"), job=program_job(**CURVES)))
    assert record.error.message == (
        "reached its time limit of 04:00:00 ([cluster] time) while the program ran"
    )
    assert record.error.traceback == "epoch 3"
    probed = result_of(known(tmp_path, ended("TIMEOUT"), job=program_job()))
    assert probed.error.message.endswith("before its first step was finished")


def test_a_program_that_cannot_be_started_has_the_words_of_bash(tmp_path):
    (tmp_path / "slurm.log").write_text(
        "/spool/slurm_script: line 44: cd: /mine: No such file or directory\n"
        "srun: error: node1: task 0: Exited with exit code 1\n"
    )
    for job in (program_job(), program_job(**CURVES)):
        record = result_of(known(tmp_path, ended("FAILED", exit_code=1), job=job))
        assert record.error.message == (
            "the program ended with exit code 1; last output: /spool/slurm_script: line 44: cd: "
            "/mine: No such file or directory"
        )


def test_a_program_hangs_once_neither_its_curve_nor_its_output_grows(tmp_path):
    followed = follow_from(program_job(**CURVES), tmp_path, SUBMITTED)
    followed.state = JobState(Phase.RUNNING, "RUNNING", ran_s=1.0)
    followed.note_start(followed.state, 0)
    limits = {"controls": (), "tests": (), "startup_timeout_s": 0.0}
    experiment = Experiment(name="x", path=Path("x.toml"), **limits)
    assert "there is no " in followed.overdue(experiment)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "loss.csv").write_text("step,loss\n")
    followed.note_start(followed.state, 1)
    assert followed.overdue(experiment) == ""  # it has as long again after every start
    hasty = replace(experiment, progress_timeout_s=0.0)
    assert "neither its curve nor its ranks' output grew for 0 s" in followed.overdue(hasty)


# --------------------------------------------------------------------- chains


def test_every_job_of_a_chain_waits_for_the_one_before():
    chains = Chains(2)
    waited = []
    for job_id in "abcde":
        waited.append(chains.waits_for())
        chains.add(job_id)
    assert waited == [(), (), ("a",), ("b",), ("c",)]
    chains.is_over("d")
    assert chains.waits_for() == ()
    assert Chains(None).waits_for() == ()


def test_chains_go_on_where_another_harness_left_them():
    first = replace(SUBMITTED, job_id="a", submitted="1")
    second = replace(SUBMITTED, job_id="b", submitted="2")
    third = replace(SUBMITTED, job_id="c", submitted="3", after_any=("a",))
    assert chains_of(2, [third, first, second]).waits_for() == ("b",)
    assert chains_of(1, [third, first, second]).waits_for() == ("b", "c")
    assert chains_of(3, [third, first, second]).waits_for() == ()
