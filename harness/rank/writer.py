"""The files a run leaves: ``metrics.jsonl`` line by line, ``in_force.json`` and arrays at once.

NaN and infinities are the strings ``"nan"``, ``"inf"``, ``"-inf"``: JSON has no such numbers, and
null means that there is no value.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

SCHEMA = 1


class SupersededError(Exception):
    """Another life of the same job goes on with its run."""


class MetricsWriter:
    """Writes ``metrics.jsonl.part``; ``finish`` makes it ``metrics.jsonl``.

    What an earlier life of the job left in the folder is deleted: it is no evidence of this one.
    Every line raises SupersededError once a later life has done the same.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _forget(folder)
        self._final = folder / "metrics.jsonl"
        self._part = folder / "metrics.jsonl.part"
        self._stream: TextIO = self._part.open("w", encoding="utf-8")
        self._line({"schema": SCHEMA, "kind": "header", **header})

    def step(self, values: Mapping[str, Any]) -> None:
        self._line({"kind": "step", **values})

    def replicas(self, values: Mapping[str, Any]) -> None:
        self._line({"kind": "replicas", **values})

    def loaded(self, step: int | None) -> None:
        """The checkpoint of a step is loaded, now; None: what was loaded is not known."""
        self._line({"kind": "loaded", "step": step, "at": time.time()})

    def sync(self) -> None:
        """Have every line so far on disk, before a checkpoint that goes on from there is."""
        os.fsync(self._stream.fileno())

    def finish(self, steps: int) -> None:
        """Write the end line and give the file its final name, on disk for sure."""
        self._line({"kind": "end", "steps": steps})
        self.sync()
        self._stream.close()
        self._part.replace(self._final)

    def leave(self) -> None:
        """Write no more; the file keeps the name of one that is not complete."""
        self._stream.close()

    def _line(self, values: Mapping[str, Any]) -> None:
        if not self._is_ours():
            raise SupersededError(
                f"{self._part} is another process's by now: the job has been started again"
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
    for name in ("metrics.jsonl", "metrics.jsonl.part", "in_force.json", "frozen.npz"):
        (folder / name).unlink(missing_ok=True)
    for sample in (folder / "tensors").glob("step-*"):
        sample.unlink(missing_ok=True)


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON in which non-finite numbers are strings."""
    return json.dumps(_finite(values), allow_nan=False, indent=indent)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a whole file atomically; on disk for sure."""
    _write(path, (to_json(values, indent=1) + "\n").encode())


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a whole ``.npz`` file atomically, in a folder that it makes; on disk for sure."""
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()  # a zip is written in many small pieces, slowly to a file
    np.savez(content, allow_pickle=False, **arrays)
    _write(path, content.getbuffer())


def _write(path: Path, content: bytes | memoryview) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
