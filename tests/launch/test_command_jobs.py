"""Programs of a user's: started, supervised and ended whole, whatever launches their ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from launch_jobs import broken, elastic, plan_of, tiny_job

from converge_harness.launch import Retrying, run_plan
from converge_harness.launch.local.agents import PROCESS_GUARD
from converge_harness.launch.next_call import next_by_curve
from converge_harness.launch.processes import RANK_VARIABLES, ranks_of, signal_tree
from converge_harness.model import (
    GRACE_S,
    Fault,
    FaultKind,
    Parallelism,
    Recovery,
    RestartOwner,
    RunStatus,
    Toolchain,
    Torn,
)
from converge_harness.readers import read_run, steps_so_far
from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.failure import program_error
from converge_harness.trainers.command.settings import Command, RankLauncher
from converge_harness.trainers.failure import rank_error

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent


def command_job(name, *, mode="well", at=2, ranks=1, launcher=RankLauncher.NONE, python=None):
    """A job of ``tiny_trainer.py``, which is not probed."""
    python = python or Path(sys.executable)
    program = ("tiny_trainer.py", "{output}", "{steps}", mode, str(at))
    job = tiny_job(name, ranks=ranks, toolchain=Toolchain("mine", python, "command", {}), mode=mode)
    command = Command(
        argv=("{python}", *program) if launcher is RankLauncher.NONE else program,
        folder=HERE,
        launcher=launcher,
        probed=False,
        curves="{output}/loss.0.csv",
    )
    spec = replace(
        job.spec, parallelism=Parallelism(dp_replicate=ranks), trainer=trained_by(command)
    )
    return replace(job, spec=spec)


def run(plan, store, options, tell=lambda _: None):
    before = set(psutil.Process().children(recursive=True))  # of other tests in this process
    records = run_plan(plan, store, replace(options, warm=True, check=True), tell)
    assert set(psutil.Process().children(recursive=True)) <= before
    return records


def test_a_program_runs_where_it_lies_and_is_reused(store, cold):
    job = command_job("well")
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    told = json.loads((record.folder / "output" / "told.json").read_text())
    assert told["cwd"] == str(HERE)
    assert told["job"] is None  # a probe in it would leave what nobody asked for
    assert json.loads((record.folder / "job.json").read_text())["probed"] is False
    (again,) = run(plan_of(job), store, cold)
    assert again == replace(record, reused=True)


def test_nothing_that_a_program_started_outlives_it(store, cold):
    (record,) = run(plan_of(command_job("orphan", mode="orphan")), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert not psutil.pid_exists(int((record.folder / "output" / "orphan").read_text()))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("exit", "the program ended with exit code 3 without output"),
        ("no curve", "ended with 0, but there is no "),
    ],
)
def test_a_program_that_ends_badly_says_how(store, cold, mode, words):
    (record,) = run(plan_of(command_job(mode, mode=mode)), store, cold)
    assert record.status is RunStatus.CRASHED
    assert words in record.error.message


def test_a_program_whose_curve_does_not_grow_hangs(store, cold):
    job = command_job("hang", mode="hang", at=3)
    (record,) = run(plan_of(job, progress_timeout_s=2.0), store, cold)
    assert record.status is RunStatus.HUNG
    assert "its curve nor its ranks' output grew for 2 s" in record.error.message
    assert "in go_wrong" in record.error.traceback


def test_a_port_that_another_process_holds_says_how_to_find_that(store, cold):
    events = []
    with socket.create_server(("127.0.0.1", 0)) as held:
        mode = f"port {held.getsockname()[1]}"
        job = command_job("taken", mode=mode, at=1)
        (record,) = run(plan_of(job), store, cold, events.append)
    assert record.status is RunStatus.CRASHED
    assert record.error.message.startswith("OSError: [Errno 98] Address already in use")
    assert "another process listens on the port; `ss -ltnp` shows which" in record.error.message
    assert sum(isinstance(each, Retrying) for each in events) == 1  # it might have been brief


def test_a_program_that_cannot_be_started_says_so(store, cold):
    job = command_job("missing", python=Path("/no/such/python"))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    assert "cannot start /no/such/python: No such file" in record.error.message


def test_the_rank_that_raised_is_named_under_torchrun(store, cold, toolchain):
    job = command_job(
        "raise", mode="raise", ranks=2, launcher=RankLauncher.TORCHRUN, python=toolchain.python
    )
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    assert (record.error.rank, record.error.message) == (
        1,
        "ValueError: a tiny trainer was told to raise",
    )
    assert "in go_wrong" in record.error.traceback


def test_a_program_ends_with_the_harness(tmp_path):
    """The starter of process_guard.py is killed: the program, and what it has started, end."""
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '600'])\n"
    program += "print(p.pid, flush=True); p.wait()"
    starter = (
        "import os, subprocess, sys\n"
        "os.environ['CONVERGE_PARENT'] = str(os.getpid())\n"
        f"guard = [sys.executable, '-I', {str(PROCESS_GUARD)!r}]\n"
        f"subprocess.run([*guard, sys.executable, '-c', {program!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as harness:
        sleeper = psutil.Process(int(harness.stdout.readline()))
        above = sleeper.parents()[:2]
        os.kill(harness.pid, signal.SIGKILL)
        _, left = psutil.wait_procs([sleeper, *above], timeout=30)
    assert not left


CHAIN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: KeyError: 'loss'

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 5, in <module>
[rank1]: RuntimeError: no loss
"""
AFTERMATH = """\
Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.distributed.DistBackendError: Connection closed by peer
"""


