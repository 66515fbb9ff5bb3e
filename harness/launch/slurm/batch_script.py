"""A job as a batch script for Slurm: the requested resources and the torchrun calls. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from converge_harness.errors import ConfigError, Problem
from converge_harness.launch.next_call import calls_again
from converge_harness.model import Cluster, Job
from converge_harness.run_folder.layout import COMPILED, ENDED, LOGS, OF_THE_PASSES, OF_THE_RANKS
from converge_harness.store import folder_key, slug
from converge_harness.trainers import (
    PATH_VARIABLE,
    RANK_MODULE,
    Call,
    Rendezvous,
    Resources,
    comes_in_passes,
    environment,
    first_call,
    node_arguments,
    part_of,
    searching,
)

JOB_SCRIPT = "job.sh"
SLURM_LOG = "slurm.log"
HEAD_VARIABLE = "CONVERGE_HEAD_NODE"
"""Environment variable that overrides the name of a job's first node for the others."""
_NODE_MODULE = "converge_harness.rank.start.node"
_MEETING = "meeting_place"
"""Variable in the script: host and port of the rendezvous."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Ports of the rendezvous, below those that Linux uses for outgoing connections."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the ranks of a job, or of one of its segments, are placed on nodes."""

    nodes: int
    ranks: int
    """Ranks on each node."""


def job_name(job: Job) -> str:
    """The job's name in Slurm, by which it is found again."""
    return f"cv-{slug(job.name)}-{folder_key(job.identity)}"


def submit_argv(folder: Path) -> tuple[str, ...]:
    """The sbatch command for the job of a run folder, without its dependencies."""
    return ("sbatch", str(folder / JOB_SCRIPT))


def batch_script(
    job: Job,
    folder: Path,
    cluster: Cluster,
    *,
    experiment: str,
    rank_module: str = RANK_MODULE,
    continues_after: int | None = None,
) -> str:
    """The script for sbatch; ``folder`` is the run folder, which has ``job.json``.

    ``continues_after``: the number of the last call of an earlier job of the run, from whose newest
    checkpoint this one continues; None: it starts anew.

    What a ``Cluster`` says to sbatch and bash was checked where it was read
    (``converge_harness.experiment.cluster``). Raises ConfigError when the ranks do not fill nodes,
    and when sbatch cannot be told of the folder.
    """
    folder = folder.absolute()
    calls = _calls(job)
    if continues_after is not None:  # with log folders of its own
        calls = tuple(replace(each, number=each.number + continues_after) for each in calls)
    layouts = [_layout(job, part_of(job, call).world_size, cluster) for call in calls]
    largest = max(layouts, key=lambda layout: layout.nodes * layout.ranks)
    sections = (
        _header(job, largest, experiment, folder),
        _requests(job, folder, cluster, largest),
        _ending(folder),
        _start(continues=continues_after is not None),
        _restart(job) if _may_be_requeued(job, cluster) else "",
        _surroundings(job, folder, cluster),
        _meeting_place() if largest.nodes > 1 else "",
        *(
            _call(job, folder, cluster, call, layout, largest, rank_module)
            for call, layout in zip(calls, layouts, strict=True)
        ),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _calls(job: Job) -> tuple[Call, ...]:
    """One, or for an elastic set one per segment."""
    first = first_call(job)
    if first.segment is None:
        return (first,)
    return tuple(Call(index + 1, segment=index) for index in range(len(job.spec.segments)))


def _layout(job: Job, ranks: int, cluster: Cluster) -> _Layout:
    if ranks <= cluster.ranks_per_node:
        return _Layout(1, ranks)
    nodes, rest = divmod(ranks, cluster.ranks_per_node)
    if rest:
        raise ConfigError(
            Problem(
                "cluster.ranks_per_node",
                f"the {ranks} ranks of {job.name} do not fill nodes of {cluster.ranks_per_node}",
                "choose degrees whose product is a multiple of it, or at most it",
            )
        )
    return _Layout(nodes, cluster.ranks_per_node)


# ------------------------------------------------------------------ sections


def _header(job: Job, largest: _Layout, experiment: str, folder: Path) -> str:
    nodes = "1 node" if largest.nodes == 1 else f"{largest.nodes} nodes of {largest.ranks}"
    ranks = "1 rank" if job.world_size == 1 else f"{job.world_size} ranks"
    lines = (
        f"{job.name} ({job.role}) of the experiment {experiment}: {ranks} on {nodes}.",
        *([job.spec.note] if job.spec.note else []),
        "Written by converge. To submit it by hand:",
        f"  sbatch {shlex.quote(str(folder / JOB_SCRIPT))}",
    )
    return "\n".join(("#!/bin/bash", *(f"# {_one_line(line)}" for line in lines)))


def _requests(job: Job, folder: Path, cluster: Cluster, largest: _Layout) -> str:
    cpus = cluster.cpus_per_rank
    asked = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        **_gpus(cluster, largest),
        "cpus-per-task": None if cpus is None else cpus * largest.ranks,
        "mem": cluster.memory_per_node,
        "constraint": cluster.constraint,
    }
    options = (
        f"--job-name={job_name(job)}",
        f"--chdir={_path(folder)}",
        f"--output={SLURM_LOG}",
        "--open-mode=append",
        f"--nodes={largest.nodes}",
        "--ntasks-per-node=1",
        *(f"--{option}={value}" for option, value in asked.items() if value is not None),
        "--requeue" if _may_be_requeued(job, cluster) else "--no-requeue",
        "--kill-on-invalid-dep=yes",
        *cluster.sbatch,
    )
    return "\n".join(f"#SBATCH {option}" for option in options)


