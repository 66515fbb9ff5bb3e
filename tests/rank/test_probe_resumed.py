"""The probe in a program that is stopped and resumed: what it leaves, and what it refuses."""

import json
import os
import resource
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from probed_loop import DEGREES, Model, lines_of, microbatches, write_job
from torch.distributed.checkpoint.state_dict import get_state_dict

from converge_harness.model.kinds import FaultKind
from converge_harness.probe import Probe, ProbeError, faults
from converge_harness.probe.faults import ScriptedFaults
from converge_harness.probe.write_limit import MAY_GROW, WriteLimit
from converge_harness.run_folder.checkpoints import CheckpointForm, newest_whole, set_torn_aside
from converge_harness.run_folder.faults import HELD, record_struck
from converge_harness.run_folder.job import RankFault, RankJob, read_job
from converge_harness.run_folder.layout import SEGMENT_VARIABLE

FORM = CheckpointForm("{step}.pt", None)
COMMAND = {"checkpoints": {"name": FORM.name, "last_file": FORM.last_file}}
ONE = dict.fromkeys(DEGREES, 1)
SEGMENTS = [
    {"until": 2, "parallelism": ONE, "local_batch_size": 8},
    {"until": 4, "parallelism": ONE, "local_batch_size": 4},
]


class Program:
    """One start of a program, which ends where the test leaves it."""

    def __init__(self, path, monkeypatch, *, segment=None, lr=1e-2, schedule=None):
        # A new process has made no probe yet.
        monkeypatch.setattr("converge_harness.probe.loop._probed", set())
        monkeypatch.setenv("CONVERGE_JOB", str(path))
        monkeypatch.delenv(SEGMENT_VARIABLE, raising=False)
        if segment is not None:
            monkeypatch.setenv(SEGMENT_VARIABLE, str(segment))
        self.folder = path.parent
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.schedule = schedule and schedule(self.optimizer)
        self.probe = Probe.from_env(self.model, self.optimizer, schedule=self.schedule)
        self.step = 0

    def train(self, until, accumulate=1):
        while self.step < until:
            self.step += 1
            for inputs, labels in microbatches(self.step, accumulate=accumulate):
                self.probe.batch(inputs, labels)
                self.model(inputs).square().mean().backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.probe.step(loss=1.0)
            self.optimizer.zero_grad()

    def save(self, written=None):
        path = FORM.path(self.folder, self.step)
        path.parent.mkdir(exist_ok=True)
        parts = (self.model.state_dict(), self.optimizer.state_dict())
        torch.save((self.step, *parts), path)
        self.probe.saved(self.step, written=written)

    def load(self, *, optimizer=True):
        step = newest_whole(self.folder, FORM)
        self.step, model, states = torch.load(FORM.path(self.folder, step), weights_only=True)
        self.model.load_state_dict(model)
        if optimizer:
            self.optimizer.load_state_dict(states)
        self.probe.loaded(self.step)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the program of a job, again and again; the job's keys are those of the first start."""
    started = []

    def start(segment=None, schedule=None, **keys):
        path = tmp_path / "run" / "job.json"
        if keys:
            write_job(path.parent, **{"steps": 4, "command": COMMAND, **keys})
        started.append(Program(path, monkeypatch, segment=segment, schedule=schedule))
        return started[-1]

    yield start
    for each in started:
        each.probe.close()


def state(folder, number, event, step):
    path = folder / "passes" / f"{number:03d}" / "state" / f"{event}-step-{step:08d}.npz"
    with np.load(path) as arrays:
        return dict(arrays)


def of_pass(program, number):
    return program.folder / "passes" / f"{number:03d}"


