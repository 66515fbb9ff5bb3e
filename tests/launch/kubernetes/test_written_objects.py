"""Objects in files as a scheduler: what is written where, and what is known of jobs from files."""

import json
from dataclasses import replace

import pytest
from batch_jobs import job
from test_pod_script import ON_CPUS, PLAIN

from converge_harness.launch.kubernetes.objects import job_set, object_name, object_text
from converge_harness.launch.kubernetes.written import RUNS, SEEDS, WrittenObjects
from converge_harness.launch.scheduler.backend import (
    JobState,
    Known,
    Phase,
    ScriptRequest,
    SubmitRequest,
)
from converge_harness.launch.scheduler.result import result_of
from converge_harness.launch.scheduler.submission import Submission, write_submission
from converge_harness.model import Role, RunStatus
from converge_harness.store import Store

SEED = job("seed", ranks=1, role=Role.SEED)
RUN = replace(job("fsdp2", ranks=2), identity="f" * 64)


@pytest.fixture
def written(tmp_path):
    """Two jobs with their objects, in the folder ``o``."""
    store = Store(tmp_path / "store")
    backend = WrittenObjects(store, tmp_path / "o")
    cluster = replace(ON_CPUS, kubernetes=replace(PLAIN, mount=tmp_path))
    for each in (SEED, RUN):
        folder = store.run_folder(each.name, each.identity)
        folder.mkdir(parents=True)
        made = job_set(ScriptRequest(each, folder, cluster, experiment="x"))
        (folder / "jobset.json").write_text(object_text(made))
        (folder / "job.sh").touch()
        (folder / "inductor").mkdir()
        name = backend.submit(SubmitRequest(folder / "job.sh", "its name in Slurm"))
        assert name == object_name(each)
        assert not (folder / "inductor").exists()
    return backend


def folder_of(backend):
    return backend.store.run_folder(RUN.name, RUN.identity)


def state(backend):
    return backend.poll([object_name(RUN)])[object_name(RUN)]


def end(backend, code, **more):
    said = {"schema": 1, "returncode": code, "restart": 0, **more}
    (folder_of(backend) / "ended.json").write_text(json.dumps(said))


def test_seed_checkpoints_are_in_a_folder_before_the_others(written):
    found = {when: [path.stem for path in written.objects_in(when)] for when in (SEEDS, RUNS)}
    assert found == {SEEDS: [object_name(SEED)], RUNS: [object_name(RUN)]}
    assert SEEDS < RUNS


def test_a_job_is_known_by_what_its_first_pod_wrote(written):
    assert state(written) == JobState(Phase.PENDING)
    (folder_of(written) / "logs" / "call-01").mkdir(parents=True)
    assert state(written) == JobState(Phase.RUNNING)
    end(written, 3, ran_s=7)
    assert state(written) == JobState(Phase.ENDED, exit_code=3, ran_s=7.0)


def test_a_job_that_continues_waits_until_it_has_logs_of_its_own(written):
    name = object_name(RUN)
    write_submission(folder_of(written), Submission(RUN.identity, name, "", continues_after=1))
    (folder_of(written) / "logs" / "call-01").mkdir(parents=True)
    assert state(written).phase is Phase.PENDING
    (folder_of(written) / "logs" / "call-02").mkdir()
    assert state(written).phase is Phase.RUNNING


def test_a_job_that_may_not_start_any_more_is_unknown(written):
    written.cancel([object_name(RUN)])
    assert state(written) == JobState(Phase.UNKNOWN)
    assert written.poll(["cv-gone-0123"]) == {"cv-gone-0123": JobState(Phase.UNKNOWN)}


@pytest.mark.parametrize(
    ("cancelled", "status", "message"),
    [
        ("by me", RunStatus.CANCELLED, "by me, before its first step was finished"),
        ("", RunStatus.CRASHED, "ended by SIGTERM (deleted, evicted, time limit, or another pod"),
    ],
)
@pytest.mark.parametrize("said", ["", "SignalException: Process 7 got signal: 15\n"])
def test_pods_that_were_ended_are_no_crash_of_ranks(written, cancelled, status, message, said):
    name = object_name(RUN)
    submission = Submission(RUN.identity, name, "", job_id=name, cancelled=cancelled)
    write_submission(folder_of(written), submission)
    logs = folder_of(written) / "logs" / "call-01"
    logs.mkdir(parents=True)
    (logs / "torchrun.log").write_text(said)
    end(written, 143)
    known = Known(RUN, folder_of(written), submission, state(written), ON_CPUS, written)
    record = result_of(known)
    assert record.status is status
    assert message in record.error.message


def failed(written):
    submission = Submission(RUN.identity, "", "", job_id=object_name(RUN))
    known = Known(RUN, folder_of(written), submission, state(written), ON_CPUS, written)
    return result_of(known).error


def test_a_rank_that_failed_before_pods_were_ended_is_the_error(written):
    logs = folder_of(written) / "logs" / "call-01"
    logs.mkdir(parents=True)
    failure = {"rank": 1, "exitcode": -9, "error_file": "none", "timestamp": 1}
    (logs / "failures.json").write_text(json.dumps({"failures": [failure]}))
    end(written, 143)
    error = failed(written)
    assert (error.rank, error.message) == (1, "killed by SIGKILL")


def test_a_failure_before_the_ranks_says_where_its_words_are(written):
    end(written, 2)
    message = failed(written).message
    assert "failed with exit code 2 before its ranks started: see kubectl logs" in message
    assert message.endswith(f"-l jobset.sigs.k8s.io/jobset-name={object_name(RUN)}")


def test_a_job_whose_script_is_gone_has_no_known_end(written):
    written.cancel([object_name(RUN)])
    assert "is gone, and its end was not recorded" in failed(written).message


def test_a_run_that_continues_forgets_which_pods_had_started(written):
    (folder_of(written) / "started" / "call-02.pod-0").mkdir(parents=True)
    end(written, 1)
    written.store.continue_run(folder_of(written))
    assert not (folder_of(written) / "started").exists()
    assert not (folder_of(written) / "ended.json").exists()


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 1, "returncode": "x"}', "no JSON"])
def test_a_damaged_end_is_a_crash_of_that_job_alone(written, content):
    seed = written.store.run_folder(SEED.name, SEED.identity)
    (seed / "ended.json").write_text('{"schema": 1, "returncode": 0, "restart": 0}')
    (folder_of(written) / "ended.json").write_text(content)
    states = written.poll([object_name(SEED), object_name(RUN)])
    assert states[object_name(SEED)] == JobState(Phase.ENDED, exit_code=0)
    error = failed(written)
    assert "ended.json: is damaged: " in error.message
    assert "run or submit the experiment again" in error.message
    assert "is gone" not in error.message


def test_only_objects_of_jobs_that_are_not_over_stay(written):
    other = written.objects / RUNS / "mine.json"
    other.touch()
    written.tidy()
    assert len(written.objects_in(RUNS)) == 1
    (folder_of(written) / "record.json").touch()
    written.tidy()
    assert (written.objects_in(RUNS), len(written.objects_in(SEEDS))) == ((), 1)
    assert other.exists()
