"""Batch scripts: golden files, what bash makes of them, and what may not go into one."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from batch_jobs import HOSTILE, SEGMENTS, job, program, requeued_program

from converge_harness.errors import ConfigError
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.launch.scheduler.submission import job_name
from converge_harness.launch.slurm.batch_script import batch_script
from converge_harness.model import (
    Cluster,
    Fault,
    FaultKind,
    Kind,
    Recovery,
    RestartOwner,
    Role,
    SyntheticData,
)
from converge_harness.rank.start import loopback
from converge_harness.rank.start.node import node_arguments
from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.run_folder.layout import NEWEST_CHECKPOINT
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.failure import program_error
from converge_harness.trainers.command.settings import RankLauncher
from converge_harness.trainers.command.trainer import ON_ONE_NODE

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/store/runs/run-0123456789ab")


EVERYTHING = Cluster(
    ranks_per_node=8,
    partition="gpu,gpu-large",
    account="proj-42",
    qos="high",
    time="1-12:00:00",
    gres="gpu:h100:8",
    cpus_per_rank=12,
    memory_per_node="900G",
    constraint="[rack1|rack2]&ib",
    sbatch=("--exclusive", "--mail-type=END,FAIL", '--comment="convergence of tp"'),
    srun=("--container-image=nvcr.io/nvidia/pytorch:26.01", "--container-mounts=/store"),
    container=("apptainer", "exec", "--nv", "image.sif"),
    modules=("cuda/13.0", "nccl"),
    prologue=("source /opt/site.sh", "ulimit -l unlimited  # for RDMA"),
    environment={"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"},
    hardware="H100",
    max_jobs=4,
    checkpoint_every=50,
)
ATTACKED = Cluster(
    ranks_per_node=8,
    device="cpu",
    srun=(HOSTILE,),
    container=("exec", HOSTILE),
    modules=(HOSTILE,),
    environment={"TEXT": HOSTILE},
)


def resized_program():
    """One that is started again on other ranks, from what it has saved."""
    made = program(RankLauncher.TORCHRUN, steps=30, kind=Kind.ELASTIC, segments=SEGMENTS[:2])
    command = replace(
        made.spec.trainer.settings,
        argv=("train.py", "--from={resume_from}", "--until={stop_at}"),
        environment={"UNTIL": "{stop_at}", "FOLDER": "{checkpoint_dir}"},
        checkpoints=CheckpointForm("step-{step}.pt", None),
    )
    return replace(made, spec=replace(made.spec, trainer=trained_by(command)))


OF_PROGRAMS = Cluster(
    ranks_per_node=8, cpus_per_rank=4, environment={"TEXT": "of the site", "NAME": "ib0"}
)
CASES = {
    "one_rank": (
        job("seed", ranks=1, role=Role.SEED),
        Cluster(ranks_per_node=8, device="cpu", requeue=False),
    ),
    "one_node": (
        job("fsdp8", ranks=8, note="ZeRO-3 of one node."),
        Cluster(ranks_per_node=8, partition="gpu", time="04:00:00", cpus_per_rank=8),
    ),
    "four_nodes": (
        job(
            "fsdp32",
            ranks=32,
            recovery=Recovery((), checkpoint_every=50, restarts=RestartOwner.CLUSTER),
        ),
        EVERYTHING,
    ),
    "elastic": (
        job(
            "shrink and grow",
            ranks=16,
            steps=30,
            kind=Kind.ELASTIC,
            segments=SEGMENTS,
        ),
        Cluster(ranks_per_node=8),
    ),
    "fault": (
        job(
            "killed",
            ranks=2,
            kind=Kind.FAULT,
            recovery=Recovery(
                (Fault(FaultKind.KILL, 6, rank=1),),
                checkpoint_every=4,
                restarts=RestartOwner.TORCHRUN,
                max_restarts=2,
            ),
        ),
        Cluster(ranks_per_node=8),
    ),
    "program": (program(RankLauncher.TORCHRUN), OF_PROGRAMS),
    "program_of_curves": (program(RankLauncher.TORCHRUN, probed=False), OF_PROGRAMS),
    "program_in_segments": (resized_program(), OF_PROGRAMS),
    "program_requeued": (requeued_program(), replace(OF_PROGRAMS, container=("run", "image"))),
    "program_by_srun": (program(RankLauncher.SRUN), OF_PROGRAMS),
    "program_by_deepspeed": (program(RankLauncher.DEEPSPEED, ranks=8), OF_PROGRAMS),
    "hostile": (job("x\ntouch pwned", ranks=16, note=HOSTILE), ATTACKED),
}


def script(name, folder=FOLDER):
    made, cluster = CASES[name]
    experiment = HOSTILE if name == "hostile" else "experiments/llama3_8b.toml"
    text = batch_script(ScriptRequest(made, folder, cluster, experiment=experiment))
    return text.replace(str(Path(loopback.__file__).parent), "/converge")


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_golden_one(name):
    assert script(name) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", CASES)
def test_bash_can_read_the_script(name):
    subprocess.run(["bash", "-n", str(GOLDEN / f"{name}.sh")], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(name):
    done = subprocess.run(
        # SC1091: files of the site that are sourced are not here; SC2016: what is quoted stays
        ["shellcheck", "--exclude=SC1091,SC2016", str(GOLDEN / f"{name}.sh")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


# ------------------------------------------------ what bash makes of a script

SRUN = """#!/bin/bash
printf '%s\\0' "$@" >> srun.argv
printf %s "${TEXT:-}" > srun.text
exit "${SRUN_CODE:-0}"
"""


def run(folder, text, *, srun=SRUN, **variables):
    """Run a script where srun, unless it is another, writes down what it is given."""
    (folder / "bin").mkdir()
    for name, lines in (("srun", srun), ("scontrol", "#!/bin/bash\nprintf 'n7\\nn8\\n'\n")):
        (folder / "bin" / name).write_text(lines)
        (folder / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "1234",
            "SLURM_JOB_NODELIST": "n[7-8]",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    argv = folder / "srun.argv"
    return done, argv.read_text().split("\0") if argv.exists() else []


def test_nothing_that_a_user_wrote_is_run_or_changed_by_bash(tmp_path):
    folder = tmp_path / "it's $HOME `touch pwned` #1"
    folder.mkdir()
    module = 'module() { printf %s "$2" > module.argument; }'
    done, argv = run(folder, f"{module}\n{script('hostile', folder)}")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))
    assert argv.count(HOSTILE) == 2
    assert (folder / "srun.text").read_text() == HOSTILE
    assert (folder / "module.argument").read_text() == HOSTILE
    assert str(folder / "job.json") in argv
    assert "--rdzv-endpoint=n7:11234" in argv


TASK = """#!/bin/bash
while [ "$1" != bash ] && [ "$1" != env ]; do shift; done
export SLURM_PROCID=3 SLURM_NODEID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=4
export SLURM_STEP_TASKS_PER_NODE="2(x2)"
exec "$@"
"""
PROGRAM = """#!/bin/bash
printf '%s\\0' "$@" > ../told.argv
/usr/bin/env -0 > ../told.environment
echo said; echo complained >&2
[ -n "$SIGNAL" ] || exit 200
kill "-$SIGNAL" $$
"""


def run_task(folder, launcher, signal, *, probed=True, own=None, **around):
    """What a program is told that a batch script starts, in a task that is not the first.

    ``own`` are its variables in the file; without a signal it ends with exit code 200.
    """
    work = folder / "it's $HOME"
    work.mkdir()
    (folder / "python").write_text(PROGRAM)
    (folder / "python").chmod(0o755)
    one_node = launcher in ON_ONE_NODE
    made = program(launcher, ranks=2 if one_node else 4, probed=probed)
    command = replace(made.spec.trainer.settings, folder=work)
    command = replace(command, environment=own or command.environment)
    made = replace(
        made,
        spec=replace(made.spec, trainer=trained_by(command)),
        toolchain=replace(made.toolchain, python=folder / "python"),
    )
    text = batch_script(
        ScriptRequest(made, folder, replace(OF_PROGRAMS, ranks_per_node=2), experiment="x")
    )
    around |= {"SIGNAL": signal, "MASTER_ADDR": "elsewhere", "SLURM_RESTART_COUNT": "1"}
    done, _ = run(folder, text, srun=TASK, **around)
    told = (folder / "told.environment").read_text().split("\0")
    variables = dict(each.split("=", 1) for each in told if each)
    return done, variables, (folder / "told.argv").read_text().split("\0")[:-1]


def test_a_task_of_srun_is_told_its_rank_in_the_words_of_torch(tmp_path):
    done, variables, argv = run_task(tmp_path, RankLauncher.SRUN, "KILL")
    assert done.returncode == 128 + 9
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    assert [variables[name] for name in ranks] == ["3", "4", "1", "2", "1"]
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("n7", "11234")
    assert argv == ["train.py", "--text", HOSTILE, "--steps=3", f"--out={tmp_path}/output"]
    assert variables["TEXT"] == HOSTILE
    assert variables["PATH"].startswith(f"{tmp_path}:{tmp_path}/bin:")  # and the shell's own
    logs = tmp_path / "logs" / "call-02" / "srun" / "attempt_0" / "3"
    assert (logs / "stdout.log").read_text() == "said\n"
    assert (logs / "ended").read_text().startswith("137 ")
    error = program_error([tmp_path / "logs" / "call-02"], done.returncode)
    assert (error.rank, error.message) == (3, "was killed by SIGKILL; last output: complained")
    assert not list(tmp_path.rglob("pwned"))


def test_an_exit_code_above_those_of_signals_is_reported_as_it_is(tmp_path):
    done, _, _ = run_task(tmp_path, RankLauncher.SRUN, "")
    assert done.returncode == 200
    error = program_error([tmp_path / "logs" / "call-02"], done.returncode)
    assert error.message == "ended with exit code 200; last output: complained"


def test_a_task_that_srun_has_ended_is_not_the_first_that_failed(tmp_path):
    for rank, code, at in ((0, 143, 1), (1, 7, 2)):
        task = tmp_path / "srun" / "attempt_0" / str(rank)
        task.mkdir(parents=True)
        (task / "ended").write_text(f"{code} {at}.5\n")
    assert program_error([tmp_path], 7).rank == 1


OF_SCRIPT = ("run_folder", "head_node", "meeting_port", "meeting_place", "code")
OF_TASK = ("call", "logs", "own", "python")
HOSTILE_VARIABLES = {
    **{name: f"/x/{name}" for name in (*OF_SCRIPT, *OF_TASK)},
    **{f"converge_{name}": f"/x/{name}" for name in (*OF_SCRIPT, *OF_TASK)},
    "PATH": "/x/bin",
    "LD_LIBRARY_PATH": "/x/lib",
    "TMPDIR": "/x",
    "TEXT": HOSTILE,
    "BASH_ENV": "/x/env",
    "PYTHONPATH": "/x/python",
    "port": "$converge_meeting_port",
}


@pytest.mark.parametrize(
    ("launcher", "probed"), [*((each, True) for each in RankLauncher), ("torchrun", False)]
)
def test_variables_of_a_program_reach_it_and_nothing_else(tmp_path, launcher, probed):
    launcher = RankLauncher(launcher)
    if launcher is RankLauncher.MPIRUN:  # refused under a scheduler
        with pytest.raises(ValueError, match="mpirun"):
            batch_script(ScriptRequest(program(launcher), tmp_path, OF_PROGRAMS, experiment="x"))
        return
    done, variables, argv = run_task(
        tmp_path, launcher, "KILL", probed=probed, own=HOSTILE_VARIABLES
    )
    assert done.returncode == 128 + 9
    if launcher in ON_ONE_NODE:  # the folder that keeps its store to this machine comes first
        variables["PYTHONPATH"] = variables["PYTHONPATH"].partition(":")[2]
    assert {name: variables[name] for name in HOSTILE_VARIABLES} == HOSTILE_VARIABLES
    assert f"--out={tmp_path}/output" in argv
    assert json.loads((tmp_path / "ended.json").read_text())["returncode"] == 128 + 9
    made_by_agent = launcher is RankLauncher.TORCHRUN and probed
    assert made_by_agent or list((tmp_path / "logs").glob("call-02*"))
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(("node", "address"), [("localhost", ["--local-addr=localhost"]), ("", [])])
def test_torchrun_on_several_nodes_is_told_what_differs_between_them(tmp_path, node, address):
    _, _, argv = run_task(
        tmp_path, RankLauncher.TORCHRUN, "KILL", probed=False, SLURMD_NODENAME=node
    )
    asked = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "1234"}
    logs = tmp_path / "logs" / "call-02.node-1"
    with_probe = node_arguments(asked | {"SLURMD_NODENAME": node}, logs, 2)
    assert argv[:2] == ["-m", "torch.distributed.run"]
    assert argv[2 : 2 + len(with_probe)] == with_probe
    assert with_probe[3:] == address
    assert (logs / "torchrun.log").read_text() == "said\ncomplained\n"


def test_a_launcher_of_one_node_has_the_whole_output_in_one_file(tmp_path):
    done, variables, argv = run_task(tmp_path, RankLauncher.DEEPSPEED, "TERM")
    assert done.returncode == 128 + 15
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    launcher = ["-m", "deepspeed.launcher.runner", "--master_port=11234"]
    assert argv[:5] == [*launcher, "train.py", "--text"]
    log = tmp_path / "logs" / "call-02" / "program.log"
    assert log.read_text() == "said\ncomplained\n"
    error = program_error([log.parent], done.returncode)
    assert error.message == "the program was killed by SIGTERM; last output: complained"


def test_each_start_of_a_program_has_an_empty_folder_for_its_output(tmp_path):
    made = program(RankLauncher.SRUN)
    made = replace(
        made,
        spec=replace(
            made.spec,
            trainer=trained_by(replace(made.spec.trainer.settings, folder=tmp_path)),
        ),
    )
    text = batch_script(ScriptRequest(made, tmp_path, OF_PROGRAMS, experiment="x"))
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "old").touch()
    done, _ = run(tmp_path, text, SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "output").iterdir())


FINDS = """#!/bin/bash
case " $* " in
    *" -m converge_harness.rank.start.newest "*) printf "$PRINTED" "$CHECKPOINT"; exit 0 ;;