@pytest.mark.parametrize("log", [CHAIN + AFTERMATH, AFTERMATH + CHAIN + "mpirun: killed\n"])
def test_the_first_cause_is_reported_of_a_log_that_ranks_share(tmp_path, log):
    (tmp_path / "program.log").write_text(f"step 1\n{log}")
    error = program_error([tmp_path], 1)
    assert (error.rank, error.message) == (1, "RuntimeError: no loss")
    assert "KeyError" in error.traceback


def test_a_signal_is_named(tmp_path):
    (tmp_path / "program.log").write_text("step 1\n")
    assert program_error([tmp_path], 137).message == (
        "the program was killed by SIGKILL; last output: step 1"
    )


LISTED = """\
  rank      : 3 (local_rank: 1)
  exitcode  : 1 (pid: 77)
"""


@pytest.mark.parametrize("by_agent", [True, False])
def test_the_error_of_a_rank_on_another_node_is_read_from_its_own_log(tmp_path, by_agent):
    first, second = tmp_path / "call-01", tmp_path / "call-01.node-1"
    own = second / "7.1_x" / "attempt_0" / "1"
    for folder in (first, own):
        folder.mkdir(parents=True)
    (own / "stderr.log").write_text("Traceback (most recent call last):\n  x\nOSError: full\n")
    (second / "torchrun.log").write_text(LISTED)
    if by_agent:
        failure = {"rank": 3, "exitcode": 1, "error_file": "<N/A>", "timestamp": 1}
        (second / "failures.json").write_text(json.dumps({"failures": [failure]}))
    error = program_error([first, second], 1)
    assert (error.rank, error.message) == (3, "OSError: full")
    if by_agent:
        assert rank_error(first, second).traceback.endswith("OSError: full")


# ------------------------------------------------------------------ stopped and resumed


def recoverable_job(name, *, steps=6, mode="well", checkpoints="{step}.txt"):
    """A job of ``tiny_recoverable.py`` on one rank."""
    job = tiny_job(
        name,
        ranks=1,
        steps=steps,
        toolchain=Toolchain("mine", Path(sys.executable), "command", {}),
        mode=mode,
    )
    command = Command(
        argv=(
            *("{python}", "tiny_recoverable.py", "{checkpoint_dir}", "{resume_from}"),
            *("{stop_at}", "{checkpoint_every}", mode),
        ),
        folder=HERE,
        launcher=RankLauncher.NONE,
        checkpoints=CheckpointForm(checkpoints, None),
    )
    return replace(job, spec=replace(job.spec, trainer=trained_by(command)))


