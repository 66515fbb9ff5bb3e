"""Accidents between a harness, its store and a real Slurm lose, double and forget no job."""

import json
import os
import time
from dataclasses import replace

import pytest
from cluster_jobs import light_job, light_toolchain, queue, site_of
from launch_jobs import plan_of

from converge_harness import launch
from converge_harness.errors import ClusterError, StoreError
from converge_harness.launch.interruption import interruptible
from converge_harness.launch.scheduler import submit
from converge_harness.launch.scheduler.backend import Refused
from converge_harness.launch.scheduler.detached import cancel, collect, status, submit_plan
from converge_harness.launch.scheduler.follow import follow_plan
from converge_harness.launch.scheduler.submission import read_submission, write_submission
from converge_harness.launch.scheduler.submit import prepare_plan
from converge_harness.launch.slurm.commands import Slurm, unknown_job
from converge_harness.model import Role, RunStatus

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def light(tmp_path):
    toolchain = light_toolchain(tmp_path)
    return lambda name, **values: light_job(toolchain, name, **values)


@pytest.fixture
def site(slurm, tmp_path):
    def make(backend=Slurm, **values):
        made = site_of(tmp_path / "a store", slurm.environment, **values)
        return replace(made, backend=backend(made.backend._environment))

    yield make
    slurm.ask("scancel", "--user=root", "--quiet")
    slurm.wait_until_idle()


def quiet(event):
    pass


def folder_of(site):
    (folder,) = (site.store.root / "runs").iterdir()
    return folder


def await_empty(slurm):
    while queue(slurm):
        time.sleep(0.1)


def rewrite(folder, **values):
    write_submission(folder, replace(read_submission(folder), **values))


# ------------------------------------------------------------------ identities


def test_an_id_that_slurm_has_given_to_another_job_is_not_ours(light, site, slurm, tmp_path):
    place, job = site(), light("old", mode="hang")
    submit_plan(plan_of(job), place, quiet)
    theirs = slurm.ask("sbatch", "--parsable", "--job-name=theirs", "--wrap", "sleep 600").strip()
    slurm.ask("scancel", read_submission(folder_of(place)).job_id)
    rewrite(folder_of(place), job_id=theirs)
    (row,) = status(plan_of(job), place)
    assert row.state == "crashed"
    done = cancel(plan_of(job), place, quiet, wanted=lambda job: True, why="no")
    assert not done.cancelled
    assert ("theirs", "PENDING") in queue(slurm) or ("theirs", "RUNNING") in queue(slurm)


def test_a_submission_of_another_identity_is_nobodys(light, site):
    place, job = site(), light("one")
    submit_plan(plan_of(job), place, quiet)
    rewrite(folder_of(place), identity="f" * 64)
    assert status(plan_of(job), place)[0].state == "not submitted"


def test_jobs_of_another_user_are_not_given_up_for_dead(light, site, slurm):
    place, job = site(), light("slow", mode="hang")
    submit_plan(plan_of(job), place, quiet)
    assert read_submission(folder_of(place)).uid == os.getuid()
    rewrite(folder_of(place), uid=os.getuid() + 1)
    assert status(plan_of(job), place)[0].state in ("pending", "running")  # Slurm shows it
    rewrite(folder_of(place), job_id="4242")
    with pytest.raises(ClusterError, match="slow: submitted by user number"):
        collect(plan_of(job), place, quiet)


def test_status_says_nothing_of_damaged_folders_of_other_plans(light, site):
    place = site()
    submit_plan(plan_of(light("one", seconds=0.0)), place, quiet)
    (folder_of(place) / "submission.json").write_text("{")
    (row,) = status(plan_of(light("two")), place)
    assert (row.state, row.reason) == ("not submitted", "")


# ------------------------------------------------------------- answers that are lost


class Lossy(Slurm):
    """A Slurm that takes jobs, and whose first answer to sbatch is lost."""

    lost = None
    error = ClusterError("sbatch cannot reach Slurm")

    def submit(self, request):
        job_id = super().submit(request)
        if self.lost is None:
            self.lost = job_id
            self.answered(job_id)
            raise self.error
        return job_id

    def answered(self, job_id):
        pass


class LossyUntilOver(Lossy):
    """Its job is over before anybody asks again."""

    error = Refused("socket timed out", for_now=True)

    def answered(self, job_id):
        while self.poll([job_id])[job_id].phase != "ended":
            pass


@pytest.mark.parametrize("kind", [Lossy, LossyUntilOver])
def test_a_job_whose_answer_is_lost_runs_once(light, site, kind):
    events, place = [], site(kind)
    records = follow_plan(plan_of(light("one"), light("two")), place, events.append)
    assert {record.status for record in records} == {RunStatus.FINISHED}
    assert len((records[0].folder / "lives").read_text().split()) == 1
    told = [event.message for event in events if isinstance(event, launch.Notice)]
    assert any(str(place.backend.error) in message for message in told)


