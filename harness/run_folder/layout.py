"""Names of the files and folders of a run folder (``docs/architecture.md`` draws it)."""

from __future__ import annotations

from pathlib import Path

JOB = "job.json"
"""What the ranks are told."""
JOB_VARIABLE = "CONVERGE_JOB"
"""Of the environment: its path, by which the probe in a program finds its job."""
METRICS = "metrics.jsonl"
"""Once training is complete, as far as the ranks were to go."""
METRICS_PART = "metrics.jsonl.part"
"""The same file while it grows."""
METRICS_FILES = (METRICS, METRICS_PART)
IN_FORCE = "in_force.json"
TENSORS = "tensors"
FROZEN = "frozen.npz"
PASSES = "passes"
"""A folder per pass, of a run that is resumed; each has the evidence of its own ranks."""
STATE = "state"
"""Of a pass: what checkpoints held when they were saved and loaded."""
FAULTS = "faults"
IMPORTED = "imported"
"""What each rank imported from outside of its toolchain's packages."""
CHECKPOINTS = "checkpoint"
TORN = "torn"
"""Checkpoints that are not whole, set aside."""
CHECKPOINT_METADATA = ".metadata"
"""torch.distributed.checkpoint writes it last: a folder without it is no whole checkpoint."""
LOGS = "logs"
AGENT_LOG = "torchrun.log"
"""In ``logs/``: standard output and error of torchrun's agent."""
PROGRAM_LOG = "program.log"
"""The same for any other launcher and its ranks."""
FAILURES = "failures.json"
"""In ``logs/``: how each rank ended, left by ``converge_harness.rank.start.agent``."""
FAILURES_VARIABLE = "CONVERGE_FAILURES"
"""Of an agent's environment: the path of that file."""
OUTPUT = "output"
"""``{output}`` of another program than torchtitan."""
DATASETS = "datasets"
"""The cache of torchtitan's own loader."""
STREAMING = "streaming"
"""The lock files of MosaicML Streaming."""
COMPILED = "inductor"
"""Kernels that the run compiled."""
RECORD = "record.json"
"""How the run went; written last."""
SUBMISSION = "submission.json"
"""Which scheduler's job the run is."""
ENDED = "ended.json"
"""Left by the script of a scheduler's job when it ends: exit code, and the restart it was in."""

NO_EVIDENCE = frozenset({CHECKPOINTS, DATASETS, COMPILED, LOGS, OUTPUT, STREAMING, TORN, IMPORTED})
"""Folders that nothing is judged by."""
EVIDENCE_SUFFIXES = frozenset({".json", ".jsonl", ".npz", ".part"})
WRITTEN_LATER = frozenset({RECORD, SUBMISSION})
"""No evidence either: the harness writes them while a run is not judged yet, or after it."""

OF_THE_RANKS = (METRICS, METRICS_PART, TENSORS, IN_FORCE, CHECKPOINTS, DATASETS, STREAMING)
"""What ranks leave; of a run that is not resumed, a new start has to begin without it."""
OF_THE_PASSES = (PASSES, FAULTS, TORN, LOGS)
"""What a run leaves over all of its passes."""


SAMPLE = "step"
"""How the name of a sampled step's file in ``tensors/`` begins; the step follows."""
SAVED = "saved-step"
"""The same in ``state/``, of a checkpoint that was saved."""
LOADED = "loaded-step"
"""The same of one that was loaded."""


def arrays_name(prefix: str, step: int) -> str:
    """The name of a step's file: ``step-00000001.npz``."""
    return f"{prefix}-{step:08d}.npz"


def manifest_name(step: int) -> str:
    """The name of the manifest of a step's checkpoint, beside what it held."""
    return f"{SAVED}-{step:08d}.json"


def metrics_files(folder: Path) -> tuple[Path, Path]:
    """Where steps appear while ranks train, and where they are when training is complete."""
    return folder / METRICS_PART, folder / METRICS


def call_logs(logs: Path, call: int, node: int = 0) -> Path:
    """Where the agent of a node leaves what it and its ranks print, and how they failed."""
    return logs / (f"call-{call:02d}" + (f".node-{node}" if node else ""))


def seed_checkpoint_of(folder: Path) -> Path:
    """The checkpoint that a seed-checkpoint job leaves in its run folder."""
    return checkpoint_of(folder, 0)


def checkpoint_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step, whether it is there or not."""
    return folder / CHECKPOINTS / f"step-{step}"
