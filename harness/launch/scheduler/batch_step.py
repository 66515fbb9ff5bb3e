"""What scripts for all schedulers share: places, variables and commands of ranks. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from converge_harness.errors import ConfigError, Problem
from converge_harness.launch.next_call import calls_again
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.model import Cluster, Job
from converge_harness.run_folder.layout import COMPILED, ENDED, JOB, NEWEST_CHECKPOINT, OF_THE_RANKS
from converge_harness.trainers import (
    FOUND_CHECKPOINT,
    MEETING_PLACE,
    MEETING_PORT,
    PATH_VARIABLE,
    Call,
    CallOptions,
    Rendezvous,
    Resources,
    calls_of_segments,
    comes_in_passes,
    environment,
    needs_port,
    node_command,
    part_of,
    trainer_of,
    work_folder,
)
from converge_harness.wording import counted

HEAD_VARIABLE = "CONVERGE_HEAD_NODE"
"""Environment variable that overrides the name of a job's first node for the others."""
TERMINATED = 143
"""Exit code of a script after SIGTERM."""
OF_MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""Variables whose values only the script knows."""
OF_EVERY_START = (ENDED, COMPILED)
"""Files that every start of the script writes again."""
_NEWEST_MODULE = "converge_harness.rank.start.newest"
_CHECKPOINT = "converge_checkpoint"
"""Variable of a script: the checkpoint from which its program goes on; empty: there is none."""
_SEARCHED = ("PATH", PATH_VARIABLE)
"""Variables in front of whose values converge puts folders."""
_OF_SHELL = "\0"
"""Stands for the value that such a variable has in the shell of the script."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a job, or of one of its segments, are placed on nodes."""

    nodes: int
    ranks: int
    """Ranks on each node."""


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables of a call."""

    exported: Mapping[str, str]
    """For everything that the script starts; ``_OF_SHELL`` stands for what the shell has there."""
    own: Mapping[str, str]
    """Only for the program."""


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call of a job's script."""

    call: Call
    layout: Layout
    exported: Mapping[str, str]
    """Variables for everything that the script starts."""
    options: CallOptions


def placed_calls(request: ScriptRequest) -> tuple[tuple[PlacedCall, ...], Layout]:
    """The calls of a job's script, and the largest layout among them.

    Raises ConfigError when the ranks do not fill nodes.
    """
    job, folder, cluster = request.job, request.folder.absolute(), request.cluster
    calls = calls_of_segments(job)
    if request.continues_after is not None:  # with log folders of its own
        before = request.continues_after
        calls = tuple(replace(each, number=each.number + before) for each in calls)
    if looks_for_checkpoint(job):
        calls = tuple(replace(each, looks_for_checkpoint=True) for each in calls)
    layouts = [layout_of(job, part_of(job, call).world_size, cluster) for call in calls]
    largest = max(layouts, key=lambda layout: layout.nodes * layout.ranks)
    options = CallOptions(request.rank_module, devices=devices_of(cluster), data=request.data)
    placed = []
    for call, layout in zip(calls, layouts, strict=True):
        of_call = variables_of(job, folder, cluster, call, largest, request.data)
        placed.append(
            PlacedCall(call, layout, of_call.exported, replace(options, variables=of_call.own))
        )
    return tuple(placed), largest


def header(
    job: Job, experiment: str, largest: Layout, *about: str, on: str = "on", node: str = "node"
) -> str:
    """The first lines of a script; ``on`` and ``node`` are the words for where ranks are."""
    several = f"{largest.nodes} {node}s of {largest.ranks}"
    place = f"{on} {f'1 {node}' if largest.nodes == 1 else several}"
    ranks = counted(job.world_size, "rank")
    what = f"{job.name} ({job.role}) of the experiment {experiment}: {ranks} {place}."
    lines = (what, *([job.spec.note] if job.spec.note else []), *about)
    return "\n".join(("#!/bin/bash", *(f"# {_one_line(line)}" for line in lines)))


