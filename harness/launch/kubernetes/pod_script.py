"""What every pod of a job runs: the batch step of a Slurm job, without srun. Pure.

A pod is a node of its job. The step reads from variables of Slurm which node it is on, so the
script sets these from what Kubernetes says. A batch script runs once per job, but this one runs in
all pods at the same time, so it removes nothing: converge has emptied the run folder before, and no
pod starts a second time in it. Each claims its place by a folder of its own, which is also where
the others see that it is ready.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from converge_harness.launch.kubernetes.objects import OBJECT, host_names, object_name
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.launch.scheduler.batch_step import (
    HEAD_VARIABLE,
    OF_MEETING,
    Layout,
    PlacedCall,
    changed,
    checkpoint_lines,
    header,
    own_folders_line,
    placed_calls,
    segment_comment,
    step_lines,
    surroundings,
    work_folder_line,
)
from converge_harness.model import Job
from converge_harness.run_folder.ended import shell_lines
from converge_harness.run_folder.layout import ENDED, LOGS, OF_NODE, STARTED, call_name_in_bash
from converge_harness.trainers import (
    MEETING_PLACE,
    MEETING_PORT,
    needs_port,
)

PORT = 29_500
"""Port of the rendezvous: each pod has an address of its own."""
PATIENCE_S = 1800
"""How long a pod waits for the others, which may start later."""


def pod_script(request: ScriptRequest) -> str:
    """The script of all pods of a job; its argument says which call, if there are several.

    Raises ConfigError when the ranks do not fill nodes.
    """
    job, folder, cluster = request.job, request.folder.absolute(), request.cluster
    calls, largest = placed_calls(request)
    exported = calls[0].exported
    steps = [changed(exported, each.exported) + _step(job, folder, each) for each in calls]
    places = [_pods(job, each, index) for index, each in enumerate(calls)]
    about = f"Written by converge, for the pods of {OBJECT} beside it."
    sections = (
        header(job, request.experiment, largest, about, on="in", node="pod"),
        "set -euo pipefail",
        f"converge_run_folder={shlex.quote(str(folder))}",
        _place(job),
        _chosen(places),
        _only_once(),
        _ending(calls[-1].call.number),
        own_folders_line(job),
        surroundings(cluster, exported),
        _meeting_place(job, largest),
        work_folder_line(job, folder),
        checkpoint_lines(job, folder, continues=request.continues),
        _chosen(steps),
        'converge_step=$!\nwait "$converge_step"',
    )
    return "\n\n".join(section for section in sections if section) + "\n"


# ------------------------------------------------------------------ sections


def _place(job: Job) -> str:
    """What Slurm would say of the node. The number is only to tell jobs apart."""
    number = int(job.identity[:7], 16)
    return f"""\
# The step reads its place from these variables, as on a node of Slurm.
export SLURM_NODEID=${{JOB_COMPLETION_INDEX:?is set by Kubernetes in the pods of an Indexed Job}}
export SLURM_JOB_ID={number} SLURM_RESTART_COUNT=0"""


def _pods(job: Job, placed: PlacedCall, index: int) -> str:
    """The number of a call's logs, and its pods."""
    nodes = placed.layout.nodes
    lines = [f"converge_call={placed.call.number}", f"export SLURM_STEP_NUM_NODES={nodes}"]
    if nodes > 1:
        lines.append(f"converge_pods={host_names(job, index)}")
    return "\n".join(lines)


def _chosen(of_calls: Sequence[str]) -> str:
    """The lines of the call that the script's argument names, counted from 1.

    Not indented, since a quoted text in them may have several lines.
    """
    if len(of_calls) == 1:
        return of_calls[0]
    cases = (f"{number})\n{text}\n;;" for number, text in enumerate(of_calls, start=1))
    return "\n".join((f"case ${{1:?which of {len(of_calls)} calls}} in", *cases, "esac"))


