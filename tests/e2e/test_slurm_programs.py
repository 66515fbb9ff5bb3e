"""Programs of a user's own on a real Slurm of two nodes, through the real command line.

By torchrun, by srun alone, by the launchers of Composer and DeepSpeed, and without the probe; right
ones pass on one node and on two, also once they were requeued, and what went wrong is told in the
words of the rank. Ranks are forks of one server on this machine.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from cut_down import need
from held_program import HELD, TRAINERS
from real_matrices import ROOT
from slurm_daemons import SlurmDaemons, slurm_daemons
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS, warm_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CLUSTER = """
schema = 1
launcher = "slurm"
repeats = []
[cluster]
ranks_per_node = 2
device = "cpu"
max_jobs = 2
poll_s = 0.5
sbatch = ["--overcommit"]
# Every node is this machine; elsewhere the first one's name leads to it.
environment = { GLOO_SOCKET_IFNAME = "lo", CONVERGE_HEAD_NODE = "127.0.0.1", FLAG = "of the site" }
"""
PROBED = f"""
{CLUSTER}
[trainer]
kind = "command"
command = [
    "{TRAINERS}/probed_trainer.py", "--steps", "{{steps}}", "--seed", "{{seed}}",
    "--batch", "{{local_batch_size}}", "--bug", "{{config.bug}}",
]
launcher = "torchrun"
toolchain = "torchtitan-0.3.0"
[trainer.config]
bug = "none"
training = {{ steps = 4, local_batch_size = 2, global_batch_size = 4, seq_len = 16 }}
[control]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
waive = ["control-is-repeated"]
[[test]]
name = "two_nodes"
parallelism = {{ dp_replicate = 4 }}
set = {{ training.local_batch_size = 1 }}
[[test]]
name = "raise"
parallelism = {{ dp_replicate = 4 }}
set = {{ training.local_batch_size = 1, bug = "raise" }}
"""
BY_TORCHRUN = f"""
{PROBED}
[[test]]
name = "no averaging"
parallelism = {{ dp_replicate = 2 }}
set = {{ bug = "no averaging" }}
"""
BY_SRUN = f"""
{PROBED}
[[test]]
name = "hang"
parallelism = {{ dp_replicate = 2 }}
set = {{ bug = "hang" }}
""".replace('launcher = "torchrun"', 'launcher = "srun"').replace(
    "command = [", 'command = ["{python}",'
)
CURVES = f"""
{CLUSTER}
[trainer]
kind = "command"
command = [
    "{TRAINERS}/curve_trainer.py", "--steps", "{{steps}}", "--seed", "{{seed}}",
    "--output", "{{output}}", "--bug", "{{config.bug}}",
]
toolchain = "torchtitan-0.3.0"
probe = false
curves = "{{output}}/loss.csv"
columns = {{ step = "iteration", loss = "train/loss" }}
environment = {{ FLAG = "it's \\"{{config.bug}}\\" $HOME" }}
[trainer.config]
bug = "none"
training = {{ steps = 12, local_batch_size = 4, global_batch_size = 4 }}
[control]
name = "one"
parallelism = {{}}
waive = ["control-is-repeated"]
[[test]]
name = "two_nodes"
parallelism = {{ dp_replicate = 4 }}
set = {{ training.local_batch_size = 1 }}
[[test]]
name = "raise"
parallelism = {{}}
set = {{ bug = "raise" }}
[[test]]
name = "held"
parallelism = {{}}
set = {{ bug = "held" }}
"""


HANGS = f"""
{CURVES[: CURVES.index("[[test]]")]}[[test]]
name = "hang"
parallelism = {{}}
set = {{ bug = "hang" }}
"""


REQUEUED = f"""
{CLUSTER}
checkpoint_every = 4
{HELD}[[test]]
name = "forgetful"
parallelism = {{ dp_replicate = 2 }}
set = {{ hold = "6", mistake = "optimizer_not_saved" }}
"""


RESIZED = f"""
{CLUSTER}
{HELD[: HELD.index("[[test]]")]}[[test]]
kind = "elastic"
name = "right"
segments = [
    {{ until = 3, dp_replicate = 2 }},
    {{ until = 6, dp_replicate = 1 }},
    {{ until = 8, dp_replicate = 4, local_batch_size = 2 }},
]
[[test]]
kind = "elastic"
name = "forgetful"
segments = [{{ until = 4, dp_replicate = 2 }}, {{ until = 8, dp_replicate = 1 }}]
set = {{ mistake = "optimizer_not_saved" }}
"""


KILLED = f"""
{CLUSTER}
{HELD[: HELD.index("[[test]]")]}[[test]]
kind = "fault"
name = "in_place"
parallelism = {{ dp_replicate = 4 }}
set = {{ training.local_batch_size = 2 }}
checkpoint_every = 4
restarts = "torchrun"
faults = [{{ kind = "kill", step = 6, rank = 3 }}]
[[test]]
kind = "fault"
name = "by_converge"
parallelism = {{ dp_replicate = 2 }}
checkpoint_every = 4
faults = [{{ kind = "kill", step = 6 }}]
""".replace('environment.RESUME_FROM = "{resume_from}"\n', "")


def by_srun(text: str) -> str:
    """The same with one task per rank, and no launcher."""
    return text.replace(
        'kind = "command"\ncommand = [',
        'kind = "command"\nlauncher = "srun"\ncommand = ["{python}",',
    )


BY_BOTH = pytest.mark.parametrize("by", [str, by_srun], ids=["torchrun", "srun"])
"""As it is written, with torchrun, and without."""


def on_two_nodes(text: str) -> str:
    """The same with four ranks in the test sets."""
    before, tests = text.split("[[test]]", 1)
    local = "training.local_batch_size = 2, hold ="
    of_four = tests.replace("dp_replicate = 2", "dp_replicate = 4").replace("hold =", local)
    return f"{before}[[test]]{of_four}"


SHORT = """
[control]
waive = ["control-is-repeated"]
[trainer.config.training]
steps = 4
[probe]
cadence = [0, 1, 3]
"""


class Site(NamedTuple):
    """An experiment, and the cluster that it is for."""

    cluster: SlurmDaemons
    folder: Path
    started: list[subprocess.Popen[str]]
    toolchains: Path

    def start(self, command: str, *more: str) -> subprocess.Popen[str]:
        out = ("--out", str(self.folder / "out")) if command in ("run", "collect") else ()
        where = (str(self.folder / "x.toml"), "--store", str(self.folder / "store"), *out)
        process = subprocess.Popen(
            [warm_python(), "-m", "converge_harness", command, *where, *more],
            cwd=ROOT,
            env={
                **self.cluster.environment,
                "CONVERGE_TOOLCHAINS": str(self.toolchains),
                "CONVERGE_HISTORY": str(self.folder / "history.sqlite"),
                "XDG_CONFIG_HOME": str(self.folder),  # no cluster file of a person
                # Of a launcher around converge: no program may take itself for its rank.
                "RANK": "7",
                "WORLD_SIZE": "8",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def converge(self, command: str, *more: str) -> tuple[int, str]:
        """Exit code, and all that was printed."""
        return ended(self.start(command, *more))

    def said(self) -> dict[str, tuple[str, str]]:
        """Verdict and cause of every test set."""
        report = json.loads((self.folder / "out" / "report.json").read_text())
        return {test["name"]: (test["verdict"], test["cause"]) for test in report["tests"]}

    def run_folder(self, name: str) -> Path | None:
        found = list((self.folder / "store" / "runs").glob(f"{name}-*"))
        return found[0] if found else None

    def record(self, name: str) -> dict:
        return json.loads((self.run_folder(name) / "record.json").read_text())


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        printed, _ = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
    return process.returncode, printed


def wait(until, what: str, process: subprocess.Popen[str] | None = None) -> None:
    """Until it holds; fails once a command that was started for it has ended."""
    deadline = time.monotonic() + 300
    while not until():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture
def site(slurm, tmp_path):
    sites = []

    def site(text: str, toolchains: Path | None = None, cluster: SlurmDaemons = slurm) -> Site:
        folder = tmp_path / "it's a store"
        folder.mkdir()
        (folder / "x.toml").write_text(text)
        sites.append(Site(cluster, folder, [], toolchains or warm_torch()))
        return sites[-1]

    yield site
    # After an error there may be commands that wait, and jobs that would never end.
    for process in (each for one in sites for each in one.started if each.poll() is None):
        process.kill()
        process.communicate()
    slurm.ask("scancel", "--user=root", "--quiet")
    slurm.wait_until_idle()


def test_a_program_by_torchrun_is_judged_on_one_node_and_on_two(site):
    matrix = site(BY_TORCHRUN)
    code, printed = matrix.converge("run")
    assert code == 1, printed
    said = matrix.said()
    assert said["two_nodes"][0] == "PASS", said
    assert said["no averaging"][0] == "FAIL", said
    assert "a reduction of these gradients over dp_replicate is missing" in said["no averaging"][1]
    assert said["raise"] == ("ERROR", said["raise"][1])
    assert "rank 3: ValueError: told to raise" in said["raise"][1]
    assert matrix.record("two_nodes")["cluster"]["nodes"] == "node[1-2]"
    assert matrix.record("ddp2")["cluster"]["nodes"] in ("node1", "node2")


def test_srun_starts_every_rank_itself_and_jobs_outlive_the_shell(site):
    matrix = site(BY_SRUN)
    code, printed = matrix.converge("submit")
    assert code == 0, printed
    assert "4 submitted" in printed
    for name in ("ddp2", "two_nodes", "raise"):
        wait(lambda name=name: (matrix.run_folder(name) / "ended.json").exists(), name)
    hanging = matrix.run_folder("hang")
    steps = hanging / "metrics.jsonl.part"
    wait(lambda: steps.exists() and b'"step": 1' in steps.read_bytes(), "hang")
    code, printed = matrix.converge("status")
    assert code == 0, printed
    code, printed = matrix.converge("cancel", "--only", "hang")
    assert code == 0, printed
    code, printed = matrix.converge("collect")
    assert code == 3, printed
    said = matrix.said()
    assert said["two_nodes"][0] == "PASS", said
    assert "rank 3: ValueError: told to raise" in said["raise"][1]
    assert matrix.record("hang")["status"] == "cancelled"
    assert "after step 1 of 4" in matrix.record("hang")["error"]["message"]


def test_a_program_that_leaves_a_curve_needs_nothing_of_converge_on_the_nodes(site):
    matrix = site(CURVES)
    process = matrix.start("run")
    wait(
        lambda: (folder := matrix.run_folder("held")) and (folder / "output" / "held").exists(),
        "held",
    )
    job = json.loads((matrix.run_folder("held") / "submission.json").read_text())["job_id"]
    matrix.cluster.ask("scontrol", "requeue", job)
    code, printed = ended(process)
    assert code == 3, printed
    said = matrix.said()
    assert said["two_nodes"][0] == "PASS", said
    assert said["raise"][0] == "ERROR", said
    assert "rank 0: ValueError: told to raise" in said["raise"][1]
    assert said["held"][0] == "PASS", said
    assert matrix.record("held")["cluster"]["restarts"] == 1
    flag = (matrix.run_folder("two_nodes") / "output" / "flag").read_text()
    assert flag == 'it\'s "none" $HOME'


def test_a_job_that_slurm_requeues_and_holds_is_cancelled_with_what_to_look_at(site):
    matrix = site(CURVES)
    slurm = matrix.cluster
    for node in slurm.nodes:
        slurm.ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    process = matrix.start("run", "--only", "two_nodes")

    def job_id() -> str | None:
        folder = matrix.run_folder("one")
        path = folder / "submission.json" if folder else None
        return json.loads(path.read_text())["job_id"] if path and path.exists() else None

    wait(job_id, "one")
    job = job_id()
    for node in slurm.nodes:  # where slurmd would make the job's folder
        (slurm.folder / f"spool.{node}" / f"job{int(job):05}").touch()
        slurm.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
    code, printed = ended(process)
    assert code == 3, printed
    record = matrix.record("one")
    assert record["status"] == "refused"
    assert "requeued it and holds it (launch failed requeued held)" in record["error"]["message"]
    slurm.wait_until_idle()
    assert not slurm.ask("squeue", "--noheader", f"--jobs={job}", "--states=PENDING,RUNNING")


def test_a_job_whose_node_reboots_again_and_again_is_held_by_slurm_and_ends_refused(site):
    """Slurm 22.05 counts nodes that come back without the job, and no requeues by scontrol."""
    soon = {"BatchStartTimeout": 1, "MessageTimeout": 2}  # such a job is missed after 3 seconds
    with slurm_daemons(settings=soon) as slurm:
        matrix = site(HANGS, cluster=slurm)
        code, printed = matrix.converge("submit")
        assert code == 0, printed
        wait(lambda: (run := matrix.run_folder("one")) and (run / "ended.json").exists(), "one")
        run = matrix.run_folder("hang")
        job = json.loads((run / "submission.json").read_text())["job_id"]

        def told(*columns: str) -> list[str]:
            asked = ",".join(f"{each}:40" for each in columns)
            return slurm.ask("squeue", "--noheader", f"--jobs={job}", f"--Format={asked}").split()

        for start in range(5):  # MAX_BATCH_REQUEUE, which no setting changes
            wait(lambda n=start: told("State", "RestartCnt") == ["RUNNING", str(n)], f"{start}")
            (node,) = told("NodeList")
            wait((run / "output" / "loss.csv").exists, f"start {start}")
            time.sleep(4)
            slurm.kill(node)
            slurm.start(node)
        wait(lambda: told("Reason") == ["JobHoldMaxRequeue"], "held")
        code, printed = matrix.converge("status")
        assert code == 0, printed
        assert "1 finished, 1 refused" in printed
        assert "find out why Slurm requeues the job (slurm.log in its run folder)" in printed
        code, printed = matrix.converge("collect")
        assert code == 3, printed
        held = "was requeued 5 times, more often than the cluster allows (JobHoldMaxRequeue): find"
        record = matrix.record("hang")
        assert record["status"] == "refused"
        assert record["error"]["message"].startswith(held)
        verdict, cause = matrix.said()["hang"]
        assert verdict == "ERROR"
        assert f"the run was refused by the scheduler: {held}" in cause
        assert told("State") == []
        slurm.wait_until_idle()


@BY_BOTH
def test_a_requeued_program_goes_on_from_its_own_checkpoint(site, by):
    matrix = site(by(REQUEUED))
    process = matrix.start("run")
    requeue(matrix, "right", "forgetful")
    code, printed = ended(process)
    assert code == 1, printed
    of_requeued(matrix)


def requeue(matrix: Site, *names: str) -> None:
    """Have Slurm requeue jobs once they stand still."""
    for name in names:
        wait(
            lambda name=name: (run := matrix.run_folder(name)) and (run / "holding").exists(), name
        )
        job = json.loads((matrix.run_folder(name) / "submission.json").read_text())["job_id"]
        matrix.cluster.ask("scontrol", "requeue", job)


def of_requeued(matrix: Site) -> None:
    """Both sets of ``REQUEUED`` went on from step 4, and one forgot its optimizer."""
    tests = {
        test["name"]: test
        for test in json.loads((matrix.folder / "out" / "report.json").read_text())["tests"]
    }
    for name, test in tests.items():
        passes = [(each["steps"], each["loaded_step"], each["ended"]) for each in test["passes"]]
        assert passes == [([1, 5], 0, "interrupted"), ([5, 8], 4, "ended")], name
        assert matrix.record(name)["cluster"]["restarts"] == 1
    found = {check["name"]: check["outcome"] for check in tests["right"]["checks"]}
    asked = ("passes-continuous", "state-restored", "data-resumed", "replays-agree")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    assert tests["right"]["verdict"] == "PASS", tests["right"]["cause"]
    assert tests["forgetful"]["verdict"] == "FAIL"
    assert (
        "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost"
        in tests["forgetful"]["cause"]
    )
    log = (matrix.run_folder("right") / "slurm.log").read_text()
    assert f"goes on from {matrix.run_folder('right')}/checkpoint/step-4.pt" in log


def held(matrix: Site, name: str, control: str = "ddp2") -> tuple[subprocess.Popen[str], str]:
    """The running command and the job of a set that stands still; its control has ended."""
    process = matrix.start("run", "--only", name)
    wait(lambda: (run := matrix.run_folder(name)) and (run / "holding").exists(), name, process)
    wait((matrix.run_folder(control) / "record.json").exists, control)
    submission = json.loads((matrix.run_folder(name) / "submission.json").read_text())
    return process, submission["job_id"]


def judged(matrix: Site, name: str, until: int = 8) -> dict:
    """What report.json says of a set that was interrupted once, in step 6."""
    report = json.loads((matrix.folder / "out" / "report.json").read_text())
    (test,) = report["tests"]
    assert test["name"] == name
    passes = [(each["steps"], each["loaded_step"], each["ended"]) for each in test["passes"]]
    assert passes == [([1, 5], 0, "interrupted"), ([5, until], 4, "ended")], test["cause"]
    return test


@BY_BOTH
def test_a_program_on_two_nodes_goes_on_once_one_of_them_died(site, by):
    matrix = site(on_two_nodes(by(REQUEUED)))
    slurm = matrix.cluster
    process, job = held(matrix, "right")
    nodes = slurm.ask("squeue", "--noheader", f"--jobs={job}", "-o", "%N").strip()
    assert nodes == "node[1-2]"
    slurm.kill("node2")
    slurm.down("node2")
    slurm.start("node2")
    code, printed = ended(process)
    assert code == 0, printed
    test = judged(matrix, "right")
    found = {check["name"]: check["outcome"] for check in test["checks"]}
    asked = ("passes-continuous", "state-restored", "data-resumed", "replays-agree")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    process, job = held(matrix, "forgetful")
    slurm.ask("scontrol", "requeue", job)
    code, printed = ended(process)
    assert code == 1, printed
    cause = judged(matrix, "forgetful")["cause"]
    assert "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost" in cause
    for name in ("right", "forgetful"):
        assert matrix.record(name)["cluster"]["restarts"] == 1, name


@BY_BOTH
def test_a_program_is_resized_in_one_job(site, by):
    """Two ranks, one, and then four on two nodes."""
    matrix = site(by(RESIZED))
    code, printed = matrix.converge("run")
    assert code == 1, printed
    said = matrix.said()
    assert said["right"][0] == "PASS", said
    assert said["forgetful"][0] == "FAIL", said
    assert (
        "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost" in said["forgetful"][1]
    )
    tests = json.loads((matrix.folder / "out" / "report.json").read_text())["tests"]
    right = next(test for test in tests if test["name"] == "right")
    passes = [(each["steps"], each["loaded_step"], each["world_size"]) for each in right["passes"]]
    assert passes == [([1, 3], 0, 2), ([4, 6], 3, 1), ([7, 8], 6, 4)]
    asked = {"passes-continuous", "state-restored", "data-resumed"}
    found = {check["name"]: check["outcome"] for check in right["checks"]}
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    assert matrix.record("right")["cluster"]["nodes"] == "node[1-2]"


def test_torchrun_restarts_a_program_on_two_nodes_and_what_needs_converge_there_is_left_out(site):
    matrix = site(KILLED)
    code, printed = matrix.converge("run")
    assert code == 3, printed
    assert "left out, so INVALID in the report: by_converge: converge does not run next" in printed
    said = matrix.said()
    assert said["in_place"][0] == "PASS", said
    assert said["by_converge"][0] == "INVALID", said
    tests = json.loads((matrix.folder / "out" / "report.json").read_text())["tests"]
    killed = next(test for test in tests if test["name"] == "in_place")
    assert [(each["steps"], each["loaded_step"]) for each in killed["passes"]] == [
        ([1, 5], 0),
        ([5, 8], 4),
    ]
    found = {check["name"]: check["outcome"] for check in killed["checks"]}
    asked = ("faults-struck", "state-restored", "replays-agree", "recovers-in-time")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    assert matrix.record("in_place")["cluster"]["nodes"] == "node[1-2]"


def test_a_program_that_reached_its_time_limit_goes_on_when_submitted_again(site):
    matrix = site(REQUEUED)
    process, job = held(matrix, "right")
    # The shortest limit there is, and it is over, or soon will be.
    matrix.cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    code, printed = ended(process)
    assert code == 3, printed
    assert matrix.record("right")["status"] == "timed out"
    code, printed = matrix.converge("run", "--only", "right")
    assert code == 0, printed
    assert judged(matrix, "right")["verdict"] == "PASS"
    assert matrix.record("right")["cluster"]["restarts"] == 0  # another job


WEIGHTS = "tokens, microbatches or ranks have other weights in the mean"
GRADIENTS = "31 of 31 gradients are wrong in direction at step 1, while the loss is the same"


def of_framework(site, name: str, toolchain: str, more: str, cluster: str = "") -> Site:
    """An experiment of Composer or DeepSpeed without repeats, and with more keys and tables.

    In the real toolchains: these launchers start cold.
    """
    need(toolchain)
    text = (ROOT / "experiments" / f"{name}.toml").read_text() + more
    text = text.replace("\n[cluster]\n", f"\nrepeats = []\n[cluster]\npoll_s = 0.5\n{cluster}")
    matrix = site(text, TOOLCHAINS)
    for each in (ROOT / "experiments").iterdir():
        (matrix.folder / each.name).symlink_to(each)
    return matrix


@pytest.mark.parametrize(
    ("name", "toolchain", "right", "wrong", "cause"),
    [
        ("slurm_composer", "composer-0.32.1", "fsdp2_micro1", "by_samples_micro2", WEIGHTS),
        ("slurm_deepspeed", "deepspeed-0.19.8", "zero2", "zero2_by_loop", GRADIENTS),
    ],
    ids=["composer", "deepspeed"],
)
def test_the_launcher_of_a_framework_starts_the_ranks(site, name, toolchain, right, wrong, cause):
    """The right set is requeued at once; without ``checkpoint_every`` it starts over."""
    matrix = of_framework(site, name, toolchain, SHORT)
    process = matrix.start("run", "--only", right, wrong)

    def started() -> bool:
        run = matrix.run_folder(right)
        return run is not None and any(run.glob("logs/call-*/*"))

    wait(started, right, process)
    job = json.loads((matrix.run_folder(right) / "submission.json").read_text())["job_id"]
    matrix.cluster.ask("scontrol", "requeue", job)
    code, printed = ended(process)
    assert code == 1, printed
    said = matrix.said()
    assert said[right][0] == "PASS", said
    assert matrix.record(right)["cluster"]["restarts"] == 1
    assert said[wrong][0] == "FAIL", said
    assert cause in said[wrong][1], said
    tests = json.loads((matrix.folder / "out" / "report.json").read_text())["tests"]
    assert next(test for test in tests if test["name"] == wrong)["onset_step"] == 1


NOT_REPEATED = """
[control]
waive = ["control-is-repeated"]
"""
HELD_COMPOSER = f"""
{NOT_REPEATED}
[trainer.environment]
HOLD = "6"
[[test]]
name = "requeued"
parallelism = {{ dp_shard = 2 }}
set = {{ training.local_batch_size = 2, script = "{TRAINERS}/held_composer.py" }}
"""


def test_a_program_under_composers_launcher_is_resized_in_one_job(site):
    """Two ranks, then one."""
    matrix = of_framework(site, "slurm_composer_resume", "composer-0.32.1", NOT_REPEATED)
    code, printed = matrix.converge("run", "--only", "halved", "optimizer_not_loaded")
    assert code == 1, printed
    tests = {
        test["name"]: test
        for test in json.loads((matrix.folder / "out" / "report.json").read_text())["tests"]
    }
    for name, test in tests.items():
        passes = [
            (each["steps"], each["loaded_step"], each["world_size"]) for each in test["passes"]
        ]
        assert passes == [([1, 4], 0, 2), ([5, 12], 4, 1)], name
    found = {check["name"]: check["outcome"] for check in tests["halved"]["checks"]}
    asked = ("passes-continuous", "state-restored", "data-resumed")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    assert tests["halved"]["verdict"] == "PASS", tests["halved"]["cause"]
    assert tests["optimizer_not_loaded"]["verdict"] == "FAIL"
    assert tests["optimizer_not_loaded"]["onset_step"] == 5
    assert "optimizer state (exp_avg, exp_avg_sq)" in tests["optimizer_not_loaded"]["cause"]


def test_a_requeued_program_goes_on_under_composers_launcher(site):
    """From Composer's sharded checkpoint, in mid-epoch."""
    resume, saves = ("slurm_composer_resume", "composer-0.32.1"), "checkpoint_every = 4\n"
    matrix = of_framework(site, *resume, HELD_COMPOSER, cluster=saves)
    process, job = held(matrix, "requeued", control="fsdp2")
    matrix.cluster.ask("scontrol", "requeue", job)
    code, printed = ended(process)
    assert code == 0, printed
    test = judged(matrix, "requeued", until=12)
    found = {check["name"]: check["outcome"] for check in test["checks"]}
    asked = ("passes-continuous", "state-restored", "data-resumed", "replays-agree")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    assert matrix.record("requeued")["cluster"]["restarts"] == 1


def test_a_requeued_program_goes_on_under_deepspeeds_launcher(site):
    """The DDP script, from its own checkpoint, with and without the optimizer's state."""
    need("deepspeed-0.19.8")
    text = REQUEUED.replace("torchtitan-0.3.0", "deepspeed-0.19.8").replace(
        'kind = "command"\ncommand = [',
        'kind = "command"\nlauncher = "deepspeed"\ncommand = ["--no_local_rank",',
    )
    matrix = site(text, TOOLCHAINS)
    process = matrix.start("run")
    requeue(matrix, "right", "forgetful")
    code, printed = ended(process)
    assert code == 1, printed
    of_requeued(matrix)
