"""Programs of one's own that break their promises: a clear sentence, and nothing left behind."""

import json
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import psutil
import pytest
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS, warm_torch

ROOT = Path(__file__).parents[2]
HEAD = """
schema = 1
name = "broken_promises"
repeats = []
[trainer]
kind = "command"
toolchain = "torchtitan-0.3.0"
command = [
  "broken_promises.py", "--checkpoints", "{checkpoint_dir}", "--resume-from", "{resume_from}",
  "--every", "{checkpoint_every}", "--steps", "{steps}", "--stop-at", "{stop_at}",
  "--seed", "{seed}",
  "--global-batch", "{global_batch_size}", "--micro-batch", "{local_batch_size}",
]
environment = { PROGRAM = "{config.program}", OWN_PORT = "A_FREE_ONE", RECOVERABLE = "FOLDER" }
[trainer.checkpoints]
name = "step-{step}.pt"
[trainer.config]
training = { steps = 8, global_batch_size = 8, local_batch_size = 4 }
program = "Given"
[probe]
cadence = [0, 1, 5]
[control]
name = "ddp2"
parallelism = { dp_replicate = 2 }
waive = ["control-is-repeated"]
"""
RESIZED = """
[[test]]
kind = "elastic"
name = "{0}"
set = {{ program = "{0}" }}
segments = [{{ until = 4, dp_replicate = 2 }}, {{ until = 8, dp_replicate = 1 }}]
"""
BROKEN = """
[[test]]
kind = "fault"
name = "{0}"
set = {{ program = "{0}" }}
parallelism = {{ dp_replicate = 2 }}
checkpoint_every = 4
faults = [{{ FAULT, step = 6 }}]
"""
KILL = 'kind = "kill", rank = 1'
IN_PLACE = BROKEN.replace("FAULT", KILL).replace("faults", 'restarts = "torchrun"\nfaults')
PREEMPT = 'kind = "preempt"'
SETS = {
    "IgnoresWhatItIsGiven": RESIZED,
    "SkipsAStep": RESIZED,
    "NeverWhole": RESIZED,
    "EndsEarly": RESIZED,
    "TwoRanksOnly": RESIZED,
    "StopsTooLate": BROKEN.replace("FAULT", PREEMPT),
    "SavesTooLate": BROKEN.replace("FAULT", PREEMPT + ", saves = true"),
    "NeverStops": BROKEN.replace("FAULT", PREEMPT),
    "LeavesAtSigterm": BROKEN.replace("FAULT", PREEMPT),
    "EndsWithZero": BROKEN.replace("FAULT", KILL),
    "KeepsItsPort": BROKEN.replace("FAULT", KILL),
    "KeepsItsPortInPlace": IN_PLACE,
    "NeedsAPort": IN_PLACE,
}
PORTS = ("KeepsItsPort", "KeepsItsPortInPlace", "NeedsAPort")
"""Sets that run alone, and in the real toolchain: forks of a server are no children of converge."""
TAKEN = "rank 0: torchrun gave up (max_restarts = 3): OSError: [Errno 98] Address already in use"
LOOK_AT = ": another process listens on the port; `ss -ltnp` shows which. End it, or take port 0, "
SAYS = {
    "IgnoresWhatItIsGiven": (
        "FAIL",
        "the program does not go on from the checkpoint of step 4: pass 2 starts from the initial",
    ),
    "SkipsAStep": ("FAIL", "the program does not go on from the checkpoint of step 4: "),
    "NeverWhole": ("ERROR", "the run crashed: rank 0: segment 1 (steps 1 to 4): "),
    "EndsEarly": ("ERROR", "every rank ended with exit code 0, but step 8 was not reached"),
    "TwoRanksOnly": ("ERROR", "crashed at the resume after step 4 (DDP 2 -> one rank): "),
    "StopsTooLate": ("PASS", ""),
    "SavesTooLate": (
        "INVALID",
        "training goes on from step 4. By saves = true it saves before it stops, for which it has ",
    ),
    "NeverStops": ("INVALID", "did not end pass 1, which went on to step 8: the steps after SIG"),
    "LeavesAtSigterm": ("PASS", ""),
    "EndsWithZero": ("FAIL", "every rank ended with exit code 0 after kill at step 6, but step 8"),
    "KeepsItsPort": ("PASS", ""),
    "KeepsItsPortInPlace": ("ERROR", TAKEN),
    "NeedsAPort": ("ERROR", TAKEN),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What report.json says of each set but those of a port."""
    names = [name for name in SETS if name not in PORTS]
    return run(tmp_path_factory.mktemp("broken_promises"), names, warm_torch())


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(folder, names, toolchains, port=None):
    shutil.copy(Path(__file__).with_name("broken_promises.py"), folder)
    head = HEAD.replace("A_FREE_ONE", str(port or free_port()))
    if any(SETS[name] == IN_PLACE for name in names):  # torchrun repeats the command as it is
        head = head.replace('"--resume-from", "{resume_from}",', "")
    head = head.replace("FOLDER", str(ROOT / "experiments" / "recoverable"))
    experiment = folder / "broken_promises.toml"
    experiment.write_text(head + "".join(SETS[name].format(name) for name in names))
    result = subprocess.run(
        [warm_python(), "-m", "converge_harness", "run", str(experiment), "--out", "out"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "CONVERGE_TOOLCHAINS": str(toolchains),
            "CONVERGE_STORE": str(folder / "store"),
            "CONVERGE_HISTORY": str(folder / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert (folder / "out" / "report.json").is_file(), result.stdout + result.stderr
    left = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(folder)]
    assert not left
    tests = json.loads((folder / "out" / "report.json").read_text())["tests"]
    return {test["name"]: test for test in tests}


def require(test, name):
    verdict, words = SAYS[name]
    assert test["verdict"] == verdict, test["cause"]
    assert words in test["cause"]


@pytest.mark.parametrize("name", [name for name in SETS if name not in PORTS])
def test_a_program_that_breaks_its_promise_is_named(judged, name):
    require(judged[name], name)


def test_what_was_lost_by_stopping_too_late_is_reported(judged):
    found = judged["StopsTooLate"]
    struck = next(each for each in found["checks"] if each["name"] == "faults-struck")
    assert "pass 1 saved no step after SIGTERM at step 6" in struck["detail"]
    assert [each["loaded_step"] for each in found["passes"]] == [0, 4]


def test_what_a_start_leaves_behind_is_ended_before_the_next(tmp_path):
    require(run(tmp_path, ["KeepsItsPort"], TOOLCHAINS)["KeepsItsPort"], "KeepsItsPort")


def test_what_a_start_leaves_behind_is_in_the_way_of_torchruns_own_restart(tmp_path):
    """And is ended with the run."""
    test = run(tmp_path, ["KeepsItsPortInPlace"], TOOLCHAINS)["KeepsItsPortInPlace"]
    require(test, "KeepsItsPortInPlace")
    assert LOOK_AT in test["cause"]


def test_another_program_takes_the_port_before_torchrun_has_restarted_a_rank(tmp_path):
    port = free_port()
    with ThreadPoolExecutor() as beside, ExitStack() as taken:
        ended = Event()
        taking = beside.submit(take_once_free, port, ended, taken)
        try:
            test = run(tmp_path, ["NeedsAPort"], TOOLCHAINS, port)["NeedsAPort"]
        finally:
            ended.set()
        assert taking.result()
    require(test, "NeedsAPort")
    assert LOOK_AT in test["cause"]


def take_once_free(port, ended, taken):
    """Listen on a port as soon as the rank that holds it has died; whether that came about."""
    held = False
    while not ended.wait(0.02):
        if not held:
            with socket.socket() as trying:
                held = trying.connect_ex(("127.0.0.1", port)) == 0
            continue
        try:
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return True
    return False
