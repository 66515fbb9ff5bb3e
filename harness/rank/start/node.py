"""One node of a Slurm job: ``python -m converge_harness.rank.start.node --logs L --call N -- …``.

srun starts it once per node. The arguments after ``--`` are torchrun's, the same on every node and
each time that the job starts; what differs is read from what Slurm says of the node and the job.
Then it is ``converge_harness.rank.start.agent``.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from converge_harness.rank.start import agent
from converge_harness.run_folder.launcher_variables import is_of_launcher
from converge_harness.run_folder.layout import (
    AGENT_LOG,
    FAILURES,
    FAILURES_VARIABLE,
    GPU_OF_RANK,
    PARENT_VARIABLE,
    TOGETHER_VARIABLE,
    call_logs,
)

_NOT_INHERITED = frozenset({PARENT_VARIABLE, GPU_OF_RANK, TOGETHER_VARIABLE})
"""Of an agent around the shell in which sbatch was called. sbatch hands variables on."""
_KEEP_ALIVE_S, _KEEP_ALIVES = 5, 12
"""A node without a keep-alive for their product counts as lost. torchrun's own 15 s are
short for an agent on a network file system; Slurm sees a dead node by itself."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="converge_harness.rank.start.node")
    parser.add_argument("--logs", type=Path, required=True, help="folder of all calls' logs")
    parser.add_argument("--call", type=int, required=True, help="of the first start of the job")
    parser.add_argument("torchrun", nargs="+", help="arguments of torchrun, after --")
    asked = parser.parse_args(arguments)
    call = asked.call + _number("SLURM_RESTART_COUNT")
    node = _number("SLURM_NODEID")
    logs = call_logs(asked.logs, call, node)
    logs.mkdir(parents=True, exist_ok=True)
    _keep_output(logs / AGENT_LOG)
    for name in tuple(os.environ):
        if name in _NOT_INHERITED or is_of_launcher(name):
            del os.environ[name]
    os.environ[FAILURES_VARIABLE] = str(logs / FAILURES)
    arguments = [*node_arguments(os.environ, logs, call), *asked.torchrun]
    if _number("SLURM_STEP_NUM_NODES") > 1:
        return agent.main(arguments)
    with tempfile.TemporaryDirectory(prefix="converge-") as private:  # of mode 0700
        return agent.main([f"--rdzv-endpoint={private}/rendezvous", *arguments])


def node_arguments(slurm: Mapping[str, str], logs: Path, call: int) -> list[str]:
    """Arguments of torchrun on this node, in this start of the job; ``slurm`` is the environment.

    They go before the others: of two of a kind, the later counts.
    """
    arguments = [
        # No agent of an earlier start, or of a job before this one, may join this rendezvous.
        f"--rdzv-id={slurm.get('SLURM_JOB_ID', 'job')}.{call}",
        f"--log-dir={logs}",
    ]
    if _number("SLURM_STEP_NUM_NODES", slurm) > 1:
        is_host = int(_number("SLURM_NODEID", slurm) == 0)
        arguments.append(
            f"--rdzv-conf=is_host={is_host},keep_alive_interval={_KEEP_ALIVE_S},"
            f"keep_alive_max_attempt={_KEEP_ALIVES}"
        )
        name = slurm.get("SLURMD_NODENAME", "")
        if name and _resolves(name):
            # Ranks meet on the node of rank 0, under this name: the host's own may be one that
            # only it can resolve.
            arguments.append(f"--local-addr={name}")
    return arguments


def _keep_output(log: Path) -> None:
    """Print into a file from now on, as far as this process and its children go."""
    print(f"{socket.gethostname()}: torchrun prints to {log}", flush=True)
    with log.open("ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)


def _number(name: str, slurm: Mapping[str, str] | None = None) -> int:
    return int((os.environ if slurm is None else slurm).get(name) or 0)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