esac
printf '%s\\0' "$@" >> srun.argv
"""
PRINTED = f"a banner\\n{NEWEST_CHECKPOINT}%s\\nan epilog\\n"
"""A container and Slurm's own prolog print to the same place."""


@pytest.mark.parametrize("launcher", [RankLauncher.TORCHRUN, RankLauncher.SRUN])
@pytest.mark.parametrize(
    ("restart", "continues_after", "goes_on"),
    [("0", None, False), ("1", None, True), ("0", 3, True)],
)
def test_a_requeued_program_is_told_its_newest_checkpoint(
    tmp_path, launcher, restart, continues_after, goes_on
):
    made = requeued_program(launcher)
    command = replace(made.spec.trainer.settings, folder=tmp_path)
    made = replace(made, spec=replace(made.spec, trainer=trained_by(command)))
    text = batch_script(
        ScriptRequest(made, tmp_path, OF_PROGRAMS, experiment="x", continues_after=continues_after)
    )
    newest = f"{tmp_path}/it's $HOME 4.pt"
    found = {"CHECKPOINT": newest, "PRINTED": PRINTED}
    done, argv = run(tmp_path, text, srun=FINDS, SLURM_RESTART_COUNT=restart, **found)
    assert done.returncode == 0, done.stderr
    told = newest if goes_on else ""
    assert f"--from={told}" in argv
    assert f"FROM={told}" in argv
    assert (f"goes on from {newest}\n" in done.stdout) is goes_on


