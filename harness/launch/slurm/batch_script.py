"""A job as a batch script for Slurm: the requested resources and the srun calls. Pure.

The script's own variables begin with ``converge_``, as none of a user or a site does.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from converge_harness.errors import ConfigError, Problem
from converge_harness.launch.next_call import calls_again
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.launch.scheduler.batch_step import (
    HEAD_VARIABLE,
    OF_EVERY_START,
    OF_MEETING,
    Layout,
    PlacedCall,
    changed,
    checkpoint_lines,
    files_of_ranks,
    header,
    own_folders_line,
    placed_calls,
    segment_comment,
    step_lines,
    surroundings,
    work_folder_line,
)
from converge_harness.launch.scheduler.submission import job_name
from converge_harness.model import Cluster, Job
from converge_harness.run_folder.ended import shell_lines
from converge_harness.run_folder.layout import JOB_SCRIPT, OF_THE_PASSES, SLURM_LOG
from converge_harness.trainers import (
    MEETING_PLACE,
    MEETING_PORT,
    comes_in_passes,
    needs_port,
    trainer_of,
)

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Ports of the rendezvous, below those that Linux uses for outgoing connections."""


def batch_script(request: ScriptRequest) -> str:
    """The script for sbatch.

    What a ``Cluster`` says to sbatch and bash was checked where it was read
    (``converge_harness.experiment.cluster``). Raises ConfigError when the ranks do not fill nodes,
    and when sbatch cannot be told of the folder.
    """
    job, folder, cluster = request.job, request.folder.absolute(), request.cluster
    calls, largest = placed_calls(request)
    exported = [each.exported for each in calls]
    by_hand = f"  sbatch {shlex.quote(str(folder / JOB_SCRIPT))}"
    about = ("Written by converge. To submit it by hand:", by_hand)
    sections = (
        header(job, request.experiment, largest, *about),
        _requests(job, folder, cluster, largest),
        _ending(folder),
        _start(job, continues=request.continues),
        _restart(job) if _may_be_requeued(job, cluster) else "",
        own_folders_line(job),
        surroundings(cluster, exported[0]),
        _meeting_place(job, largest),
        work_folder_line(job, folder),
        checkpoint_lines(
            job,
            folder,
            starts=_on_first_node(cluster, largest),
            continues=request.continues,
        ),
        *(
            changed(before, each.exported) + _call(job, folder, cluster, each, largest)
            for before, each in zip((exported[0], *exported), calls, strict=False)
        ),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


# ------------------------------------------------------------------ sections


def _requests(job: Job, folder: Path, cluster: Cluster, largest: Layout) -> str:
    asked = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        **_gpus(cluster, largest),
        "cpus-per-task": _cpus_per_task(job, cluster, largest),
        "mem": cluster.memory_per_node,
        "constraint": cluster.constraint,
    }
    options = (
        f"--job-name={job_name(job)}",
        f"--chdir={_path(folder)}",
        f"--output={SLURM_LOG}",
        "--open-mode=append",
        f"--nodes={largest.nodes}",
        f"--ntasks-per-node={_tasks(job, largest)}",
        *(f"--{option}={value}" for option, value in asked.items() if value is not None),
        "--requeue" if _may_be_requeued(job, cluster) else "--no-requeue",
        "--kill-on-invalid-dep=yes",
        *cluster.sbatch,
    )
    return "\n".join(f"#SBATCH {option}" for option in options)


def _gpus(cluster: Cluster, largest: Layout) -> dict[str, str | int]:
    if cluster.gres is not None:
        return {"gres": cluster.gres}
    if cluster.device == "cuda" and cluster.gpus_per_node:
        return {"gpus-per-node": largest.ranks}
    return {}


def _may_be_requeued(job: Job, cluster: Cluster) -> bool:
    """Whether the script can be restarted: not in the middle of an elastic or a fault set."""
    return cluster.requeue and not calls_again(job)


def _tasks(job: Job, layout: Layout) -> int:
    """Tasks of srun on each node: its ranks, or one that starts them."""
    return layout.ranks if trainer_of(job.spec).one_task_per_rank(job.spec) else 1


def _cpus_per_task(job: Job, cluster: Cluster, largest: Layout) -> int | None:
    if cluster.cpus_per_rank is None:
        return None
    return cluster.cpus_per_rank * largest.ranks // _tasks(job, largest)


