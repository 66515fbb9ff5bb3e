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


class MetricsWriter:
    """Writes ``metrics.jsonl.part``; ``finish`` makes it ``metrics.jsonl``."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
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

    def finish(self, steps: int) -> None:
        """Write the end line and give the file its final name, on disk for sure."""
        self._line({"kind": "end", "steps": steps})
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._part.replace(self._final)

    def _line(self, values: Mapping[str, Any]) -> None:
        self._stream.write(to_json(values) + "\n")
        self._stream.flush()


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON in which non-finite numbers are strings."""
    return json.dumps(_finite(values), allow_nan=False, indent=indent)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a whole file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(to_json(values, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a whole ``.npz`` file atomically, in a folder that it makes."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(path.name + ".part")
    content = io.BytesIO()  # a zip is written in many small pieces, slowly to a file
    np.savez(content, allow_pickle=False, **arrays)
    part.write_bytes(content.getbuffer())
    part.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