def test_segments_are_passes_joined_by_what_was_saved(start):
    first = start(0, segments=SEGMENTS)
    first.probe.loaded(0)
    first.train(2)
    first.save()
    second = start(1)
    second.load()
    second.train(4, accumulate=2)
    second.save()  # after the last step: nothing goes on from it
    saved, loaded = (state(first.folder, *each, 2) for each in ((1, "saved"), (2, "loaded")))
    for name in ("parameters_sketch", "state_sketch", "state_steps", "lr", "trainer_step"):
        assert np.array_equal(saved[name], loaded[name]), name
    assert set(saved["state_names"]) == {"exp_avg", "exp_avg_sq"}
    assert (saved["tokens_seen"], saved["samples_consumed"]) == (-1, -1)
    steps = [[line["step"] for line in lines_of(of_pass(second, number))] for number in (1, 2)]
    assert steps == [[1, 2], [3, 4]]
    headers = [lines_of(of_pass(second, number), "header")[0] for number in (1, 2)]
    assert [(each["pass"], each["segment"]) for each in headers] == [(1, 0), (2, 1)]
    ends = [lines_of(of_pass(second, number), "end") for number in (1, 2)]
    assert [each["steps"] for (each,) in ends] == [2, 4]
    sizes = [
        json.loads((of_pass(second, number) / "in_force.json").read_text()) for number in (1, 2)
    ]
    assert [each["gradient_accumulation_steps"] for each in sizes] == [1, 2]
    assert [each["config"]["training.local_batch_size"] for each in sizes] == [8, 4]
    assert not (second.folder / "in_force.json").exists()
    assert not list((of_pass(second, 2) / "state").glob("saved*"))


def test_moved_weights_are_not_moved_again_at_a_resume(start):
    """A program may have loaded its checkpoint by the time it makes its probe."""
    before = start(checkpoint_every=2, repeat="ulp")
    moved = [each.detach().clone() for each in before.model.parameters()]
    before.probe.loaded(0)
    before.train(2)
    before.save()
    after = [each.detach() for each in start().model.parameters()]
    own = [each.detach() for each in Model().parameters()]
    assert all(map(torch.equal, after, own))
    assert not all(map(torch.equal, moved, own))


def test_an_optimizer_that_was_not_restored_has_no_states(start):
    first = start(0, segments=SEGMENTS)
    first.probe.loaded(0)
    first.train(2)
    first.save()
    second = start(1)
    second.load(optimizer=False)
    assert state(second.folder, 2, "loaded", 2)["state_names"].size == 0


class OfDeepSpeed:
    """A schedule that counts as DeepSpeed's do: -1 before its first step."""

    def __init__(self, optimizer):
        self.optimizer, self.last_batch_iteration = optimizer, -1

    def step(self):
        self.last_batch_iteration += 1