def test_a_look_up_that_names_nothing_ends_the_script_and_trains_nothing(tmp_path):
    done, argv = run(
        tmp_path,
        script("program_requeued", tmp_path).replace("cd '/home/me/", "# '"),
        srun=FINDS,
        SLURM_RESTART_COUNT="1",
        CHECKPOINT="x",
        PRINTED="a banner\\n",
    )
    assert done.returncode == 1
    assert "no newest checkpoint was named" in done.stderr
    assert not [each for each in argv if "train.py" in each]


def test_a_requeued_program_without_a_whole_checkpoint_starts_over(tmp_path):
    _, argv = run(
        tmp_path,
        script("program_requeued", tmp_path).replace("cd '/home/me/", "# '"),
        srun=FINDS,
        SLURM_RESTART_COUNT="1",
        CHECKPOINT="",
        PRINTED=PRINTED,
    )
    assert "--from=" in argv


def test_options_for_sbatch_end_where_user_text_begins():
    options, _, rest = script("hostile").partition("set -euo pipefail")
    assert "\n#SBATCH --array" not in options
    assert "\n#SBATCH --array" in rest  # where sbatch has stopped reading


@pytest.mark.parametrize("code", [0, 3])
def test_script_ends_as_its_ranks_did_and_says_so(tmp_path, code):
    done, _ = run(
        tmp_path, script("one_node", tmp_path), SRUN_CODE=str(code), SLURM_RESTART_COUNT="2"
    )
    assert done.returncode == code
    said = json.loads((tmp_path / "ended.json").read_text())
    assert said == {"schema": 1, "returncode": code, "restart": 2}