def layout_of(job: Job, ranks: int, cluster: Cluster) -> Layout:
    """The nodes for this many ranks. Raises ConfigError when they do not fill nodes."""
    if ranks <= cluster.ranks_per_node:
        return Layout(1, ranks)
    nodes, rest = divmod(ranks, cluster.ranks_per_node)
    if rest:
        raise ConfigError(
            Problem(
                "cluster.ranks_per_node",
                f"the {ranks} ranks of {job.name} do not fill nodes of {cluster.ranks_per_node}",
                "choose degrees whose product is a multiple of it, or at most it",
            )
        )
    return Layout(nodes, cluster.ranks_per_node)


def devices_of(cluster: Cluster) -> tuple[int, ...] | None:
    """Ids of the GPUs of a job: none on CPUs, and None where the scheduler assigns them."""
    return () if cluster.device == "cpu" else None


def variables_of(
    job: Job, folder: Path, cluster: Cluster, call: Call, largest: Layout, data: Path | None
) -> Variables:
    """The variables of a call, for all that its script starts and for the program alone."""
    resources = Resources(
        cluster.device, devices_of(cluster), loopback=None, one_node=largest.nodes == 1
    )
    base = {name: cluster.environment.get(name, _OF_SHELL) for name in _SEARCHED}
    pinned = environment(base, resources, folder, job, data=data, call=call)
    # Those of the experiment's trainer are part of its runs' identity, so its program gets them,
    # whatever the site says. Nothing else does: they could change what bash and srun do.
    own = {name: pinned[name] for name in trainer_of(job.spec).variables(job, folder, call, data)}
    others = {
        name: text for name, text in cluster.environment.items() if name in own or name not in base
    }
    exported = {name: text for name, text in pinned.items() if name not in own}
    exported = {name: text for name, text in (exported | others).items() if text != _OF_SHELL}
    if needs_port(job):
        exported = {name: text for name, text in exported.items() if name not in OF_MEETING}
    return Variables(exported, own)


