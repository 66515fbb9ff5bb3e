"""What srun starts on the nodes of a scheduler's job. Pure.

Nothing of converge needs to be on a node but the probe, in the program's environment. So bash does
what converge does on one machine: it makes the folder of the output, and adds what only a node or a
task knows. ``bash -c TEXT converge LOGS CALL …`` has the text in the batch script, where it can be
read; what follows is never read by bash. ``env`` sets the file's own variables for the program
alone: srun, bash and mkdir run without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from converge_harness.model import Job
from converge_harness.run_folder.layout import (
    AGENT_LOG,
    LOGS,
    OF_NODE,
    PROGRAM_LOG,
    call_name_in_bash,
)
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

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_START = f"""
set -eu
converge_call=$(($2 + ${{SLURM_RESTART_COUNT:-0}}))
converge_logs=$1/{call_name_in_bash("$converge_call")}"""
"""Takes two arguments: the folder of all logs, and the number of the job's first call."""
_OF_TASK = f"""{_START}
{OF_A_TASK}
shift 2
converge_own=$converge_logs/{TASKS}/$RANK
mkdir -p "$converge_own"
trap : TERM  # SIGTERM reaches the program too; bash has to outlive it and note how it ended
converge_code=0
"$@" > "$converge_own/stdout.log" 2> "$converge_own/stderr.log" || converge_code=$?
echo "$converge_code $(date +%s.%N)" > "$converge_own/{TASK_END}"
exit "$converge_code"
"""
_OF_LAUNCHER = f"""{_START}
mkdir -p "$converge_logs"
shift 2
exec "$@" > "$converge_logs/{PROGRAM_LOG}" 2>&1
"""
_OF_TORCHRUN = f"""{_START}
[ "$SLURM_NODEID" -eq 0 ] || converge_logs=$converge_logs{OF_NODE}$SLURM_NODEID
mkdir -p "$converge_logs"
converge_torchrun=("${{@:4:$3}}")  # so many words start torchrun; its other options follow
shift $(($3 + 3))
converge_torchrun+=("--rdzv-id=$SLURM_JOB_ID.$converge_call" "--log-dir=$converge_logs")
OF_NODES\
exec "${{converge_torchrun[@]}}" "$@" > "$converge_logs/{AGENT_LOG}" 2>&1
"""
_OF_NODES = """\
# The first node has the rendezvous, whatever its name is there. A node counts as lost after 60 s
# without a keep-alive: the 15 s of torchrun are short on a network file system.
converge_torchrun+=("--rdzv-conf=is_host=$((SLURM_NODEID == 0)),keep_alive_interval=5,\
keep_alive_max_attempt=12")
# Ranks meet under this name: the own name of a host may be one that only it can resolve.
if getent hosts "${SLURMD_NODENAME:-}" > /dev/null 2>&1; then
    converge_torchrun+=("--local-addr=$SLURMD_NODENAME")
fi
"""
"""As ``converge_harness.rank.start.node`` does it for programs with the probe."""


def node_command(
    job: Job,
    folder: Path,
    *,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> NodeCommand:
    """What srun starts for one call (None: the first) of a job of a command trainer.

    Under torchrun a probed program is started by converge's own agent, which its environment has.
    ``variables`` are set for what this starts, not for the bash around it.

    Raises:
        ValueError: its launcher cannot run under a scheduler.
    """
    command, folder = command_of(job.spec), folder.absolute()
    call, meeting = call or first_call(job), meeting or Rendezvous()
    program = arguments(job, folder, data, call)
    ranks = part_of(job, call).world_size // meeting.most
    logs_and_call = (str(folder / LOGS), str(call.number))
    words = tuple(f"{name}={text}" for name, text in sorted(variables.items()))
    setting = ("env", *words) if words else ()
    match command.launcher:
        case RankLauncher.TORCHRUN:
            options = node_options(job, call, meeting)
            if command.probed:
                return NodeCommand((*setting, *node_starter(job, folder, call)), options, program)
            text = _OF_TORCHRUN.replace("OF_NODES", _OF_NODES if meeting.most > 1 else "")
            torchrun = (*setting, str(job.toolchain.python), *TORCHRUN)
            starter = (*_bash(text), *logs_and_call, str(len(torchrun)), *torchrun)
            return NodeCommand(starter, options, program)
        case RankLauncher.SRUN:
            return NodeCommand((*_bash(_OF_TASK), *logs_and_call, *setting), (), program)
        case RankLauncher.MPIRUN:
            raise ValueError("mpirun cannot run under a scheduler")
        case RankLauncher.COMPOSER | RankLauncher.DEEPSPEED | RankLauncher.NONE:
            launcher = launcher_call(job, ranks, MEETING_PORT, devices)
            return NodeCommand((*_bash(_OF_LAUNCHER), *logs_and_call, *setting), launcher, program)


def _bash(text: str) -> tuple[str, ...]:
    return ("bash", "-c", text, "converge")