def constant(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def test_a_schedule_may_be_wrapped_or_a_chain(start):
    def chained(optimizer):
        return torch.optim.lr_scheduler.ChainedScheduler([constant(optimizer), constant(optimizer)])

    class Wrapper:
        def __init__(self, optimizer):
            self.scheduler = chained(optimizer)

        def step(self):
            self.scheduler.step()

    first = start(0, Wrapper, segments=SEGMENTS)
    first.probe.loaded(0)
    first.train(2)
    first.save()
    assert state(first.folder, 1, "saved", 2)["schedule_steps"] == 2


@pytest.mark.parametrize("schedule", [constant, OfDeepSpeed])
@pytest.mark.parametrize("restored", [True, False])
def test_steps_of_a_schedule_are_kept_where_the_rate_shows_nothing(start, schedule, restored):
    first = start(0, schedule, segments=SEGMENTS)
    first.probe.loaded(0)
    first.train(2)
    first.save()
    second = start(1, schedule)
    if restored:
        vars(second.schedule).update(
            {key: n for key, n in vars(first.schedule).items() if key.startswith("last_")}
        )
    second.load()
    saved, loaded = (state(first.folder, *each, 2) for each in ((1, "saved"), (2, "loaded")))
    assert (saved["schedule_steps"], loaded["schedule_steps"]) == (2, 2 if restored else 0)
    assert saved["lr"] == loaded["lr"]


def test_without_a_schedule_its_steps_are_unknown(start):
    first = start(0, segments=SEGMENTS)
    first.probe.loaded(0)
    first.train(2)
    first.save()
    assert state(first.folder, 1, "saved", 2)["schedule_steps"] == -1


def test_what_does_not_count_its_steps_is_no_schedule(start):
    with pytest.raises(ProbeError, match="is a dict, which does not count its steps"):
        start(0, lambda _: {"steps": 3}, segments=SEGMENTS)


def test_states_made_in_order_to_be_loaded_are_no_step(start):
    """By a step of the optimizer with zero gradients, as distributed checkpoints load them."""
    first = start(checkpoint_every=2)
    first.probe.loaded(0)
    first.train(2)
    first.save()
    second = start()
    get_state_dict(second.model, second.optimizer)
    second.load()
    second.train(4)
    saved, loaded = (state(first.folder, *each, 2) for each in ((1, "saved"), (2, "loaded")))
    assert np.array_equal(saved["state_sketch"], loaded["state_sketch"])
    steps = lines_of(of_pass(second, 2))
    assert [line["step"] for line in steps] == [3, 4]
    assert all(line["grad_norm_recomputed"] > 0 for line in steps)


def test_a_save_that_did_not_return_leaves_no_whole_checkpoint(start):
    program = start(checkpoint_every=2)
    program.probe.loaded(0)
    program.train(2)
    program.save()
    program.train(3)
    FORM.path(program.folder, 3).touch()  # it dies before probe.saved
    assert newest_whole(program.folder, FORM) == 2
    assert set_torn_aside(program.folder, FORM) == (3,)


def test_a_checkpoint_that_is_written_in_the_background_counts_once_that_is_done(start):
    program = start(checkpoint_every=1)
    program.probe.loaded(0)
    futures = []
    for step in (1, 2, 3):
        program.train(step)
        futures.append(Future())
        program.save(written=futures[-1])
    assert newest_whole(program.folder, FORM) is None
    futures[0].set_result(None)
    futures[1].cancel()
    futures[2].set_exception(OSError("No space left on device"))
    assert newest_whole(program.folder, FORM) == 1
    again = start()
    again.load()
    saved, loaded = (state(again.folder, *each, 1) for each in ((1, "saved"), (2, "loaded")))
    assert np.array_equal(saved["parameters_sketch"], loaded["parameters_sketch"])


def test_what_is_wrong_with_a_checkpoint_written_in_the_background_is_said_at_the_next_step(start):
    program = start(checkpoint_every=1)
    program.probe.loaded(0)
    program.train(1)
    with pytest.raises(ProbeError, match=r"written= of probe.saved\(1\) is a dict, not a future"):
        program.probe.saved(1, written={})
    elsewhere = Future()
    program.probe.saved(1, written=elsewhere)
    elsewhere.set_result(None)
    with pytest.raises(ProbeError, match=r"probe.saved\(1\), but there is no "):
        program.train(2)


def test_a_run_that_nothing_resumes_ignores_the_calls(start):
    program = start(command={})
    program.probe.loaded(0)
    program.train(2)
    program.probe.saved(2)
    program.train(4)
    assert not (program.folder / "passes").exists()
    assert len(lines_of(program.folder)) == 4


# ------------------------------------------------------------------ wrong use


def test_training_before_it_is_known_from_where(start):
    program = start(checkpoint_every=2)
    with pytest.raises(
        ProbeError, match=r"is resumed from checkpoints: call probe\.loaded\(step\)"
    ):
        program.train(1)


def test_a_load_after_training_has_begun(start):
    program = start(checkpoint_every=2)
    program.probe.loaded(0)
    with pytest.raises(ProbeError, match=r"loaded\(2\) after training has begun"):
        program.probe.loaded(2)


@pytest.mark.parametrize(
    ("keys", "segment", "step", "words"),
    [
        ({"checkpoint_every": 2}, None, 4, "this start trains up to step 4"),
        ({"segments": SEGMENTS}, 0, 2, "this start trains up to step 2"),
        ({"command": {}}, None, 2, "this start starts from its initial weights"),
    ],
)
def test_a_checkpoint_that_cannot_be_this_runs(start, keys, segment, step, words):
    program = start(segment, **keys)
    with pytest.raises(ProbeError, match=words):
        program.probe.loaded(step)


def test_a_program_that_does_not_stop_where_its_segment_ends(start):
    program = start(0, segments=SEGMENTS)
    program.probe.loaded(0)
    with pytest.raises(ProbeError, match=r"after step 2, where segment 1 ends: .* \{stop_at\}"):
        program.train(3)


def test_a_save_of_another_step(start):
    program = start(checkpoint_every=2)
    program.probe.loaded(0)
    program.train(2)
    with pytest.raises(ProbeError, match=r"probe\.saved\(1\) after step 2"):
        program.probe.saved(1)
    program.probe.batch(*microbatches(3, accumulate=1)[0])
    with pytest.raises(ProbeError, match=r"probe\.saved\(2\) in step 3"):
        program.probe.saved(2)


def test_a_save_without_a_checkpoint(start):
    program = start(checkpoint_every=2)
    program.probe.loaded(0)
    program.train(2)
    with pytest.raises(ProbeError, match=r"probe\.saved\(2\), but there is no .*checkpoint/2\.pt"):
        program.probe.saved(2)


# ------------------------------------------------------------------ faults


def job_with(folder, *script):
    path = write_job(folder, steps=4, checkpoint_every=2, command=COMMAND)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "faults": list(script)}))
    return path