def _meeting_place(job: Job, largest: Layout) -> str:
    """Where ranks meet, if they are on several nodes or nobody else finds a port for them."""
    if largest.nodes == 1 and not needs_port(job):
        return ""
    head = f'${{{HEAD_VARIABLE}:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}}'
    place, port = MEETING_PLACE.removeprefix("$"), MEETING_PORT.removeprefix("$")
    lines = [
        "# Where ranks meet. Jobs that run at the same time have nearby ids, so other ports.",
        f"converge_head_node={head if largest.nodes > 1 else '127.0.0.1'}",
        f"{port}=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))",
    ]
    if needs_port(job):
        address, at = OF_MEETING
        lines.append(f"export {address}=$converge_head_node {at}={MEETING_PORT}")
    else:
        lines.append(f"{place}=$converge_head_node:{MEETING_PORT}")
    return "\n".join(lines)


def _call(job: Job, folder: Path, cluster: Cluster, placed: PlacedCall, largest: Layout) -> str:
    """One srun call, on the first nodes of the allocation."""
    call, layout = placed.call, placed.layout
    tasks = _tasks(job, layout)
    where = [
        *("srun", f"--nodes={layout.nodes}", f"--ntasks={layout.nodes * tasks}"),
        *(
            f"--ntasks-per-node={tasks}",
            *(["--relative=0"] if layout.nodes < largest.nodes else []),
        ),
    ]
    # The ranks of a node share its CPUs. By default srun would bind their agent to one CPU, and
    # since Slurm 22.05 it ignores --cpus-per-task of #SBATCH lines.
    cpus = _cpus_per_task(job, cluster, largest)
    how = [
        *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
        *("--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=1"),
    ]
    lines = (
        shlex.join(where),
        shlex.join(how),
        shlex.join(cluster.srun),
        shlex.join(cluster.container),
        *step_lines(job, folder, call, layout, placed.options),
    )
    segment = "" if call.segment is None else segment_comment(job, call.segment)
    return segment + " \\\n    ".join(line for line in lines if line)


def _on_first_node(cluster: Cluster, largest: Layout) -> str:
    """The srun call of one process on the first node, where the environment of ranks is."""
    first = ["--relative=0"] if largest.nodes > 1 else []
    where = ("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", *first)
    how = ("--cpu-bind=none", "--export=ALL")
    return shlex.join((*where, *how, *cluster.srun, *cluster.container))


# ------------------------------------------------------------------- quoting


def _path(folder: Path) -> str:
    """A path on an ``#SBATCH`` line, where double quotes protect spaces and ``#``."""
    text = str(folder)
    if not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigError(
            Problem(
                f"run folder {text!r}",
                "sbatch does not support this path",
                "use a --store whose path has no quotes, backslashes and line breaks",
            )
        )
    return f'"{text}"'


# ----------------------------------------------------- start, restart and end


def _ending(folder: Path) -> str:
    """Bash traps that write ``ended.json`` however the script ends."""
    written = shell_lines(
        folder="$converge_run_folder",
        returncode="$converge_code",
        restart="${SLURM_RESTART_COUNT:-0}",
    )
    return f"""\
set -euo pipefail

converge_run_folder={shlex.quote(str(folder))}

# Written however this script ends, for when Slurm has forgotten the job.
finish() {{
    converge_code=$?
    trap '' TERM
{written}
    exit "$converge_code"
}}
trap finish EXIT
trap 'exit 143' TERM"""


def _start(job: Job, *, continues: bool) -> str:
    """Removes files of an earlier job, for example of one that was submitted twice."""
    if continues:
        return f"""\
# This job continues from the newest checkpoint of an earlier one.
(cd "$converge_run_folder" && rm -rf {" ".join(OF_EVERY_START)})"""
    files = (*OF_EVERY_START, *files_of_ranks(job), *OF_THE_PASSES)
    return f"""\
# A job that starts must not use files of an earlier one.
if [ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ]; then
    (cd "$converge_run_folder" && rm -rf {" ".join(files)})
fi"""


def _restart(job: Job) -> str:
    """Removes files from before Slurm requeued the job that it might not overwrite."""
    of_ranks = () if comes_in_passes(job) else files_of_ranks(job)
    files = " ".join((*OF_EVERY_START, *of_ranks))
    how = "continues from its newest checkpoint" if comes_in_passes(job) else "starts over"
    return f"""\
# A job that Slurm has requeued {how}.
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$converge_run_folder" && rm -rf {files})
fi"""
