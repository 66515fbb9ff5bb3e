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
from typing import Any, NamedTuple, NotRequired, TextIO, TypedDict, cast

from converge_harness.run_folder.documents import SCHEMA, number, to_json
from converge_harness.run_folder.layout import (
    ACTIVATIONS,
    FROZEN,
    IN_FORCE,
    METRICS_FILES,
    TENSORS,
    metrics_files,
)
from converge_harness.run_folder.shapes import (
    COUNT,
    COUNTS,
    COUNTS_LISTED,
    FLAG,
    OBJECT,
    TEXTS,
    Shape,
    is_count,
    is_texts,
    misfit,
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
GLOBAL_STATES = {"python": "python_random_state", "numpy": "numpy_random_state"}
"""By library, the key of its global generator's digest."""
RANDOM_SHARED = "random_shared"
MASKS = "dropout_masks"
TERMS = "terms"
MISSING_NAMES = "grads_missing_names"
PROBLEMS = "problems"
UNCOUNTED = "uncounted"


HeaderDocument = TypedDict(
    "HeaderDocument",
    {
        "identity": str,
        "world_size": int,
        "steps": NotRequired[int],
        "versions": dict[str, str],
        "pass": NotRequired[int],
        "segment": NotRequired[int | None],
    },
)
"""The first line: the job's identity and last step, packages by name; of a pass its number and
segment, both from 0 or null."""
HEADER_SHAPES: Mapping[str, Shape] = {"pass": COUNT, "segment": COUNT, "world_size": COUNT}


class ReportedDocument(TypedDict):
    """The part of a line of kind ``STEP`` that the trainer reports, and when it did."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    seconds: float
    """Since the first step began."""
    at: NotRequired[float]
    """Of a pass: seconds since 1970."""


class MeasuredDocument(TypedDict):
    """The part of a line of kind ``STEP`` that the probe works out; null where it could not.

    Lines of older versions lack keys.
    """

    loss_recomputed: float | None
    """Mean cross entropy per valid token of the global batch, in nats."""
    grad_norm_recomputed: float | None
    """L2 norm of all gradients, before clipping."""
    tokens: int
    """Valid tokens of the global batch."""
    batch_digest: str
    """Of all samples of the step, in any order."""
    batch_agrees: bool
    """Whether all ranks of each data-parallel coordinate saw the same samples."""
    grads_missing: int | None
    """Parameters whose whole gradient is missing or zero."""
    grads_missing_names: NotRequired[list[str]]
    """Their names, if there are any."""
    random_state: str
    """Digest of torch's generators' states before the step, of those that it drew from, over all
    ranks; empty if it drew nothing."""
    python_random_state: str
    """The same of the global generator of Python's ``random``."""
    numpy_random_state: str
    """The same of the global generator of ``numpy.random``."""
    random_shared: bool | None
    """Whether ranks that train on other samples drew the same numbers; null if fewer than two
    drew."""
    dropout_masks: NotRequired[MasksDocument]
    """Of a sampled step in which masks of dropout were drawn and seen on every rank."""
    terms: NotRequired[TermsDocument]
    """Of a sampled step of which the program showed what its objective is made of."""
    memory_bytes: int
    """The most that any rank has held so far."""
    problems: NotRequired[list[str]]
    """Sentences on what could not be measured; with them always ``uncounted``."""
    uncounted: NotRequired[list[str]]
    """Parameters whose gradients could not be counted, each of which has a sentence."""


class DisagreementDocument(TypedDict):
    """A tensor whose copies are not the same bits on all ranks that hold them."""

    kind: str
    tensor: str
    mesh_dims: list[str]
    """Dimensions of the mesh along which copies differ."""
    groups: list[list[int]]
    """Ranks whose copies of one shard are alike."""
    states: NotRequired[list[str]]
    """Of a parameter's optimizer states, those that differ."""


class ReplicasDocument(TypedDict):
    """A line of kind ``REPLICAS``."""

    step: int
    compared: dict[str, int]
    """Shards with copies, by kind of tensor."""
    count: int
    """Tensors whose copies disagree."""
    disagreements: list[DisagreementDocument]
    """The first of them."""


class MasksDocument(TypedDict):
    """Dropout masks of a step, in the order of the ranks."""

    units: list[int]
    """Of all masks; 0 on a rank without any."""
    kept: list[int]
    """Those of them that were not dropped."""
    sums: list[str]
    """16 hex digits of which units are kept, in the order of the calls; empty without any."""
    shared: bool | None
    """As ``random_shared``."""


class TermDocument(TypedDict):
    """Sums of a term of the objective, over the tokens that weigh something in it."""

    total: float
    squares: float
    mixed: float
    """Of its values, each times a factor of its token."""
    trains: bool
    """Whether it depends on parameters."""


class TermsDocument(TypedDict):
    """What the objective of a step is made of."""

    tokens: int
    """Those that weigh something."""
    targets: int
    """Those that have a label."""
    samples: int
    microbatches: int
    """Of the rank that has most."""
    weight: float
    """Sum of all weights, over the data-parallel degree."""
    uneven: dict[str, float]
    """How far apart weights are in the step, and in the worst rank, microbatch and sample, as a
    share of the largest."""
    sums: dict[str, TermDocument]
    """By the program's names, in its order."""


PARTS = ("step", "rank", "microbatch", "sample")
"""Parts of a step in which tokens may weigh the same, the largest first."""
TERMS_SHAPES: Mapping[str, Shape] = {
    "tokens": COUNT,
    "targets": COUNT,
    "samples": COUNT,
    "microbatches": COUNT,
    "uneven": OBJECT,
    "sums": OBJECT,
}


def read_terms(value: Mapping[str, Any]) -> TermsDocument:
    """What an objective is made of, in a step's line; raises ValueError with a clause."""
    if found := misfit(value, TERMS_SHAPES):
        raise ValueError(found)
    missing = [key for key in (*TERMS_SHAPES, "weight") if value.get(key) is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return {
        "tokens": value["tokens"],
        "targets": value["targets"],
        "samples": value["samples"],
        "microbatches": value["microbatches"],
        "weight": _given(value, "weight"),
        "uneven": {part: _given(value["uneven"], part) for part in PARTS},
        "sums": {name: _read_term(name, term) for name, term in value["sums"].items()},
    }


def _read_term(name: str, value: object) -> TermDocument:
    if not isinstance(value, dict) or not isinstance(value.get("trains"), bool):
        raise ValueError(f"the term {name} is {value!r}, which is not a table with trains")  # noqa: TRY004 (a damaged file)
    total, squares, mixed = (_given(value, key) for key in ("total", "squares", "mixed"))
    return {"total": total, "squares": squares, "mixed": mixed, "trains": value["trains"]}


def _given(values: Mapping[str, Any], key: str) -> float:
    """A number that is not null; raises ValueError with a clause."""
    found = number(values.get(key))
    if found is None:
        raise ValueError(f"{key} is missing")
    return found


MASKS_SHAPES: Mapping[str, Shape] = {
    "units": COUNTS_LISTED,
    "kept": COUNTS_LISTED,
    "sums": TEXTS,
    "shared": FLAG,
}


def read_masks(value: Mapping[str, Any]) -> MasksDocument:
    """The dropout masks in a step's line; raises ValueError with a clause."""
    if found := misfit(value, MASKS_SHAPES):
        raise ValueError(found)
    units, kept, sums = (value.get(key) or [] for key in ("units", "kept", "sums"))
    if not 0 < len(units) == len(kept) == len(sums):
        raise ValueError("units, kept and sums must have an entry for every rank")
    return {"units": units, "kept": kept, "sums": sums, "shared": value.get("shared")}


class LoadedDocument(TypedDict):
    """A line of kind ``LOADED``."""

    step: int | None
    """Step of the checkpoint that a pass has loaded; null: of an unknown one."""
    at: float
    """Seconds since 1970."""


class EndDocument(TypedDict):
    """A line of kind ``END``."""

    steps: int
    """The last step that the ranks had to reach, of the run or the pass."""


def read_replicas(value: Mapping[str, Any]) -> ReplicasDocument:
    """A line of kind ``REPLICAS``; raises ValueError with a clause. Its step is not checked."""
    if found := misfit(value, {"compared": COUNTS, "count": COUNT}):
        raise ValueError(found)
    compared, count, listed = (value.get(key) for key in ("compared", "count", "disagreements"))
    if compared is None or count is None:
        key, shape = ("compared", COUNTS) if compared is None else ("count", COUNT)
        raise ValueError(f"{key} is None, which is not {shape[1]}")
    if not isinstance(listed, list):
        raise ValueError(f"disagreements is {listed!r}, which is not a list")  # noqa: TRY004 (a damaged file)
    if len(listed) > count or (count and not listed):
        raise ValueError(f"count is {count}, but {len(listed)} disagreements are listed")
    for entry in listed:
        _check_disagreement(entry)
    return cast("ReplicasDocument", value)


def _check_disagreement(entry: object) -> None:
    fields = entry if isinstance(entry, dict) else {}
    groups = fields.get("groups")
    if (
        not (isinstance(fields.get("kind"), str) and isinstance(fields.get("tensor"), str))
        or not is_texts(fields.get("mesh_dims"))
        or not isinstance(groups, list)
        or not all(isinstance(group, list) and all(map(is_count, group)) for group in groups)
    ):
        raise ValueError(
            f"a disagreement is {entry!r}, must have kind and tensor (text), mesh_dims (list of "
            "text) and groups (lists of ranks)"
        )


class SupersededError(Exception):
    """The same job has been started again and has taken over the run."""


class MetricsWriter:
    """Writes ``metrics.jsonl.part``; ``finish`` makes it ``metrics.jsonl``.

    Files that an earlier start of the job left in the folder are deleted: they are not evidence of
    this one. Every line raises SupersededError once a later start has done the same.
    """

    def __init__(self, folder: Path, header: HeaderDocument) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _forget(folder)
        self._part, self._final = metrics_files(folder)
        self._stream: TextIO = self._part.open("w", encoding="utf-8")
        self._line({"schema": SCHEMA, "kind": HEADER, **header})

    def step(self, reported: ReportedDocument, measured: MeasuredDocument) -> None:
        self._line({"kind": STEP, **reported, **measured})

    def replicas(self, values: ReplicasDocument) -> None:
        self._line({"kind": REPLICAS, **values})

    def loaded(self, step: int | None) -> None:
        """Write that the checkpoint of a step has been loaded; None: an unknown one."""
        loaded: LoadedDocument = {"step": step, "at": time.time()}
        self._line({"kind": LOADED, **loaded})

    def sync(self) -> None:
        """Sync all lines to disk, before a checkpoint of their step is relied on."""
        if not self._stream.closed:  # else ``finish`` has done it
            os.fsync(self._stream.fileno())

    def finish(self, steps: int) -> None:
        """Write the end line, sync, and give the file its final name."""
        end: EndDocument = {"steps": steps}
        self._line({"kind": END, **end})
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


class Unmeasured(NamedTuple):
    """Something that a rank could not measure in a step."""

    why: str
    """A sentence, or a clause about the parameter."""
    parameter: str = ""
    """The parameter whose gradient could not be counted; empty if it is something else."""

    @property
    def sentence(self) -> str:
        return f"{self.parameter}: {self.why}" if self.parameter else self.why


def uncounted_parameters(problems: Iterable[Unmeasured]) -> list[str]:
    """``uncounted`` of a step's line."""
    return sorted({each.parameter for each in problems if each.parameter})


def uncounted(line: Mapping[str, Any]) -> list[str]:
    """Parameters whose gradients could not be counted, by a step's line whose values are checked.

    Older lines named them only in their sentences: ``NAME: …``.
    """
    if (names := line.get(UNCOUNTED)) is not None:
        return list(names)
    cut = (sentence.partition(": ") for sentence in line.get(PROBLEMS) or ())
    return [name for name, colon, _ in cut if colon and " " not in name]