def started(path):
    """A process that trains all steps of a job, and saves a checkpoint after two."""

    def run():
        with pytest.MonkeyPatch.context() as patch:
            program = Program(path, patch)
            program.probe.loaded(0)
            program.train(2)
            program.save()
            program.train(4)

    torch.set_num_threads(1)  # so that it can be forked
    process = get_context("fork").Process(target=run)
    process.start()
    return process


def ran_by(path):
    """Its exit code."""
    process = started(path)
    process.join(120)
    return process.exitcode


def test_a_rank_is_killed_once_in_the_middle_of_its_step(tmp_path):
    path = job_with(
        tmp_path / "run", {"kind": "kill", "step": 2}, {"kind": "kill", "step": 3, "rank": 1}
    )
    assert [ran_by(path), ran_by(path)] == [-signal.SIGKILL, 0]
    struck = json.loads((path.parent / "faults" / "0.json").read_text())
    assert (struck["kind"], struck["step"], struck["rank"], struck["pass"]) == ("kill", 2, 0, 1)
    assert len(lines_of(path.parent / "passes" / "001", name="metrics.jsonl.part")) == 1
    assert len(lines_of(path.parent / "passes" / "002")) == 4


def test_a_rank_hangs_once_until_a_signal_ends_it(tmp_path):
    path = job_with(tmp_path / "run", {"kind": "hang", "step": 3})
    process = started(path)
    try:
        struck = path.parent / "faults" / "0.json"
        deadline = time.monotonic() + 60
        while not struck.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.join(0.5)
        assert process.is_alive()
        assert len(lines_of(path.parent / "passes" / "001", name="metrics.jsonl.part")) == 2
        process.terminate()
        process.join(60)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
    assert ran_by(path) == 0


@pytest.mark.parametrize("folder", [False, True])
def test_a_torn_checkpoint_looks_whole_and_is_set_aside(tmp_path, monkeypatch, folder):
    """Of a folder, its largest file is cut, and not the one that is written last."""
    form = CheckpointForm("{step}", "done") if folder else FORM
    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2, "torn": "truncated"})
    document = json.loads(path.read_text())
    command = {"checkpoints": {"name": form.name, "last_file": form.last_file}}
    path.write_text(json.dumps({**document, "command": command}))
    saved = form.path(path.parent, 2)
    if folder:
        saved.mkdir(parents=True)
        for name, size in (("model", 100), ("optimizer", 200), ("done", 400)):
            (saved / name).write_bytes(bytes(size))
        monkeypatch.setattr(Program, "save", lambda program: program.probe.saved(2))
    assert ran_by(path) == -signal.SIGKILL
    if folder:
        assert [(saved / name).stat().st_size for name in ("model", "optimizer")] == [100, 100]
    assert form.is_finished(saved)
    assert newest_whole(path.parent, form) is None
    assert set_torn_aside(path.parent, form) == (2,)
    if not folder:
        assert ran_by(path) == 0  # it happens once
    struck = json.loads((path.parent / "faults" / "0.json").read_text())
    assert (struck["kind"], struck["torn"]) == ("ckpt_torn", True)


def job_of(folder, *script) -> RankJob:
    return read_job(job_with(folder, *script))