def _gpus(cluster: Cluster, largest: _Layout) -> dict[str, str | int]:
    if cluster.gres is not None:
        return {"gres": cluster.gres}
    if cluster.device == "cuda" and cluster.gpus_per_node:
        return {"gpus-per-node": largest.ranks}
    return {}


def _may_be_requeued(job: Job, cluster: Cluster) -> bool:
    """Whether the script can be restarted: not in the middle of an elastic or a fault set."""
    return cluster.requeue and not calls_again(job)


def _surroundings(job: Job, folder: Path, cluster: Cluster) -> str:
    on_cpu = cluster.device == "cpu"
    resources = Resources(cluster.device, () if on_cpu else None, loopback=None)
    exported: Mapping[str, str] = {
        **environment({}, resources, folder, job),
        **cluster.environment,
    }
    if PATH_VARIABLE in cluster.environment:
        exported = searching(job.toolchain, exported)
    exports = [f"export {name}={shlex.quote(exported[name])}" for name in sorted(exported)]
    if job.toolchain.paths and PATH_VARIABLE not in cluster.environment:
        own = f"export {PATH_VARIABLE}="
        # What the shell that submits has there is kept, behind.
        exports = [
            f"{line}${{{PATH_VARIABLE}:+:${PATH_VARIABLE}}}" if line.startswith(own) else line
            for line in exports
        ]
    modules = [f"module load {shlex.quote(name)}" for name in cluster.modules]
    if not modules and not cluster.prologue:
        return "\n".join(exports)
    if modules:
        modules.insert(0, "type module > /dev/null 2>&1 || source /etc/profile")
    strict_not = "set +u  # modules and the like read variables that are not set"
    return "\n".join((strict_not, *modules, *exports, *cluster.prologue, "set -u"))


def _meeting_place() -> str:
    return f"""\
# Rendezvous of the nodes' agents. Jobs that run at the same time have nearby ids, so other ports.
head_node=${{{HEAD_VARIABLE}:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}}
{_MEETING}=$head_node:$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"""


