"""What srun starts on the nodes of a scheduler's job. Pure.

Nothing of converge needs to be on a node but the probe, in the program's environment. So bash does
what converge does on one machine: it makes the folder of the output, and adds what only a node or a
task knows. ``bash -c TEXT converge LOGS CALL …`` has the text in the batch script, where it can be
read; what follows is never read by bash.
"""

from __future__ import annotations

from pathlib import Path

from converge_harness.model import Job
from converge_harness.run_folder.layout import AGENT_LOG, LOGS, PROGRAM_LOG
from converge_harness.trainers.calls import (
    MEETING_PORT,
    Call,
    NodeCommand,
    Rendezvous,
    first_call,
    part_of,
)
from converge_harness.trainers.command.argv import (
    OF_A_TASK,
    TORCHRUN,
    arguments,
    command_of,
    launcher_call,
)
from converge_harness.trainers.command.failure import TASK_END, TASKS
from converge_harness.trainers.command.settings import RankLauncher
from converge_harness.trainers.torchrun import node_options, node_starter

_START = """
set -eu
call=$(($2 + ${SLURM_RESTART_COUNT:-0}))
logs=$1/call-$(printf %02d "$call")"""
"""Of two arguments: the folder of all logs, and the call's number when the job starts first."""
_OF_TASK = f"""{_START}
{OF_A_TASK}
shift 2
own=$logs/{TASKS}/$RANK
mkdir -p "$own"
trap : TERM  # the program decides what it does when it is told to end
code=0
"$@" > "$own/stdout.log" 2> "$own/stderr.log" || code=$?
echo "$((code > 128 ? 128 - code : code)) $(date +%s.%N)" > "$own/{TASK_END}"
exit "$code"
"""
_OF_LAUNCHER = f"""{_START}
mkdir -p "$logs"
shift 2
exec "$@" > "$logs/{PROGRAM_LOG}" 2>&1
"""
_OF_TORCHRUN = f"""{_START}
[ "$SLURM_NODEID" -eq 0 ] || logs=$logs.node-$SLURM_NODEID
mkdir -p "$logs"
python=$3
shift 3
exec "$python" {" ".join(TORCHRUN)} "--rdzv-id=$SLURM_JOB_ID.$call" "--log-dir=$logs" \\
    CONF"$@" > "$logs/{AGENT_LOG}" 2>&1
"""
_IS_HOST = '"--rdzv-conf=is_host=$((SLURM_NODEID == 0))" '
"""The first node has the rendezvous, whatever its name is there."""


def node_command(
    job: Job,
    folder: Path,
    *,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
) -> NodeCommand:
    """What srun starts for one call (None: the first) of a job of a command trainer.

    Under torchrun a probed program is started by converge's own agent, which its environment has.

    Raises:
        ValueError: its launcher cannot run under a scheduler.
    """
    command, folder = command_of(job.spec), folder.absolute()
    call, meeting = call or first_call(job), meeting or Rendezvous()
    program = arguments(job, folder, data, call)
    ranks = part_of(job, call).world_size // meeting.most
    told = (str(folder / LOGS), str(call.number))
    match command.launcher:
        case RankLauncher.TORCHRUN:
            options = node_options(job, call, meeting)
            if command.probed:
                return NodeCommand(node_starter(job, folder, call), options, program)
            text = _OF_TORCHRUN.replace("CONF", _IS_HOST if meeting.most > 1 else "")
            starter = (*_bash(text), *told, str(job.toolchain.python))
            return NodeCommand(starter, options, program)
        case RankLauncher.SRUN:
            return NodeCommand((*_bash(_OF_TASK), *told), (), program)
        case RankLauncher.MPIRUN:
            raise ValueError("mpirun cannot run under a scheduler")
        case RankLauncher.COMPOSER | RankLauncher.DEEPSPEED | RankLauncher.NONE:
            launcher = launcher_call(job, ranks, MEETING_PORT, devices)
            return NodeCommand((*_bash(_OF_LAUNCHER), *told), launcher, program)


def _bash(text: str) -> tuple[str, ...]:
    return ("bash", "-c", text, "converge")