def test_a_fault_that_a_probe_cannot_make_is_refused(tmp_path):
    job = job_of(tmp_path, {"kind": "flood", "step": 2})
    assert job.faults == (RankFault("flood", 2),)
    with pytest.raises(
        ProbeError,
        match="cannot make the fault flood, only kill, hang, nan_batch, ckpt_torn, disk_full",
    ):
        ScriptedFaults(job, 0, 1)


FILE = 2 * MAY_GROW
"""Bytes of a checkpoint, whose writing can be broken off."""


class Writer(Program):
    """Writes a large checkpoint, as ``saves`` has it."""

    def __init__(self, *arguments, saves):
        super().__init__(*arguments)
        self.saves = saves

    def save(self):
        path = FORM.path(self.folder, self.step)
        path.parent.mkdir(exist_ok=True)
        self.saves(self, path)


def close_logs(folder):
    """Close long files of pytest's process that are not in a test's folder: they move the limit.

    Such as the log of ``nox -s tests > log``: a fork has its descriptor, too.
    """
    for descriptor in Path("/dev/fd").iterdir():
        with suppress(OSError):
            long = descriptor.stat().st_size > FILE // 4
            if long and not descriptor.resolve().is_relative_to(folder):
                os.close(int(descriptor.name))


def wrote_by(path, saves, *, steps=4):
    """The exit code of a process that trains all steps, and saves a checkpoint after two."""

    def run():
        close_logs(path.parents[1])
        with pytest.MonkeyPatch.context() as patch:
            program = Writer(path, patch, saves=saves)
            program.probe.loaded(0)
            program.train(2)
            program.save()
            program.train(steps)

    torch.set_num_threads(1)  # so that it can be forked
    process = get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    return process.exitcode


def save_by_torch(program, path):
    torch.save(torch.zeros(FILE // 4), path)
    program.probe.saved(program.step)


def save_by_python(program, path):
    path.write_bytes(bytes(FILE))
    program.probe.saved(program.step)


@pytest.mark.parametrize("saves", [save_by_torch, save_by_python])
def test_a_rank_dies_once_in_the_middle_of_a_checkpoint(tmp_path, saves):
    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2})
    assert wrote_by(path, saves) == -signal.SIGKILL
    assert 0 < FORM.path(path.parent, 2).stat().st_size < FILE
    struck = json.loads((path.parent / "faults" / "0.json").read_text())
    assert (struck["kind"], struck["step"], struck["torn"]) == ("ckpt_torn", 2, True)
    assert newest_whole(path.parent, FORM) is None
    assert wrote_by(path, saves) == 0
    assert newest_whole(path.parent, FORM) == 2


@pytest.mark.parametrize("in_place", [False, True])
def test_one_file_survives_a_torn_save_only_if_another_was_written_and_renamed(tmp_path, in_place):
    form = CheckpointForm("last.pt", None)
    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 3})
    document = json.loads(path.read_text())
    command = {"checkpoints": {"name": form.name, "last_file": None}}
    path.write_text(json.dumps({**document, "command": command}))

    def save_twice(program, _path):
        last = form.path(program.folder, program.step)
        written = last if in_place else last.with_suffix(".tmp")
        for step in (3, 4):
            written.write_bytes(bytes(FILE))
            written.rename(last)
            program.probe.saved(program.step)
            program.train(step)

    assert wrote_by(path, save_twice) == -signal.SIGKILL
    assert struck_of(path.parent)["torn"] is True
    assert newest_whole(path.parent, form) == (None if in_place else 2)


def test_a_program_ends_for_want_of_space_or_goes_on_without_the_checkpoint(tmp_path):
    def go_on(program, path):
        with suppress(OSError):
            path.write_bytes(bytes(FILE))
            raise AssertionError
        assert (program.folder / "faults" / "0.json").exists()
        program.train(3)
        path = FORM.path(program.folder, 3)  # there is space again
        path.write_bytes(bytes(FILE))
        program.probe.saved(3)

    script = {"kind": "disk_full", "step": 2}
    assert wrote_by(job_with(tmp_path / "ends", script), save_by_python) == 1
    assert newest_whole(tmp_path / "ends", FORM) is None
    assert 0 < FORM.path(tmp_path / "ends", 2).stat().st_size < FILE
    struck = struck_of(tmp_path / "ends")
    assert (struck["kind"], struck["rank"], struck["torn"]) == ("disk_full", 0, True)
    assert wrote_by(job_with(tmp_path / "goes_on", script), go_on) == 0
    assert newest_whole(tmp_path / "goes_on", FORM) == 3
    assert len(lines_of(tmp_path / "goes_on" / "passes" / "001")) == 4


