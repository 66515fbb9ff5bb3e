"""Names of the files and folders of a run folder (``docs/architecture.md`` draws it)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

JOB = "job.json"
"""The job, for its ranks."""
NEWEST_CHECKPOINT = "converge: the newest complete checkpoint is "
"""What stands before its path in the line that ``rank.start.newest`` prints for a batch script."""
JOB_VARIABLE = "CONVERGE_JOB"
"""Environment variable with its path, by which the probe in a program finds its job."""
SEGMENT_VARIABLE = "CONVERGE_SEGMENT"
"""The same with the index of the segment of an elastic set that this call trains."""
METRICS = "metrics.jsonl"
"""The metrics, once training has reached its last step (of the run or the pass)."""
METRICS_PART = "metrics.jsonl.part"
"""The metrics while they are written."""
METRICS_FILES = (METRICS, METRICS_PART)
IN_FORCE = "in_force.json"
TENSORS = "tensors"
FROZEN = "frozen.npz"
ACTIVATIONS = "activations.npz"
"""What modules computed in the first batches."""
OPERATIONS = "operations"
"""What one module computed, operation by operation: a file per rank."""
PASSES = "passes"
"""One folder per pass of a resumed run, with the evidence of its own ranks."""
START = "start.json"
"""In a pass of a program without the probe: how converge started it, and which curve is its own."""
STATE = "state"
"""In a pass: the content of checkpoints when they were saved and loaded."""
FAULTS = "faults"
IMPORTED = "imported"
"""The files that each rank imported from outside of its toolchain's packages."""
CHECKPOINTS = "checkpoint"
TORN = "torn"
"""Incomplete checkpoints, set aside."""
CHECKPOINT_METADATA = ".metadata"
"""torch.distributed.checkpoint writes it last: a checkpoint without it is incomplete."""
LOGS = "logs"
AGENT_LOG = "torchrun.log"
"""In ``logs/``: standard output and error of torchrun's agent."""
PROGRAM_LOG = "program.log"
"""The same for any other launcher and its ranks."""
FAILURES = "failures.json"
"""In ``logs/``: how each rank ended, written by ``converge_harness.rank.start.agent``."""
FAILURES_VARIABLE = "CONVERGE_FAILURES"
"""In an agent's environment: the path of that file."""
PARENT_VARIABLE = "CONVERGE_PARENT"
"""In the environment of a process of ours: the id of its parent, by which it notices that the
parent has already ended."""
TOGETHER_VARIABLE = "CONVERGE_TOGETHER"
"""In an agent's environment: files, one of each agent that starts together (``together_value``)."""
GPU_OF_RANK = "CONVERGE_GPU_OF_RANK"
"""In an agent's environment if its ranks share GPUs: the GPU of each of them, as in ``0,0,1``."""
OUTPUT = "output"
"""``{output}`` of a user's program."""
DATASETS = "datasets"
"""The cache of torchtitan's own loader."""
STREAMING = "streaming"
"""The lock files of MosaicML Streaming."""
COMPILED = "inductor"
"""Compiled kernels."""
RECORD = "record.json"
"""The result of the run; written last."""
JOB_SCRIPT = "job.sh"
"""The batch script of a scheduler's job, or that of its pods."""
SLURM_LOG = "slurm.log"
"""What that script printed under Slurm, all of its starts."""
SUBMISSION = "submission.json"
"""The scheduler's job of the run."""
ENDED = "ended.json"
"""Written by the batch script of a scheduler's job when it ends: exit code and restart count."""
STARTED = "started"
"""One folder per call and pod of Kubernetes that has started, such as ``call-01.pod-0``."""
WAIT = "wait.json"
"""The steps after which the ranks wait until converge lets them train on."""

NO_EVIDENCE = frozenset({CHECKPOINTS, DATASETS, COMPILED, LOGS, OUTPUT, STREAMING, TORN, IMPORTED})
"""Folders that are not evidence."""
EVIDENCE_SUFFIXES = frozenset({".json", ".jsonl", ".npz", ".part"})
WRITTEN_LATER = frozenset({RECORD, SUBMISSION, WAIT})
"""Files that are not evidence either: converge writes them."""

OF_THE_RANKS = (METRICS, METRICS_PART, TENSORS, IN_FORCE, CHECKPOINTS, DATASETS, STREAMING)
"""What ranks write; a new start of a run that is not resumed must not find it."""
OF_THE_PASSES = (PASSES, FAULTS, TORN, LOGS)
"""What a run writes over all of its passes."""


SAMPLE = "step"
"""Prefix of the name of a sampled step's file in ``tensors/``; the step follows."""
SAVED = "saved-step"
"""The same in ``state/``, for a saved checkpoint."""
LOADED = "loaded-step"
"""The same for a loaded one."""


def together_value(own: Path, others: Iterable[Path]) -> str:
    """The value of ``TOGETHER_VARIABLE``: this agent's own file, and those of the others."""
    return json.dumps([str(own), *map(str, others)])


def read_together(value: str) -> tuple[Path, list[Path]]:
    """The same two, of that value."""
    own, *others = map(Path, json.loads(value))
    return own, others


def is_inside(path: Path, run_folder: Path) -> bool:
    """Whether a path is one of the run folder, which it does not leave again by ``..``."""
    return path.is_relative_to(run_folder) and ".." not in path.relative_to(run_folder).parts


def arrays_name(prefix: str, step: int) -> str:
    """The name of a step's file: ``step-00000001.npz``."""
    return f"{prefix}-{step:08d}.npz"


def manifest_name(step: int) -> str:
    """The name of the manifest of a step's checkpoint, in ``state/``."""
    return f"{SAVED}-{step:08d}.json"


def metrics_files(folder: Path) -> tuple[Path, Path]:
    """The metrics file while ranks train, and the one of complete training."""
    return folder / METRICS_PART, folder / METRICS


_CALL = "call-"
OF_NODE = ".node-"
"""In the name of the logs of another node than the first, before its number."""


def call_logs(logs: Path, call: int, node: int = 0) -> Path:
    """The folder for a node's agent: output of the agent and its ranks, and how they failed."""
    return logs / (f"{_CALL}{call:02d}" + (f"{OF_NODE}{node}" if node else ""))


def call_name_in_bash(call: str) -> str:
    """The name of such a folder as a word of a shell script, for the number that a word says.

    >>> call_name_in_bash("$call")
    'call-$(printf %02d "$call")'
    """
    return f'{_CALL}$(printf %02d "{call}")'


def call_number(logs: Path) -> int:
    """The number of the call of such a folder: 2 of ``call-02.node-1``."""
    return int(logs.name.removeprefix(_CALL).partition(".")[0])


def newest_call_logs(logs: Path) -> tuple[Path, ...]:
    """Such folders of the newest call, those of the first node first; empty if there is none."""
    found = sorted(logs.glob(f"{_CALL}[0-9]*"))
    newest = max(map(call_number, found), default=0)
    return tuple(path for path in found if call_number(path) == newest)


def calls_so_far(logs: Path) -> int:
    """The highest number of a call that has such a folder; 0 if there is none."""
    return max(map(call_number, newest_call_logs(logs)), default=0)


def seed_checkpoint_of(folder: Path) -> Path:
    """The checkpoint in the run folder of a seed-checkpoint job."""
    return checkpoint_of(folder, 0)


def checkpoint_of(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint, which need not exist."""
    return folder / CHECKPOINTS / f"step-{step}"
