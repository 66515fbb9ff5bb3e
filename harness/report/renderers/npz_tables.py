"""``report.npz``: every number behind a report's figures, in full, for programs.

The pages show downsampled curves and the ten parameters nearest to their limits; here are all.
Each table is one array per column, of equal length, named ``TABLE.COLUMN``:

``curves``      one row per run and step: ``run`` (index into ``names``), ``step``, every signal
``limits``      one row per test set, signal and step that has a limit: ``set``, ``signal``,
                ``step``, ``limit``
``parameters``  one row per test set, sampled step and parameter: ``set``, ``step``,
                ``parameter``, ``gradient_norm``, ``control_gradient_norm``, and ``weights``,
                ``gradient`` and ``update``, each with its ``…_limit``

Texts are indices into ``names``; a missing number is NaN. Differences of curves are not stored:
they follow from the curves. ``schema`` is the version of this format.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converge_harness.errors import StoreError
from converge_harness.judge import TensorComparison, TensorDifferences
from converge_harness.model import Floats
from converge_harness.report.sanitize import plain
from converge_harness.report.view.report_view import SIGNAL_TITLES, ReportView, RunView

FILE = "report.npz"
SCHEMA_VERSION = 1
Tables = Mapping[str, npt.NDArray[Any]]
KINDS = {"weights": "initial", "gradient": "gradients", "update": "updates"}
"""Column to the attribute of a comparison that it shows."""
PLACES = ("curves.run", "limits.set", "limits.signal", "parameters.set", "parameters.parameter")
"""Columns that are indices into ``names``."""
_NUMBERS = (
    *("curves.step", *(f"curves.{signal}" for signal in SIGNAL_TITLES)),
    *("limits.step", "limits.limit"),
    *("parameters.step", "parameters.gradient_norm", "parameters.control_gradient_norm"),
    *(f"parameters.{kind}{what}" for kind in KINDS for what in ("", "_limit")),
)


class _Names:
    """Texts to their indices in one array."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, name: str) -> int:
        return self.places.setdefault(name, len(self.places))


def to_npz(view: ReportView) -> bytes:
    """Render; the same view gives the same bytes."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **tables_of(view))  # type: ignore[arg-type] # no flag of its own
    return stream.getvalue()


def tables_of(view: ReportView) -> dict[str, npt.NDArray[Any]]:
    """The arrays that :func:`to_npz` writes."""
    names = _Names()
    columns: dict[str, list[npt.ArrayLike]] = {name: [] for name in (*PLACES, *_NUMBERS)}

    def add(table: str, rows: int, **values: npt.ArrayLike) -> None:
        for column, value in values.items():
            columns[f"{table}.{column}"].append(np.broadcast_to(value, rows))

    for run in _runs(view):
        curves = {signal: run.signal(signal) for signal in SIGNAL_TITLES}
        steps = np.unique(np.concatenate([curve.steps for curve in curves.values()]))
        values = {signal: np.full(steps.size, np.nan) for signal in curves}
        for signal, curve in curves.items():
            values[signal][np.searchsorted(steps, curve.steps)] = curve.values
        add("curves", steps.size, run=names.place(run.name), step=steps, **values)
    for test in view.tests:
        place = names.place(test.run.name)
        for signal, comparison in test.comparisons.items():
            limit = comparison.limit
            add(
                "limits",
                len(limit),
                set=place,
                signal=names.place(signal),
                step=limit.steps,
                limit=limit.values,
            )
        for compared in test.compared:
            parameters = [names.place(plain(name)) for name in compared.names]
            rows = len(parameters)
            norms = _norms(compared)
            kinds = _kinds(compared, rows)
            add("parameters", rows, set=place, step=compared.step, parameter=parameters)
            add("parameters", rows, **norms, **kinds)
    return {
        "schema": np.array(SCHEMA_VERSION),
        "names": np.array(list(names.places), dtype=np.str_),
        **{
            name: _joined(parts, np.int64 if name in PLACES or name.endswith(".step") else float)
            for name, parts in columns.items()
        },
    }


def _runs(view: ReportView) -> list[RunView]:
    """Every run once: a control with an anchor is a test set as well."""
    runs = [
        *view.judged_against,
        *(test.run for test in view.tests),
        *(repeat.run for repeat in view.repeats),
        *(beside.run for beside in view.besides),
    ]
    return list({run.name: run for run in runs}.values())


def _norms(compared: TensorComparison) -> dict[str, Floats | float]:
    ours, theirs = compared.test.gradients, compared.control.gradients
    return {
        "gradient_norm": np.nan if ours is None else ours.norm,
        "control_gradient_norm": np.nan if theirs is None else theirs.norm,
    }


def _kinds(compared: TensorComparison, rows: int) -> dict[str, Floats]:
    columns = {}
    for kind, attribute in KINDS.items():
        found: TensorDifferences | None = getattr(compared, attribute)
        none = np.full(rows, np.nan)
        columns[kind] = none if found is None else found.difference
        columns[f"{kind}_limit"] = none if found is None else found.limit
    return columns


def _joined(parts: list[npt.ArrayLike], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    whole: npt.NDArray[Any] = np.concatenate(parts).astype(kind) if parts else np.empty(0, kind)
    return whole


def read_npz(path: Path) -> Tables:
    """The arrays of a ``report.npz``.

    Raises StoreError when it is not there, damaged, or of a later version.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            tables = {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    version = tables.get("schema")
    if version is None or version.shape or int(version) > SCHEMA_VERSION:
        raise StoreError(f"{path}: is of another version of converge ({version})")
    missing = [name for name in ("names", *PLACES, *_NUMBERS) if name not in tables]
    if missing:
        raise StoreError(f"{path}: has no {missing[0]}")
    for name in PLACES:
        places = tables[name]
        if places.size and not (places.min() >= 0 and places.max() < tables["names"].size):
            raise StoreError(f"{path}: {name} has an index outside of names")
    for table in ("curves", "limits", "parameters"):
        if len({tables[name].size for name in tables if name.startswith(f"{table}.")}) != 1:
            raise StoreError(f"{path}: the columns of {table} are of different lengths")
    return tables