def struck_of(folder, index=0):
    return json.loads((folder / "faults" / f"{index}.json").read_text())


def test_the_next_checkpoint_after_a_full_disk_is_broken_off_and_recorded_too(tmp_path):
    def save_both(program, path):
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                FORM.path(program.folder, step).write_bytes(bytes(FILE))
            program.train(step + 1)

    script = ({"kind": "disk_full", "step": 2}, {"kind": "disk_full", "step": 3})
    path = job_with(tmp_path / "run", *script)
    assert wrote_by(path, save_both) == 0
    assert [struck_of(path.parent, index)["step"] for index in (0, 1)] == [2, 3]


def test_another_file_that_is_broken_off_is_no_torn_checkpoint(tmp_path):
    def save(program, path):
        (program.folder / "evaluation.bin").write_bytes(bytes(FILE))
        raise AssertionError

    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2})
    assert wrote_by(path, save) == -signal.SIGKILL
    assert struck_of(path.parent)["torn"] is False


def save_by_safetensors(program, path):
    from safetensors.torch import save_file

    path.mkdir()
    save_file({"weight": torch.zeros(FILE // 4)}, path / "model.safetensors")
    raise AssertionError


def save_by_memmap(program, path):
    np.memmap(path, dtype=np.uint8, mode="w+", shape=(FILE,))
    raise AssertionError


WITH_SAFETENSORS = pytest.mark.skipif(
    find_spec("safetensors") is None, reason="needs toolchain with safetensors"
)


@pytest.mark.parametrize(
    "saves", [pytest.param(save_by_safetensors, marks=WITH_SAFETENSORS), save_by_memmap]
)
def test_a_checkpoint_may_leave_no_half_file(tmp_path, saves):
    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2})
    assert wrote_by(path, saves) == -signal.SIGKILL
    assert struck_of(path.parent)["torn"] is True
    assert newest_whole(path.parent, FORM) is None


def test_what_other_ranks_write_or_an_earlier_fault_left_is_not_what_was_broken_off(tmp_path):
    def save(program, path):
        with pytest.raises(OSError, match="File too large"):
            path.write_bytes(bytes(FILE))
        program.train(3)
        FORM.path(program.folder, 3).write_bytes(b"of another rank")
        with pytest.raises(OSError, match="File too large"):
            (program.folder / "evaluation.bin").write_bytes(bytes(FILE))
        program.train(4)

    script = ({"kind": "disk_full", "step": 2}, {"kind": "disk_full", "step": 3})
    path = job_with(tmp_path / "run", *script)
    with (tmp_path / "log").open("wb") as log:
        log.truncate(FILE // 4)  # makes both limits the same
        assert wrote_by(path, save) == 0
    assert [struck_of(path.parent, index)["torn"] for index in (0, 1)] == [True, False]


def test_a_checkpoint_that_makes_room_for_the_next_is_no_torn_one(tmp_path):
    def save(program, path):
        (path.parent / "1.pt").unlink()
        (tmp_path / "evaluation.bin").write_bytes(bytes(FILE))
        raise AssertionError

    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2})
    FORM.path(path.parent, 1).parent.mkdir()
    FORM.path(path.parent, 1).touch()
    assert wrote_by(path, save) == -signal.SIGKILL
    assert struck_of(path.parent)["torn"] is False


