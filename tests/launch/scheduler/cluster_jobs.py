"""Jobs and plans for tests with a real Slurm, and what its queue says."""

import os
from dataclasses import replace
from pathlib import Path

from launch_jobs import ROOT, TOOLCHAIN, tiny_job
from light_toolchain import light_python

from converge_harness.launch import RunOptions
from converge_harness.launch.scheduler.job_status import Site
from converge_harness.launch.slurm.commands import Slurm
from converge_harness.model import Cluster, Experiment, Toolchain
from converge_harness.store import Store

HERE = Path(__file__).parent
CLUSTER = Cluster(
    ranks_per_node=2, gpus_per_node=False, device="cpu", poll_s=0.2, sbatch=("--overcommit",)
)


def light_toolchain(folder):
    return Toolchain(TOOLCHAIN, light_python(folder / "python"), "titan_0_3", {})


def light_job(toolchain, name, **values):
    return replace(tiny_job(name, **values), toolchain=toolchain)


def site_of(store_root, environment, *, rank_module="tiny_rank", limits=None, **cluster):
    path = f"{ROOT / 'src'}{os.pathsep}{HERE.parent}"
    return Site(
        store=Store(Path(store_root)),
        backend=Slurm({**environment, "PYTHONPATH": path}),
        cluster=replace(CLUSTER, **cluster),
        experiment=Experiment(
            name="tiny", path=Path("tiny.toml"), controls=(), tests=(), **(limits or {})
        ),
        options=RunOptions(check=False, rank_module=rank_module, cluster_device="cpu"),
    )


def queue(slurm):
    """``(name, state)`` of every job that waits or runs."""
    lines = slurm.ask("squeue", "--noheader", "--format=%j %T").splitlines()
    return [tuple(line.split()) for line in lines]