def passes_of(record):
    """Of each pass: the step that was loaded, and the steps that it trained."""
    found = []
    for folder in sorted((record.folder / "passes").iterdir()):
        (path,) = folder.glob("metrics.jsonl*")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        found.append((lines[1]["step"], steps))
    return found


def test_a_program_is_stopped_and_resumed_at_the_end_of_every_segment(store, cold):
    job = elastic(recoverable_job("resized"), (2, 1), (5, 1), (6, 1))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert passes_of(record) == [(0, [1, 2]), (2, [3, 4, 5]), (5, [6])]
    assert not (record.folder / "checkpoint").exists()  # nothing goes on from them any more
    (again,) = run(plan_of(job), store, cold)
    assert again == replace(record, reused=True)


def test_a_segment_of_a_program_without_its_checkpoint_says_what_to_do(store, cold):
    job = elastic(recoverable_job("forget", mode="forget"), (2, 1), (4, 1))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    assert record.error.message == (
        "segment 1 (steps 1 to 2): wrote no complete checkpoint of step 2 for the next one: the "
        "program has to stop after the step that {stop_at} says, write that step's checkpoint into "
        "{checkpoint_dir}, and then call probe.saved(step)"
    )


def test_a_start_that_fails_and_ends_with_0_says_so(store, cold):
    job = broken(recoverable_job("hidden", mode="ends with 0"), Fault(FaultKind.KILL, 4))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    assert record.error.message == (
        "every rank ended with exit code 0 after kill at step 4, but step 6 was not reached: "
        "whoever restarts training that fails goes by its exit code, so the program, and what "
        "starts it, must not end with 0 then"
    )


BY_CURVE = """
import pathlib, sys
output, checkpoints, resume_from, stop_at, mode = sys.argv[1:]
first = int(pathlib.Path(resume_from).stem) if resume_from else 0
if mode == "port" and first:
    raise OSError(98, "Address already in use")
rows = [f"{step},{1 / step}" for step in range(first + 1, int(stop_at) + 1)]
name = "curve.csv" if mode == "elsewhere" and first else "loss.csv"
pathlib.Path(output, name).write_text("\\n".join(["step,loss", *rows]) + "\\n")
if mode != "forget":
    pathlib.Path(checkpoints, f"{stop_at}.txt").write_text("state")
sys.exit(3 if mode == "exit" and first else 0)
"""


def curve_job(name, *segments, mode="well"):
    """A program without the probe that is resized; nothing but its curves says what it did."""
    job = elastic(recoverable_job(name, mode=mode), *segments)
    return not_probed(job, BY_CURVE, "{resume_from}", "{stop_at}", mode)


def not_probed(job, program, *arguments, start=("{python}",)):
    """The job with a program that gets its output, its checkpoints, and these arguments."""
    command = replace(
        job.spec.trainer.settings,
        argv=(
            *(*start, "-c", program.replace("{", "{{").replace("}", "}}")),
            *("{output}", "{checkpoint_dir}", *arguments),
        ),
        probed=False,
        curves="{output}/loss.csv",
    )
    return replace(job, spec=replace(job.spec, trainer=trained_by(command)))