@pytest.mark.parametrize(("mode", "strikes"), [("rb", True), ("ab", False)])
def test_a_large_file_that_is_only_read_does_not_move_the_limit(tmp_path, mode, strikes):
    large = tmp_path / "tokens.bin"
    large.write_bytes(bytes(2 * FILE))

    def save(program, path):
        if strikes:
            with pytest.raises(OSError, match="File too large"):
                path.write_bytes(bytes(FILE))
            return
        path.write_bytes(bytes(FILE))
        words = f"has more than .* more than {large}, which is open for writing"
        with pytest.raises(ProbeError, match=words):
            program.probe.saved(2)

    with large.open(mode):
        assert wrote_by(job_with(tmp_path / "run", {"kind": "disk_full", "step": 2}), save) == 0


def test_the_limit_and_its_handler_are_as_before_afterwards(tmp_path):
    def state():
        return signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(program, path):
        assert state() != before
        path.write_bytes(b"small")
        with pytest.raises(ProbeError, match="could not strike"):
            program.probe.saved(2)
        assert state() == before

    had = signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        before = state()
        assert wrote_by(job_with(tmp_path / "run", {"kind": "disk_full", "step": 2}), save) == 0
    finally:
        signal.signal(signal.SIGXFSZ, had)


def test_the_limit_of_the_user_may_be_the_lower_one(tmp_path):
    def limited(program, path):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, hard))
        limit = WriteLimit(2 * FILE, lambda: None)
        assert limit.size == resource.getrlimit(resource.RLIMIT_FSIZE)[0] == FILE
        limit.lift()
        os.ftruncate(os.memfd_create("memory"), FILE)  # is no log
        assert WriteLimit(MAY_GROW, lambda: None).size < FILE

    assert wrote_by(job_with(tmp_path / "run"), limited) == 0


def test_another_thread_may_lift_the_limit(tmp_path):
    def lift(program, path):
        limit = WriteLimit(0, lambda: None)
        thread = threading.Thread(target=limit.lift)
        thread.start()
        thread.join()
        path.write_bytes(bytes(FILE))

    assert wrote_by(job_with(tmp_path / "run"), lift) == 0


def test_a_forked_process_does_not_strike_for_its_rank(tmp_path):
    def save(program, path):
        child = os.fork()
        if not child:
            with suppress(OSError):
                path.write_bytes(bytes(FILE))
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with pytest.raises(ProbeError, match="ckpt_torn could not strike"):
            program.probe.saved(2)

    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2})
    assert wrote_by(path, save) == 0
    assert not (path.parent / "faults").exists()


def test_of_several_ranks_that_record_a_fault_at_once_the_first_stays(tmp_path):
    def record(barrier, rank):
        for index in range(20):
            barrier.wait()
            record_struck(tmp_path, index, RankFault("ckpt_torn", 2), 1, rank=rank)

    fork = get_context("fork")
    barrier = fork.Barrier(3)
    processes = [fork.Process(target=record, args=(barrier, rank)) for rank in range(3)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0, 0, 0]
    assert all(struck_of(tmp_path, index)["rank"] in (0, 1, 2) for index in range(20))
    assert len(list((tmp_path / "faults").iterdir())) == 20


def test_a_fault_is_recorded_where_files_have_no_hard_links(tmp_path, monkeypatch):
    def refuse(*_arguments, **_options):
        raise PermissionError(1, "Operation not permitted")  # as exFAT does

    monkeypatch.setattr(os, "link", refuse)
    for rank in (0, 1):
        record_struck(tmp_path, 0, RankFault("kill", 2), 1, rank=rank)
    assert struck_of(tmp_path)["rank"] == 0
    assert len(list((tmp_path / "faults").iterdir())) == 1


def test_a_probe_makes_every_kind_of_fault_or_waits_for_it():
    assert sorted([*faults._MADE, *HELD]) == sorted(FaultKind)


def test_a_file_that_vanishes_meanwhile_does_not_hide_the_fault(tmp_path, monkeypatch):
    """Another rank may rename its own file of the checkpoint while this one looks at all files."""
    stat = Path.stat

    def vanishes(path, **options):
        if path.name == "of_another_rank":
            path.unlink(missing_ok=True)
        return stat(path, **options)

    def save(program, path):
        (path.parent / "of_another_rank").touch()
        monkeypatch.setattr(Path, "stat", vanishes)
        save_by_python(program, path)

    path = job_with(tmp_path / "run", {"kind": "ckpt_torn", "step": 2})
    assert wrote_by(path, save) == -signal.SIGKILL
    assert json.loads((path.parent / "faults" / "0.json").read_text())["torn"]


