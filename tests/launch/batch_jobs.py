"""Jobs of which the scripts for schedulers are tested: torchtitan's, and programs of one's own."""

from dataclasses import replace
from pathlib import Path

from launch_jobs import tiny_job

from converge_harness.model import Parallelism, Recovery, RestartOwner, Segment, Toolchain
from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command, RankLauncher

HOSTILE = "$(touch pwned)`touch pwned`'\"; touch pwned #\n#SBATCH --array=0-9\ntouch pwned"
SEGMENTS = (
    Segment(10, Parallelism(dp_shard=16), 1),
    Segment(20, Parallelism(dp_shard=4), 4),
    Segment(30, Parallelism(dp_shard=4, pp=4), 4, "1F1B"),
)


def job(name, *, ranks, **changes):
    made = tiny_job(
        name,
        ranks=ranks,
        toolchain=Toolchain("torchtitan-0.3.0", Path("/tools/bin/python"), "titan_0_3", {}),
    )
    spec = {
        field: changes.pop(field)
        for field in ("note", "kind", "segments", "recovery")
        if field in changes
    }
    return replace(
        made, identity="0123456789abcdef" * 4, spec=replace(made.spec, **spec), **changes
    )


def program(launcher, *, ranks=16, probed=True, **changes):
    """A job of a person's own program, called with what a shell would spoil."""
    argv = ("train.py", "--text", HOSTILE, "--steps={steps}", "--out={output}")
    command = Command(
        argv=("{python}", *argv) if launcher in (RankLauncher.SRUN, RankLauncher.NONE) else argv,
        folder=Path("/home/me/it's $HOME"),
        launcher=launcher,
        probed=probed,
        curves=None if probed else "{output}/loss.csv",
        environment={"TEXT": HOSTILE, "STEPS": "{steps}"},
    )
    made = job("mine", ranks=ranks, **changes)
    mine = Toolchain("mine", Path("/env s/bin/python"), "command", {})
    return replace(
        made, toolchain=mine, spec=replace(made.spec, trainer=trained_by(command), recovery=None)
    )


def requeued_program(launcher=RankLauncher.TORCHRUN, *, ranks=16):
    """One that goes on from its own checkpoints when Slurm has requeued it."""
    made = program(launcher, ranks=ranks, steps=30)
    command = replace(
        made.spec.trainer.settings,
        argv=("train.py", "--from={resume_from}", "--every={checkpoint_every}", "{checkpoint_dir}"),
        environment={"FROM": "{resume_from}"},
        checkpoints=CheckpointForm("step-{step}.pt", None),
    )
    recovery = Recovery((), checkpoint_every=4, restarts=RestartOwner.CLUSTER, max_restarts=0)
    return replace(made, spec=replace(made.spec, trainer=trained_by(command), recovery=recovery))