def _export(name: str, text: str) -> str:
    own, inherited, _ = text.partition(f"{os.pathsep}{_OF_SHELL}")
    # What the shell that submits has there is kept, behind.
    return f"export {name}={shlex.quote(own)}{f'${{{name}:+:${name}}}' if inherited else ''}"


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Lines that export what differs from the call before."""
    names = sorted(name for name in after if after[name] != before.get(name))
    return "".join(f"{_export(name, after[name])}\n" for name in names)


def surroundings(cluster: Cluster, exported: Mapping[str, str]) -> str:
    """Lines that prepare a node: modules, variables, and what the site adds."""
    exports = [_export(name, exported[name]) for name in sorted(exported)]
    modules = [f"module load {shlex.quote(name)}" for name in cluster.modules]
    if not modules and not cluster.prologue:
        return "\n".join(exports)
    if modules:
        modules.insert(0, "type module > /dev/null 2>&1 || source /etc/profile")
    strict_not = "set +u  # modules and the like read variables that are not set"
    return "\n".join((strict_not, *modules, *exports, *cluster.prologue, "set -u"))


def work_folder_line(job: Job, folder: Path) -> str:
    """A line that enters the working directory of the ranks; empty for the run folder itself."""
    work = work_folder(job, folder)
    return "" if work == folder else f"cd {shlex.quote(str(work))}"


def files_of_ranks(job: Job) -> tuple[str, ...]:
    """Files and folders in the run folder that ranks make."""
    own = trainer_of(job.spec).own_folders(job)
    return tuple(dict.fromkeys((*OF_THE_RANKS, *own)))


def own_folders_line(job: Job) -> str:
    """A command that makes the folders a program expects; empty if it expects none."""
    own = trainer_of(job.spec).own_folders(job)
    return f'(cd "$converge_run_folder" && mkdir -p {" ".join(own)})' if own else ""


def looks_for_checkpoint(job: Job) -> bool:
    """Whether the script of a job looks for the checkpoint from which its program goes on.

    That is any checkpoint of a run that no script interrupts. Converge's own ranks look themselves.
    """
    own = trainer_of(job.spec).own_rank_code
    return comes_in_passes(job) and not calls_again(job) and not own


def checkpoint_lines(job: Job, folder: Path, *, starts: str = "", continues: bool) -> str:
    """Lines that find the checkpoint from which a program goes on; empty if converge's ranks do.

    ``starts`` are words that start a process on the first node; empty: the script runs there.
    ``continues``: whether already the first start of the script has something to go on from.
    """
    if not looks_for_checkpoint(job):
        return ""
    look = shlex.join((str(job.toolchain.python), "-m", _NEWEST_MODULE, str(folder / JOB)))
    mark = f'"{NEWEST_CHECKPOINT}"'
    or_fail = '{ echo "no newest checkpoint was named" >&2; exit 1; }'
    lines = [
        f"{_CHECKPOINT}=$({starts} {look})" if starts else f"{_CHECKPOINT}=$({look})",
        # What srun or a container prints itself is no path.
        f'[[ "${_CHECKPOINT}" == *{mark}* ]] || {or_fail}',
        f"{_CHECKPOINT}=${{{_CHECKPOINT}##*{mark}}}",
        f"{_CHECKPOINT}=${{{_CHECKPOINT}%%$'\\n'*}}",
        f'echo "goes on from ${{{_CHECKPOINT}:-the start: no checkpoint is complete}}"',
    ]
    if not continues:
        again = 'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then'
        lines = [f"{_CHECKPOINT}=", again, *(f"    {line}" for line in lines), "fi"]
    about = "# The program goes on from its newest complete checkpoint. Others are set aside."
    return "\n".join((about, *lines))


def step_lines(
    job: Job, folder: Path, call: Call, layout: Layout, options: CallOptions
) -> tuple[str, str, str]:
    """What every node starts for a call, as words of bash.

    What keeps its output, the launcher with its options, and the program. On several nodes the
    launcher meets at ``MEETING_PLACE``.
    """
    meeting = Rendezvous()
    if layout.nodes > 1:
        meeting = Rendezvous(layout.nodes, layout.nodes, MEETING_PLACE, here=False)
    command = node_command(job, folder, replace(options, call=call, meeting=meeting))
    return (
        " ".join(map(_quoted_but_checkpoint, command.starter)),
        " ".join(map(_quoted_but_meeting, command.launcher)),
        " ".join(map(_quoted_but_checkpoint, command.program)),
    )


def segment_comment(job: Job, index: int) -> str:
    """A line of a script that says which steps a segment trains."""
    segments = job.spec.segments
    first = segments[index - 1].until + 1 if index else 1
    return (
        f"# Segment {index + 1} of {len(segments)}: steps {first} to {segments[index].until}, "
        f"{segments[index].parallelism.world_size} ranks.\n"
    )


def _quoted_but_meeting(word: str) -> str:
    """An argument of a launcher in which bash inserts the meeting place or its port."""
    for variable in (MEETING_PLACE, MEETING_PORT):
        before, found, after = word.partition(variable)
        if found:
            return f'{shlex.quote(before)}"{variable}"{shlex.quote(after) if after else ""}'
    return shlex.quote(word)


def _quoted_but_checkpoint(word: str) -> str:
    """A word in which bash inserts the checkpoint that the script has found."""
    first, *others = word.split(FOUND_CHECKPOINT)
    if not others:
        return shlex.quote(word)
    parts = (shlex.quote(each) if each else "" for each in (first, *others))
    return f'"${_CHECKPOINT}"'.join(parts)


def _one_line(text: str) -> str:
    """A text for a comment of a script."""
    return " ".join(text.splitlines())