def test_script_that_fails_before_its_ranks_says_so(tmp_path):
    made, cluster = CASES["one_node"]
    failing = replace(cluster, prologue=("( exit 7 )",))
    done, argv = run(tmp_path, batch_script(ScriptRequest(made, tmp_path, failing, experiment="x")))
    assert (done.returncode, argv) == (7, [])
    assert json.loads((tmp_path / "ended.json").read_text())["returncode"] == 7


def test_a_failing_segment_is_the_last(tmp_path):
    done, argv = run(tmp_path, script("elastic", tmp_path), SRUN_CODE="1")
    assert done.returncode == 1
    assert argv.count("--segment") == 1


def test_segments_come_one_after_another_on_the_first_nodes(tmp_path):
    _, argv = run(tmp_path, script("elastic", tmp_path))
    assert [argv[at + 1] for at, word in enumerate(argv) if word == "--segment"] == ["0", "1", "2"]
    assert [word for word in argv if word.startswith("--nodes=")] == [
        *("--nodes=2", "--nodes=1", "--nodes=2")
    ]
    assert argv.count("--relative=0") == 1


@pytest.mark.parametrize(
    ("launcher", "tasks"),
    [
        (RankLauncher.SRUN, ["--ntasks=16", "--ntasks=4"]),
        (RankLauncher.TORCHRUN, ["--ntasks=2", "--ntasks=1"]),
    ],
)
def test_segments_of_a_program_have_their_own_tasks(tmp_path, launcher, tasks):
    made = resized_program()
    command = replace(made.spec.trainer.settings, launcher=launcher)
    made = replace(made, spec=replace(made.spec, trainer=trained_by(command)))
    text = batch_script(ScriptRequest(made, tmp_path, OF_PROGRAMS, experiment="e.toml"))
    calls = [line for line in text.splitlines() if line.startswith("srun ")]
    assert [next(word for word in line.split() if "--ntasks=" in word) for line in calls] == tasks
    assert text.count("step-10.pt") == 1  # what the second segment is given