def test_a_program_without_the_probe_leaves_a_curve_of_every_start(store, cold):
    job = curve_job("by_curve", (2, 1), (5, 1), (6, 1))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    starts = starts_of(record)
    assert [(start["segment"], start["ranks"]) for start in starts] == [(0, 1), (1, 1), (2, 1)]
    evidence = read_run(record.folder)
    assert [each.steps.tolist() for each in evidence.passes] == [[1, 2], [3, 4, 5], [6]]
    assert evidence.complete
    (again,) = run(plan_of(job), store, cold)
    assert again == replace(record, reused=True)
    (record.folder / starts[1]["curve"]).write_text("step,loss\n3,9.0\n")
    assert "output/start-02/loss.csv was changed after" in read_run(record.folder).problems[0]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (
            "forget",
            (
                "segment 1 (steps 1 to 2): wrote no complete checkpoint of step 2 for the next "
                "one: the program has to stop after the step that {stop_at} says, write that "
                "step's checkpoint into {checkpoint_dir} as {step}.txt"
            ),
        ),
        ("exit", "segment 2 (steps 3 to 4): the program ended with exit code 3 without output"),
        (
            "elsewhere",
            (
                "the program ended with 0, but there is no {folder}/output/start-02/loss.csv: it "
                "has to write its curve there (trainer.curves)"
            ),
        ),
        # Trained again from its start it would lose what its first start did.
        ("port", "segment 2 (steps 3 to 4): OSError: [Errno 98] Address already in use"),
    ],
)
def test_a_start_without_the_probe_that_ends_badly_says_how(store, cold, mode, words):
    events = []
    (record,) = run(plan_of(curve_job(mode, (2, 1), (4, 1), mode=mode)), store, cold, events.append)
    assert record.status is RunStatus.CRASHED
    assert record.error.message.startswith(words.replace("{folder}", str(record.folder)))
    assert not any(isinstance(each, Retrying) for each in events)


STRUCK_BY_CURVE = """
import os, pathlib, signal, subprocess, sys, time
output, checkpoints, resume_from, steps, every, mode = sys.argv[1:]
told = []
if mode in ("saves", "late folders", "deaf"):
    signal.signal(signal.SIGTERM, lambda *_: told.append(mode))
folders = mode.endswith("folders")
of_step = "{}/state" if folders else "{}"
first = int(pathlib.Path(of_step.format(resume_from)).read_text()) if resume_from else 0
if mode.startswith("cut") and first:
    aside = of_step.format(pathlib.Path(checkpoints).with_name("torn") / "4.txt")
    pathlib.Path(output, "aside").write_text(pathlib.Path(aside).read_text())
helper = subprocess.Popen(["sleep", "600"])  # as a worker that loads data
print(helper.pid, file=open(pathlib.Path(output, "helper"), "w"))
curve = open(pathlib.Path(output, "loss.csv"), "w")
print("step,loss", file=curve)
for step in range(first + 1, int(steps) + 1):
    print(f"{step},{1 / step}", file=curve, flush=mode != "buffered")
    if "late folders" in told:
        time.sleep(4)
    stops = "saves" in told or "late folders" in told
    if step % int(every) == 0 or stops:
        path = pathlib.Path(checkpoints, f"{step}.txt")
        if folders:
            path.mkdir(exist_ok=True)
        pathlib.Path(of_step.format(path)).write_text(f"{step} ")
        if folders:
            (path / "last").touch()
    if stops:
        break
    if mode == "ahead" and step == 4:
        pathlib.Path(checkpoints, "6.txt").write_text("6")
    while mode.startswith("cut") and not first and step == 5:
        time.sleep(0.1)
    while (mode in ("slow", "folders") and not first and step == 4) or "deaf" in told:
        if not told:
            curve.write("5,0.")
            curve.flush()
        time.sleep(0.1)
    time.sleep(0.0 if mode == "buffered" else 0.15)
helper.kill()
if mode == "buffered":
    curve.close()
    os._exit(0)  # nothing is left to do that takes time
"""


def struck_job(name, *steps, kind=FaultKind.KILL, mode="well", grace_s=GRACE_S, **recovery):
    """A program without the probe that is struck once its curve has each of these steps."""
    form = CheckpointForm("{step}.txt", "last" if mode.endswith("folders") else None)
    torn = Torn.TRUNCATED if kind is FaultKind.CKPT_TORN else Torn.DEATH
    faults = [Fault(kind, step, torn=torn, grace_s=grace_s) for step in steps]
    job = broken(recoverable_job(name, steps=8), *faults, **recovery)
    arguments = ("{resume_from}", "{steps}", "{checkpoint_every}", mode)
    # As torchrun starts a rank, and waits for it also after SIGTERM.
    waits = 'trap : TERM; RANK=0 "$0" "$@" & while kill -0 $!; do wait $!; done'
    as_rank = (
        "sh",
        "-c",
        waits if mode == "late folders" else 'RANK=0 "$0" "$@" & wait $!',
        "{python}",
    )
    job = not_probed(job, STRUCK_BY_CURVE, *arguments, start=as_rank)
    command = replace(job.spec.trainer.settings, checkpoints=form)
    return replace(job, spec=replace(job.spec, trainer=trained_by(command)))