def _only_once() -> str:
    return f"""\
# A pod must not mix its evidence with that of an earlier one: only the first can make this folder.
converge_started=$converge_run_folder/{STARTED}/{call_name_in_bash("$converge_call")}.pod
converge_token=$(< /proc/sys/kernel/random/uuid)
mkdir -p "$converge_run_folder/{STARTED}"
converge_logs=$converge_run_folder/{LOGS}/{call_name_in_bash("$converge_call")}
[ "$SLURM_NODEID" -eq 0 ] || converge_logs=$converge_logs{OF_NODE}$SLURM_NODEID
if [ -e "$converge_logs" ] || [ -e "$converge_run_folder/{ENDED}" ] ||
    ! mkdir "$converge_started-$SLURM_NODEID"; then
    echo "$converge_run_folder: has files of an earlier start of pod $SLURM_NODEID in call" \\
        "$converge_call; let converge submit this job again" >&2
    exit 1
fi
echo "$converge_token" > "$converge_started-$SLURM_NODEID"/token"""


def _ending(last: int) -> str:
    """Bash traps that write ``ended.json`` when the job is over.

    The agents of several pods end together, so the first pod can speak for all. Kubernetes sends
    SIGTERM to the script alone. A pod may outlive its run: once converge has emptied the run folder
    for the next one, the token in it is gone or another.
    """
    written = shell_lines(
        folder="$converge_run_folder", returncode="$converge_code", ran_s="$SECONDS"
    )
    return f"""\
# The first pod writes how the job ended. A call before the last is only an end if it fails.
finish() {{
    converge_code=$?
    trap '' TERM
    if [ "$SLURM_NODEID" -ne 0 ] ||
        {{ [ "$converge_code" -eq 0 ] && [ "$converge_call" -lt {last} ]; }}; then
        exit "$converge_code"
    fi
    if [ "$(cat "$converge_started-0/token" 2> /dev/null)" != "$converge_token" ]; then
        exit "$converge_code"  # this folder is of a later run by now
    fi
{written}
    exit "$converge_code"
}}
stop() {{
    trap '' TERM
    if [ -n "${{converge_step:-}}" ]; then
        kill -TERM "$converge_step" 2> /dev/null || true
        wait "$converge_step" || true
    fi
    exit 143
}}
trap finish EXIT
trap stop TERM"""


def _meeting_place(job: Job, largest: Layout) -> str:
    """Where ranks meet, if they are in several pods or nobody else finds a port for them."""
    place, port = MEETING_PLACE.removeprefix("$"), MEETING_PORT.removeprefix("$")
    if needs_port(job):  # its launcher starts ranks on one node
        address, at = OF_MEETING
        return f"{port}={PORT}\nexport {address}=127.0.0.1 {at}={MEETING_PORT}"
    if largest.nodes == 1:
        return ""
    service = object_name(job)
    return f"""\
# Where ranks meet. A pod has a name in the JobSet's service once it has an address, which is before
# its image is pulled, and agents wait only a minute for the first: so all wait until all are ready.
{port}={PORT}
if [ "$SLURM_STEP_NUM_NODES" -gt 1 ]; then
    touch "$converge_started-$SLURM_NODEID/ready"
    for ((converge_pod = 0; converge_pod < SLURM_STEP_NUM_NODES; converge_pod++)); do
        until [ -e "$converge_started-$converge_pod/ready" ] &&
            {{ [ -n "${{{HEAD_VARIABLE}:-}}" ] ||
            getent hosts "$converge_pods-$converge_pod.{service}" > /dev/null; }}; do
            if [ "$SECONDS" -gt {PATIENCE_S} ]; then
                echo "pod $converge_pod of $converge_pods: not ready after {PATIENCE_S} s" >&2
                exit 1
            fi
            sleep 2
        done
    done
    if [ -z "${{{HEAD_VARIABLE}:-}}" ]; then
        {HEAD_VARIABLE}=$converge_pods-0.{service}
        export SLURMD_NODENAME=$converge_pods-$SLURM_NODEID.{service}
    fi
fi
{place}=${{{HEAD_VARIABLE}:-}}:{MEETING_PORT}"""


def _step(job: Job, folder: Path, placed: PlacedCall) -> str:
    """The command of a call, in the background: bash notices SIGTERM only while it waits."""
    call = placed.call
    comment = "" if call.segment is None else segment_comment(job, call.segment)
    lines = step_lines(job, folder, call, placed.layout, placed.options)
    return comment + " \\\n    ".join(line for line in lines if line) + " &"