LEFT = (
    *("metrics.jsonl.part", "in_force.json", "tensors", "checkpoint", "passes", "ended.json"),
    *("faults", "torn", "logs"),
)


@pytest.mark.parametrize(
    ("name", "restart", "kept"),
    [
        ("one_node", 0, {"ended.json"}),  # its own, by now
        ("one_node", 1, {"passes", "ended.json", "faults", "torn", "logs"}),
        ("four_nodes", 0, {"ended.json"}),
        ("four_nodes", 1, set(LEFT)),
        ("fault", 0, {"ended.json"}),
    ],
)
def test_evidence_of_an_earlier_job_goes_and_that_of_a_life_unless_it_comes_in_passes(
    tmp_path, name, restart, kept
):
    for left in LEFT:
        (tmp_path / left).touch()
    site = "module() { :; }; source() { :; }; ulimit() { :; }"
    text = f"{site}\n{script(name, tmp_path)}"
    done, _ = run(tmp_path, text, SLURM_RESTART_COUNT=str(restart))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} & set(LEFT) == kept


@pytest.mark.parametrize("restart", ["0", "1"])
def test_a_job_that_continues_leaves_what_an_earlier_one_has_left(tmp_path, restart):
    for left in LEFT:
        (tmp_path / left).touch()
    made, cluster = CASES["four_nodes"]
    site = "module() { :; }; source() { :; }; ulimit() { :; }"
    text = batch_script(ScriptRequest(made, tmp_path, cluster, experiment="x", continues_after=3))
    done, _ = run(tmp_path, f"{site}\n{text}", SLURM_RESTART_COUNT=restart)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} & set(LEFT) == set(LEFT)
    assert "--call 4 " in text  # its logs are not those of an earlier job


