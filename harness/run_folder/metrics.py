"""``metrics.jsonl``: a header, a line for every step, other lines in between, and an end line.

It is named ``metrics.jsonl.part`` until it is complete. A step that a restart replays has several
lines; readers compare them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

from converge_harness.run_folder.documents import SCHEMA, number, to_json
from converge_harness.run_folder.layout import (
    ACTIVATIONS,
    FROZEN,
    IN_FORCE,
    METRICS_FILES,
    TENSORS,
    metrics_files,
)

HEADER = "header"
STEP = "step"
REPLICAS = "replicas"
LOADED = "loaded"
END = "end"
KINDS = (STEP, REPLICAS, LOADED, END)
"""Kinds of the lines after the header."""

LOSS = "loss"
GRAD_NORM = "grad_norm"
LOSS_RECOMPUTED = "loss_recomputed"
GRAD_NORM_RECOMPUTED = "grad_norm_recomputed"
LR = "lr"
TOKENS = "tokens"
SECONDS = "seconds"
AT = "at"
MEMORY_BYTES = "memory_bytes"
GRADS_MISSING = "grads_missing"
SIGNALS = (
    LOSS,
    GRAD_NORM,
    LOSS_RECOMPUTED,
    GRAD_NORM_RECOMPUTED,
    LR,
    TOKENS,
    SECONDS,
    AT,
    MEMORY_BYTES,
    GRADS_MISSING,
)
"""Keys of the numbers in a step's line."""
BATCH_DIGEST = "batch_digest"
BATCH_AGREES = "batch_agrees"
RANDOM_STATE = "random_state"
"""Digest of torch's generators' states before the step, of those that it drew from, over all
ranks; empty if it drew nothing."""
GLOBAL_STATES = {"python": "python_random_state", "numpy": "numpy_random_state"}
"""The same of the global generators of Python's ``random`` and of ``numpy.random``, each alone."""
RANDOM_SHARED = "random_shared"
"""Whether ranks that train on other samples drew the same numbers; null if fewer than two drew."""
MISSING_NAMES = "grads_missing_names"
PROBLEMS = "problems"


class SupersededError(Exception):
    """The same job has been started again and has taken over the run."""


class MetricsWriter:
    """Writes ``metrics.jsonl.part``; ``finish`` makes it ``metrics.jsonl``.

    Files that an earlier start of the job left in the folder are deleted: they are not evidence of
    this one. Every line raises SupersededError once a later start has done the same.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _forget(folder)
        self._part, self._final = metrics_files(folder)
        self._stream: TextIO = self._part.open("w", encoding="utf-8")
        self._line({"schema": SCHEMA, "kind": HEADER, **header})

    def step(self, values: Mapping[str, Any]) -> None:
        self._line({"kind": STEP, **values})

    def replicas(self, values: Mapping[str, Any]) -> None:
        self._line({"kind": REPLICAS, **values})

    def loaded(self, step: int | None) -> None:
        """Write that the checkpoint of a step has been loaded; None: an unknown one."""
        self._line({"kind": LOADED, "step": step, AT: time.time()})

    def sync(self) -> None:
        """Sync all lines to disk, before a checkpoint of their step is relied on."""
        if not self._stream.closed:  # else ``finish`` has done it
            os.fsync(self._stream.fileno())

    def finish(self, steps: int) -> None:
        """Write the end line, sync, and give the file its final name."""
        self._line({"kind": END, "steps": steps})
        self.sync()
        self._stream.close()
        self._part.replace(self._final)

    def leave(self) -> None:
        """Close the file, which keeps the name of an incomplete one."""
        self._stream.close()

    def _line(self, values: Mapping[str, Any]) -> None:
        if not self._is_ours():
            raise SupersededError(
                f"{self._part} belongs to another process now: the job has been started again"
            )
        self._stream.write(to_json(values) + "\n")
        self._stream.flush()

    def _is_ours(self) -> bool:
        try:
            there = self._part.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._stream.fileno()))


def _forget(folder: Path) -> None:
    """Delete evidence, not truncate it: who still writes it then writes into nothing."""
    for name in (*METRICS_FILES, IN_FORCE, FROZEN, ACTIVATIONS):
        (folder / name).unlink(missing_ok=True)
    for sample in (folder / TENSORS).glob("step-*"):
        sample.unlink(missing_ok=True)


# --------------------------------------------------------------------- while the file grows


@dataclass(frozen=True, slots=True)
class StepLine:
    """The part of a step's line for progress; the judge reads the whole line later."""

    step: int
    loss: float | None
    memory_bytes: int = 0
    """Most that any of its ranks has held so far; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class LoadedLine:
    """A line that says that the ranks have loaded a checkpoint, and so are about to train."""


def progress_of(line: bytes) -> StepLine | LoadedLine | int | None:
    """A step, a load, or the last step according to an end line; None for others, also damaged.

    This is only for progress; damaged lines are reported by the readers.
    """
    try:
        value = json.loads(line)
        if value["kind"] == END:
            return int(value["steps"])
        if value["kind"] == LOADED:
            return LoadedLine()
        if value["kind"] != STEP:
            return None
        memory = number(value.get(MEMORY_BYTES))
        return StepLine(
            step=int(value["step"]),
            loss=number(value.get(LOSS)),
            memory_bytes=int(memory) if memory is not None and isfinite(memory) else 0,
        )
    except (ValueError, KeyError, TypeError):
        return None


def draws_random_numbers(files: Iterable[Path]) -> bool:
    """Whether two steps in succession drew random numbers, by the metrics of a run's passes.

    Damaged lines say nothing here; the readers report them. Files that are not there neither.
    """
    drew: set[int] = set()
    for path in files:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                value = json.loads(line)
                keys = (RANDOM_STATE, *GLOBAL_STATES.values())
                if value["kind"] == STEP and any(value.get(key) for key in keys):
                    drew.add(int(value["step"]))
    return any(step + 1 in drew for step in drew)


def step_reached(folder: Path) -> int | None:
    """The step that the ranks had to reach, once they have; None if they have not finished.

    ``folder`` is that of the run, or of the pass.
    """
    try:
        lines = metrics_files(folder)[1].read_bytes().splitlines()
        end: dict[str, Any] = json.loads(lines[-1])
        return int(end["steps"]) if end["kind"] == END else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def uncounted_problem(name: str, why: str) -> str:
    """The sentence of ``problems`` on a parameter whose gradient could not be counted."""
    return f"{name}: {why}"


def uncounted_name(problem: str) -> str | None:
    """The parameter that such a sentence names; None of other sentences without a colon."""
    name, colon, _ = problem.partition(": ")
    return name if colon else None