def starts_of(record):
    return [
        json.loads(path.read_text()) for path in sorted(record.folder.glob("passes/*/start.json"))
    ]


def test_a_program_without_the_probe_is_killed_once_its_curve_has_the_step(store, cold):
    cold = replace(cold, steps_so_far=steps_so_far)
    (record,) = run(plan_of(struck_job("killed", 1, 5)), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    run_ = read_run(record.folder)
    first, second = run_.struck
    assert [(each.kind, each.step, each.number, each.rank) for each in run_.struck] == [
        ("kill", 1, 1, 0),
        ("kill", 5, 2, 0),
    ]
    # A loaded machine may strike later; what was saved before is loaded.
    assert (first.curve_step >= 1, second.curve_step >= 5) == (True, True)
    for before, after in pairwise(run_.passes):
        whole = max(before.whole, default=0)
        assert after.loaded_step == whole
        assert whole in (before.steps[-1] - 1, before.steps[-1] - 2)
        assert 0 < after.first_row_at - run_.struck[before.number - 1].at < 60
    starts = starts_of(record)
    assert [start["returncode"] for start in starts] == [137, 137, 0]
    assert run_.complete
    for path in record.folder.glob("output/*/helper"):
        assert not psutil.pid_exists(int(path.read_text()))
    (again,) = run(plan_of(struck_job("killed", 1, 5)), store, cold)
    assert again == replace(record, reused=True)


def test_what_a_killed_program_may_not_have_saved_is_set_aside(store, cold):
    """It was killed after the row of step 4: its checkpoint may be half of one. So is row 5."""
    cold = replace(cold, steps_so_far=steps_so_far)
    (record,) = run(plan_of(struck_job("slow", 4, mode="slow")), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    run_ = read_run(record.folder)
    assert [each.steps.tolist() for each in run_.passes] == [[1, 2, 3, 4], [3, 4, 5, 6, 7, 8]]
    assert [each.loaded_step for each in run_.passes] == [0, 2]


def test_a_file_that_is_written_last_says_that_the_newest_checkpoint_is_complete(store, cold):
    """A program that follows a pointer to its newest checkpoint goes on from that one."""
    cold = replace(cold, steps_so_far=steps_so_far)
    (record,) = run(plan_of(struck_job("folders", 4, mode="folders")), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert [each.loaded_step for each in read_run(record.folder).passes] == [0, 4]


@pytest.mark.parametrize("mode", ["cut", "cut folders"])
def test_a_checkpoint_of_a_program_without_the_probe_is_cut_and_set_aside(store, cold, mode):
    """Every process is killed, and the checkpoint before it is what the program goes on from."""
    cold = replace(cold, steps_so_far=steps_so_far)
    (record,) = run(plan_of(struck_job("cut", 4, kind=FaultKind.CKPT_TORN, mode=mode)), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    run_ = read_run(record.folder)
    (struck,) = run_.struck
    assert (struck.kind, struck.step, struck.number, struck.torn) == ("ckpt_torn", 4, 1, True)
    assert struck.curve_step == 5
    assert [each.steps.tolist() for each in run_.passes] == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
    assert [each.loaded_step for each in run_.passes] == [0, 2]
    assert (record.folder / "output" / "start-02" / "aside").read_text() == "4"  # of "4 "
    for path in record.folder.glob("output/*/helper"):
        assert not psutil.pid_exists(int(path.read_text()))


@pytest.mark.parametrize(
    ("steps", "strikes"),
    [(range(1, 4), False), (range(1, 5), False), (range(1, 6), True), (range(5, 9), False)],
    ids=["too early", "not saved yet", "saved", "of an earlier start"],
)
def test_a_checkpoint_is_cut_by_the_start_that_has_saved_it(steps, strikes):
    job = struck_job("cut", 4, kind=FaultKind.CKPT_TORN)
    assert (next_by_curve(job, steps, ()) is not None) == strikes


@pytest.mark.parametrize(("mode", "every"), [("ahead", 2), ("well", 100)])
def test_a_checkpoint_is_not_cut_if_it_is_not_there_or_a_later_one_is(store, cold, mode, every):
    cold = replace(cold, steps_so_far=steps_so_far)
    job = struck_job("whole", 4, kind=FaultKind.CKPT_TORN, mode=mode, checkpoint_every=every)
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    run_ = read_run(record.folder)
    assert not run_.struck
    assert [each.steps.tolist() for each in run_.passes] == [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("mode", "code"),
    [("saves", None), ("well", 143), ("deaf", None), ("late folders", None)],
)
def test_a_program_without_the_probe_is_asked_to_stop(store, cold, mode, code):
    """One that stops with 0 has saved its last step; of others nobody knows.

    Nobody gets more time than the fault gives, not that which others have when a run is ended.
    """
    job = struck_job("asked", 5, kind=FaultKind.PREEMPT, mode=mode, grace_s=1.0)
    cold = replace(cold, steps_so_far=steps_so_far, grace_s=20.0)
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    run_ = read_run(record.folder)
    (struck,) = run_.struck
    assert (struck.kind, struck.step, struck.number, struck.rank) == ("preempt", 5, 1, None)
    first, second = run_.passes
    last = int(first.steps[-1])
    assert last >= struck.curve_step >= 5
    assert second.loaded_step == (last if mode == "saves" else (last - 1) // 2 * 2)
    first, second = starts_of(record)
    assert second["returncode"] == 0
    assert first["returncode"] == code
    for path in record.folder.glob("output/*/helper"):
        assert not psutil.pid_exists(int(path.read_text()))


def test_a_rank_without_the_probe_is_made_to_hang_and_started_again(store, cold):
    job = struck_job("hung", 5, kind=FaultKind.HANG, within_s=3.0)
    (record,) = run(plan_of(job), store, replace(cold, steps_so_far=steps_so_far, grace_s=1.0))
    assert record.status is RunStatus.FINISHED, record.error
    run_ = read_run(record.folder)
    (struck,) = run_.struck
    assert (struck.kind, struck.number, struck.rank) == ("hang", 1, 0)
    first, second = run_.passes
    assert second.loaded_step == (int(first.steps[-1]) - 1) // 2 * 2
    assert second.first_row_at - struck.at > 1.5  # half of the time to recover
    assert [start["returncode"] for start in starts_of(record)] == [None, 0]


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_only_a_rank_of_this_call_is_struck(tmp_path, variable):
    """Nor what a rank has started, or another process with the same variables."""
    variables = {**os.environ, "CONVERGE_FAILURES": str(tmp_path / "failures.json")}
    launcher = f"{variable}=1 sh -c 'sleep 60 & wait' & wait"
    agent = subprocess.Popen(["sh", "-c", 'sh -c "$0" & wait', launcher], env=variables)
    other = None
    try:
        while not ranks_of(tmp_path, agent.pid, [1]):
            assert agent.poll() is None
        other = subprocess.Popen(["sleep", "60"], env={**variables, variable: "1"})
        found = ranks_of(tmp_path, agent.pid, [1])
        (launched,) = psutil.Process(agent.pid).children()
        assert {rank: each.ppid() for rank, each in found.items()} == {1: launched.pid}
        assert not ranks_of(tmp_path / "another call", agent.pid, [1])
        assert not ranks_of(tmp_path, agent.pid, [0, 1])
    finally:
        signal_tree(psutil.Process(agent.pid), signal.SIGKILL)
        for process in filter(None, (agent, other)):
            process.kill()
            process.wait()


def test_a_program_that_ends_before_its_curve_has_the_step_was_not_killed(store, cold):
    cold = replace(cold, steps_so_far=steps_so_far)
    (record,) = run(plan_of(struck_job("buffered", 5, mode="buffered")), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert not read_run(record.folder).struck
    assert [start["returncode"] for start in starts_of(record)] == [0]


def test_a_program_that_dies_again_without_a_later_checkpoint_is_not_started_a_third_time(
    store, cold
):
    job = broken(recoverable_job("dies", mode="torn then dies"), Fault(FaultKind.KILL, 6))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error  # step 2 was saved, so it is restarted
    job = broken(recoverable_job("never", mode="forget then dies"), Fault(FaultKind.KILL, 6))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    assert len(passes_of(record)) == 1
    assert record.error.message.startswith(
        "failed, but not by a fault of the script, and a restart would come no further without a "
    )


def test_a_program_is_restarted_from_its_newest_whole_checkpoint(store, cold):
    faults = (Fault(FaultKind.KILL, 1), Fault(FaultKind.KILL, 4), Fault(FaultKind.PREEMPT, 5))
    (record,) = run(plan_of(broken(recoverable_job("broken"), *faults)), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert passes_of(record) == [(0, []), (0, [1, 2, 3]), (2, [3, 4, 5]), (4, [5, 6])]


AS_RANK = ("sh", "-c", 'RANK=0 "$0" "$@" & wait $!')
"""A launcher that passes no SIGTERM on, as Composer's."""


@pytest.mark.parametrize(
    ("mode", "launcher", "loaded"),
    [("stops", AS_RANK, 5), ("stops", (), 5), ("well", AS_RANK, 4), ("deaf", (), 4)],
)
def test_ranks_are_asked_to_stop_whatever_has_started_them(store, cold, mode, launcher, loaded):
    """Those that are found; else the program. One that stops with 0 has done as it was asked."""
    preempted = Fault(FaultKind.PREEMPT, 5, grace_s=1.0)
    job = broken(recoverable_job("asked", mode=mode), preempted)
    command = job.spec.trainer.settings
    command = replace(command, argv=(*launcher, *command.argv))
    job = replace(job, spec=replace(job.spec, trainer=trained_by(command)))
    (record,) = run(plan_of(job), store, replace(cold, grace_s=1.0))
    assert record.status is RunStatus.FINISHED, record.error
    assert passes_of(record) == [(0, [1, 2, 3, 4, 5]), (loaded, list(range(loaded + 1, 7)))]
    first, second = json.loads((record.folder / "record.json").read_text())["calls"]
    assert (first["returncode"] == 0, second["returncode"]) == (mode == "stops", 0)


def test_an_interrupted_program_continues_from_its_newest_whole_checkpoint(store, cold):
    job = recoverable_job("again", mode="torn then dies")
    recovery = Recovery((), 2, RestartOwner.USER, max_restarts=0)
    job = replace(job, spec=replace(job.spec, recovery=recovery))
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert passes_of(record) == [(0, [1, 2, 3, 4, 5]), (2, [3, 4, 5, 6])]


def test_a_program_that_overwrites_one_file_goes_on_from_what_it_last_saved(store, cold):
    one = recoverable_job("one", checkpoints="last.txt")
    saved = broken(one, Fault(FaultKind.KILL, 4))
    # Its second save did not return, yet the file has it.
    unsaved = recoverable_job("unsaved", checkpoints="last.txt", mode="torn")
    unsaved = broken(unsaved, Fault(FaultKind.KILL, 5), max_restarts=1)
    segments = elastic(recoverable_job("segments", checkpoints="last.txt"), (3, 1), (6, 1))
    records = run(plan_of(saved, unsaved, segments), store, cold)
    assert [record.status for record in records] == [RunStatus.FINISHED] * 3
    assert list(map(passes_of, records)) == [
        [(0, [1, 2, 3]), (2, [3, 4, 5, 6])],
        [(0, [1, 2, 3, 4]), (4, [5, 6])],
        [(0, [1, 2, 3]), (3, [4, 5, 6])],
    ]


def test_a_checkpoint_of_a_program_whose_save_did_not_return_is_set_aside(store, cold):
    job = broken(recoverable_job("torn", mode="torn"), Fault(FaultKind.KILL, 5), max_restarts=1)
    (record,) = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED, record.error
    assert passes_of(record) == [(0, [1, 2, 3, 4]), (2, [3, 4, 5, 6])]