# ----------------------------------------------------------------- its parts


def test_name_ends_in_the_identity():
    made, _ = CASES["hostile"]
    assert job_name(made) == "cv-x-touch-pwned-0123456789ab"


def test_gpus_are_the_schedulers_to_hand_out():
    assert "export CUDA_VISIBLE_DEVICES" not in script("one_node")
    assert "export CUDA_VISIBLE_DEVICES=''" in script("one_rank")


def test_only_jobs_that_read_our_corpus_are_kept_off_the_hub():
    made, cluster = CASES["one_node"]
    own = replace(made.spec.train_config, data=SyntheticData())
    ours = replace(made, spec=replace(made.spec, train_config=own))
    assert "HF_HUB_OFFLINE" not in script("one_node")
    assert "export HF_HUB_OFFLINE=1" in batch_script(
        ScriptRequest(ours, FOLDER, cluster, experiment="x")
    )


@pytest.mark.parametrize(
    ("exported", "cluster_has", "searched"),
    [
        ({}, {}, "/base"),
        ({"PYTHONPATH": "/mine"}, {}, "/base:/mine"),
        ({"PYTHONPATH": "/mine"}, {"PYTHONPATH": "/theirs"}, "/base:/theirs"),
    ],
)
def test_folders_of_a_toolchain_come_first_on_the_path(tmp_path, exported, cluster_has, searched):
    made, cluster = CASES["one_node"]
    made = replace(made, toolchain=replace(made.toolchain, paths=(Path("/base"),)))
    text = batch_script(
        ScriptRequest(
            made, tmp_path, replace(cluster, environment=cluster_has, modules=()), experiment="x"
        )
    )
    done, _ = run(tmp_path, f'{text}\nprintf %s "$PYTHONPATH" > searched\n', **exported)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "searched").read_text() == searched


def test_ranks_that_do_not_fill_nodes_are_refused():
    made, _ = CASES["one_node"]
    with pytest.raises(ConfigError, match="do not fill nodes of 6"):
        batch_script(ScriptRequest(made, FOLDER, Cluster(ranks_per_node=6), experiment="x"))


def test_run_folder_that_sbatch_cannot_be_told_of_is_refused():
    made, cluster = CASES["one_node"]
    with pytest.raises(ConfigError, match="--store"):
        batch_script(ScriptRequest(made, Path('/store/"runs"\n'), cluster, experiment="x"))