def test_a_checkpoint_too_small_to_break_off_says_so(tmp_path):
    def save(program, path):
        path.write_bytes(b"small")
        words = "no file that rank 0 wrote between probe.step of step 2 and probe.saved"
        with pytest.raises(ProbeError, match=f"disk_full could not strike: {words}"):
            program.probe.saved(2)

    path = job_with(tmp_path / "run", {"kind": "disk_full", "step": 2})
    assert wrote_by(path, save) == 0
    assert not (path.parent / "faults").exists()


def test_no_fault_strikes_a_checkpoint_that_is_written_in_the_background(start):
    faults = [{"kind": "ckpt_torn", "step": 2, "rank": 0, "torn": "truncated"}]
    program = start(checkpoint_every=2, faults=faults)
    program.probe.loaded(0)
    program.train(2)
    with pytest.raises(ProbeError, match="ckpt_torn cannot strike the checkpoint of step 2"):
        program.save(written=Future())


def test_another_rank_s_disk_is_not_full(tmp_path):
    path = job_with(tmp_path / "run", {"kind": "disk_full", "step": 2, "rank": 1})

    def save(program, path):
        path.write_bytes(bytes(FILE))
        with pytest.raises(ProbeError, match="no file that rank 1 wrote"):
            program.probe.saved(2)

    assert wrote_by(path, save) == 0


def test_a_forward_pass_returns_nan_once(start):
    program = start(checkpoint_every=2, faults=[{"kind": "nan_batch", "step": 2}])
    program.probe.loaded(0)
    tokens, _ = microbatches(1)[0]
    program.train(1)
    with torch.no_grad():
        assert program.model(tokens).isfinite().all()  # no training
    assert program.model(tokens).isnan().all()
    assert program.model(tokens).isfinite().all()
    struck = json.loads((program.folder / "faults" / "0.json").read_text())
    assert (struck["kind"], struck["step"], struck["rank"]) == ("nan_batch", 2, 0)
    again = start()
    again.probe.loaded(1)
    assert again.model(tokens).isfinite().all()


def test_a_forward_pass_of_another_rank_stays_finite(start):
    program = start(checkpoint_every=2, faults=[{"kind": "nan_batch", "step": 1, "rank": 1}])
    program.probe.loaded(0)
    program.train(1)
    assert not (program.folder / "faults").exists()


def test_a_program_gets_sigterm_while_it_is_held_for_it(tmp_path, monkeypatch):
    """It would otherwise lose the time in which it is to save its checkpoint."""
    monkeypatch.setattr(faults, "hold_until", lambda over, or_else: waited(or_else))
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append("SIGTERM"))
    held = ScriptedFaults(job_of(tmp_path, {"kind": "preempt", "step": 2}), 0, 1)
    try:
        held.after_step(1)
        assert not got
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        held.after_step(2)
        assert got == ["SIGTERM"]
        held.after_step(2)  # once
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_that_comes_before_the_hold_is_neither_lost_nor_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "hold_until", lambda over, or_else: waited(or_else))
    got = []

    def own(*_):
        got.append("SIGTERM")

    before = signal.signal(signal.SIGTERM, own)
    held = ScriptedFaults(job_of(tmp_path, {"kind": "preempt", "step": 2}), 0, 1)
    try:
        held.step_ended(1)
        assert signal.getsignal(signal.SIGTERM) is own
        held.step_ended(2)
        os.kill(os.getpid(), signal.SIGTERM)  # while the program saves its checkpoint
        assert got == ["SIGTERM"]
        held.after_step(2)
        assert got == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def waited(or_else):
    deadline = time.monotonic() + 10
    while not or_else():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hold_ends_with_the_fault(tmp_path):
    job = job_of(tmp_path, {"kind": "preempt", "step": 2})
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "0.over.json").touch()
    before = signal.getsignal(signal.SIGTERM)
    ScriptedFaults(job, 0, 1).after_step(2)
    assert signal.getsignal(signal.SIGTERM) is before