class OnceForgetful(Slurm):
    """A Slurm whose first answer to squeue is empty."""

    asked = 0

    def poll(self, ids):
        self.asked += 1
        return super().poll(ids) if self.asked > 1 else {id_: unknown_job() for id_ in ids}


def test_a_job_is_not_lost_by_one_empty_answer(light, site):
    plan = plan_of(light("slow", mode="hang"))
    submit_plan(plan, site(), quiet)
    collected = collect(plan, site(OnceForgetful), quiet)
    assert (collected.records, len(collected.left)) == ({}, 1)
    assert submit_plan(plan, site(OnceForgetful), quiet).queued == 1


class Purging(Slurm):
    """A Slurm that forgets a seed-checkpoint job as soon as it is over."""

    seed = None

    def submit(self, request):
        job_id = super().submit(request)
        if self.seed is None:
            self.seed = job_id
            while not (request.script.parent / "ended.json").is_file():
                time.sleep(0.1)
        return job_id

    def poll(self, ids):
        return {**super().poll(ids), **({self.seed: unknown_job()} if self.seed in ids else {})}


def test_no_job_waits_for_a_seed_that_slurm_has_forgotten(light, site):
    seed = light("seed", role=Role.SEED, ranks=1, steps=1)
    test, place = light("test", needs=seed.identity), site(Purging)
    submitted = submit_plan(plan_of(seed, test), place, quiet)
    assert (submitted.submitted, submitted.refused) == (2, ())
    (folder,) = (place.store.root / "runs").glob("test-*")
    assert read_submission(folder).after_ok == ()


def test_what_another_harness_finished_since_does_not_run_again(light, site):
    job, place = light("one"), site()
    follow_plan(plan_of(job), place, quiet)
    finished = (folder_of(place) / "record.json").read_text()
    failed = json.dumps({**json.loads(finished), "status": "crashed"})
    (folder_of(place) / "record.json").write_text(failed)
    with interruptible() as stop:
        prepared = prepare_plan(plan_of(job), place, quiet, stop)
    (folder_of(place) / "record.json").write_text(finished)
    given = submit.Submitter(prepared, place, quiet).give(job, None)
    assert (given.status, given.reused) == (RunStatus.FINISHED, True)


class OnceDeafToCancel(Slurm):
    """A Slurm that does not hear the first scancel."""

    heard = 0

    def cancel(self, ids):
        self.heard += 1
        if self.heard == 1:
            raise ClusterError("scancel cannot reach Slurm")
        super().cancel(ids)


def test_a_hung_job_is_ended_by_the_next_look_when_slurm_did_not_hear(light, site):
    place = site(OnceDeafToCancel, limits={"progress_timeout_s": 2.0})
    (record,) = follow_plan(plan_of(light("stuck", mode="hang", at=2)), place, quiet)
    assert record.status is RunStatus.HUNG
    assert place.backend.heard == 2


# -------------------------------------------------------------------- broken stores


def test_a_job_whose_id_cannot_be_written_down_is_cancelled(light, site, slurm, monkeypatch):
    def full(folder, submission):
        if submission.job_id is not None:
            raise StoreError("the disk is full")
        write_submission(folder, submission)

    monkeypatch.setattr(submit, "write_submission", full)
    with pytest.raises(StoreError, match="the disk is full"):
        follow_plan(plan_of(light("slow", mode="hang")), site(), quiet)
    await_empty(slurm)


def test_an_interrupted_harness_ends_its_jobs_though_it_cannot_say_why(light, site, slurm):
    def interrupt(event):
        events.append(event)
        if isinstance(event, launch.Step):
            path = folder_of(place) / "submission.json"
            path.unlink()
            path.mkdir()  # nothing can be written there, not even by root
            raise StoreError("stopped here")

    events, place = [], site()
    with pytest.raises(StoreError, match="stopped here"):
        follow_plan(plan_of(light("slow", steps=100, seconds=0.5)), place, interrupt)
    assert "but this could not be recorded in their folders" in events[-1].message
    await_empty(slurm)


def test_a_job_of_a_broken_store_can_be_cancelled(light, site, slurm, monkeypatch):
    def full(folder, submission):
        raise StoreError("the disk is full")

    place, plan = site(), plan_of(light("slow", mode="hang"))
    submit_plan(plan, place, quiet)
    monkeypatch.setattr(submit, "write_submission", full)
    with pytest.raises(
        StoreError, match="cancelled, but this could not be recorded in run folders: the disk"
    ):
        cancel(plan, place, quiet, wanted=lambda job: True, why="no")
    await_empty(slurm)


def test_a_run_folder_that_is_deleted_does_not_keep_the_harness(light, site, tmp_path):
    def delete(event):
        if isinstance(event, launch.Started):
            # At once: the job writes into a folder that is emptied file by file.
            folder_of(place).rename(tmp_path / "deleted")

    place = site()
    (record,) = follow_plan(plan_of(light("one", seconds=1.5)), place, delete)
    assert record.status is RunStatus.CRASHED
    assert json.loads((record.folder / "record.json").read_text())["status"] == "crashed"