def _call(
    job: Job,
    folder: Path,
    cluster: Cluster,
    call: Call,
    layout: _Layout,
    largest: _Layout,
    rank_module: str,
) -> str:
    """One srun call: an agent on each of the first nodes of the allocation."""
    where = [
        *("srun", f"--nodes={layout.nodes}", f"--ntasks={layout.nodes}", "--ntasks-per-node=1"),
        *(["--relative=0"] if layout.nodes < largest.nodes else []),
    ]
    # The ranks of a node share its CPUs. By default srun would bind their agent to one CPU, and
    # since Slurm 22.05 it ignores --cpus-per-task of #SBATCH lines.
    how = [*_cpus(cluster, largest), "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=1"]
    node = [
        *(str(job.toolchain.python), "-m", _NODE_MODULE),
        *("--logs", str(folder / LOGS), "--call", str(call.number), "--"),
    ]
    torchrun = _torchrun(job, folder, call, layout, rank_module)
    rest = torchrun.index("-m")
    lines = (
        shlex.join(where),
        shlex.join(how),
        shlex.join(cluster.srun),
        shlex.join(cluster.container),
        shlex.join(node),
        " ".join(_quoted_but_meeting(word) for word in torchrun[:rest]),
        shlex.join(torchrun[rest:]),
    )
    segment = "" if call.segment is None else _segment_comment(job, call.segment)
    return segment + " \\\n    ".join(line for line in lines if line)


def _torchrun(
    job: Job, folder: Path, call: Call, layout: _Layout, rank_module: str
) -> tuple[str, ...]:
    meeting = Rendezvous()
    if layout.nodes > 1:
        meeting = Rendezvous(layout.nodes, layout.nodes, f"${_MEETING}", here=False)
    return node_arguments(job, folder, call, meeting, rank_module)


def _cpus(cluster: Cluster, largest: _Layout) -> list[str]:
    if cluster.cpus_per_rank is None:
        return []
    return [f"--cpus-per-task={cluster.cpus_per_rank * largest.ranks}"]


def _segment_comment(job: Job, index: int) -> str:
    segments = job.spec.segments
    first = segments[index - 1].until + 1 if index else 1
    return (
        f"# Segment {index + 1} of {len(segments)}: steps {first} to {segments[index].until}, "
        f"{segments[index].parallelism.world_size} ranks.\n"
    )


# ------------------------------------------------------------------- quoting


def _quoted_but_meeting(word: str) -> str:
    """An argument of torchrun in which bash inserts the rendezvous endpoint."""
    before, variable, after = word.partition(f"${_MEETING}")
    if not variable:
        return shlex.quote(word)
    return f'{shlex.quote(before)}"${_MEETING}"{shlex.quote(after) if after else ""}'


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


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


# ----------------------------------------------------- start, restart and end

_OF_EVERY_START = (ENDED, COMPILED)
"""Files that every start of the script writes again."""


def _ending(folder: Path) -> str:
    """Bash traps that write ``ended.json`` however the script ends."""
    return f"""\
set -euo pipefail

run_folder={shlex.quote(str(folder))}

# Written however this script ends, for when Slurm has forgotten the job.
finish() {{
    code=$?
    trap '' TERM
    printf '{{"schema": 1, "returncode": %d, "restart": %d}}\\n' \\
        "$code" "${{SLURM_RESTART_COUNT:-0}}" > "$run_folder/{ENDED}.part"
    mv "$run_folder/{ENDED}.part" "$run_folder/{ENDED}"
    exit "$code"
}}
trap finish EXIT
trap 'exit 143' TERM"""


def _start(*, continues: bool) -> str:
    """Removes files of an earlier job, for example of one that was submitted twice."""
    if continues:
        return f"""\
# This job continues from the newest checkpoint of an earlier one.
(cd "$run_folder" && rm -rf {" ".join(_OF_EVERY_START)})"""
    return f"""\
# A job that starts must not use files of an earlier one.
if [ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ]; then
    (cd "$run_folder" && rm -rf {" ".join((*_OF_EVERY_START, *OF_THE_RANKS, *OF_THE_PASSES))})
fi"""


def _restart(job: Job) -> str:
    """Removes files from before Slurm requeued the job that it might not overwrite."""
    files = " ".join(_OF_EVERY_START if comes_in_passes(job) else (*_OF_EVERY_START, *OF_THE_RANKS))
    how = "continues from its newest checkpoint" if comes_in_passes(job) else "starts over"
    return f"""\
# A job that Slurm has requeued {how}.
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$run_folder" && rm -rf {files})
fi"""
