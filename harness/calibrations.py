"""Calibration files (schema 1): what was learnt from repeats of a control, and of which control.

A file has the calibrations of one or several controls, each with all inputs of the control's
identity, so that a stale one can say what has changed since::

    {"schema": 1, "calibrations": [
      {"control": "fsdp2", "identity": "…", "precision": "fp32",
       "learnt": "2026-02-03T04:05:06+00:00",
       "repeats": [{"name": "fsdp2.rerun", "identity": "…"}], "taught_by": 5,
       "facts": {"versions": {"torch": "2.13.0"}, "hardware": "gpu NVIDIA H200", "…": "…"},
       "signals": {"loss": {"steps": [1, 2], "scale": [1e-7, 2e-7], "growth": 0.5,
                            "doubling_steps": null, "lasting": 3e-8, "ending": 5e-8}},
       "tensors": [{"step": 1, "names": ["norm.weight"], "gradient": [1e-6], "update": [1e-6],
                    "gradient_spread": 0.3, "update_spread": 0.4}],
       "modules": {"norm out.0": [1e-7, 2e-7]},
       "problems": [], "alike": {"repeats": ["fsdp2.rerun"], "taught_by": 3, "signals": {"…": 0},
                                 "tensors": ["…"], "modules": {}, "problems": []}}]}

``alike`` (or null) is learnt only from repeats that distribute samples as the control does.
``modules`` has for a tensor that a module gets or gives its noise and that of its gradient (or
null). Numbers are stored in full precision: they are read bit for bit as written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from converge_harness.errors import StoreError
from converge_harness.model import (
    Calibration,
    Floats,
    ModuleTensor,
    Precision,
    SignalScale,
    TensorScale,
    flattened,
)
from converge_harness.store import read_json, write_json

CALIBRATION_FILE = "calibration.json"
"""In a report folder: the calibrations used for its verdicts."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredCalibration:
    """A calibration, and from what it was learnt."""

    calibration: Calibration
    repeats: Mapping[str, str | None]
    """By name of a repeat, the identity of its job; None for foreign curves."""
    facts: Mapping[str, Any]
    """The inputs of the control's identity, as JSON values; empty for foreign curves."""
    learnt: str
    """When it was learnt: ISO 8601, UTC."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Repeat(_Table):
    name: str
    identity: str | None


class _Signal(_Table):
    steps: list[int]
    scale: list[float]
    growth: float
    doubling_steps: float | None
    lasting: float | None = None
    ending: float | None = None


class _Tensors(_Table):
    step: int
    names: list[str]
    gradient: list[float] | None
    update: list[float] | None
    gradient_spread: float | None = None
    update_spread: float | None = None


class _Scales(_Table):
    taught_by: int
    signals: dict[str, _Signal]
    tensors: list[_Tensors]
    modules: dict[str, tuple[float | None, float | None]] = {}
    problems: list[str]


class _Alike(_Scales):
    repeats: list[str]


class _Entry(_Scales):
    control: str
    identity: str | None
    precision: Precision
    learnt: str
    repeats: list[_Repeat]
    facts: dict[str, Any]
    alike: _Alike | None = None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True)

    calibrations: list[_Entry]


# ------------------------------------------------------------------ writing


def write_calibrations(path: Path, learnt: Sequence[StoredCalibration]) -> None:
    """Write a calibration file atomically.

    Raises StoreError as ``converge_harness.store.atomic_write`` does.
    """
    write_json(path, {"calibrations": [_entry(each) for each in learnt]})


def _entry(learnt: StoredCalibration) -> dict[str, Any]:
    calibration = learnt.calibration
    alike = calibration.alike
    return {
        "control": calibration.control,
        "identity": calibration.identity,
        "precision": calibration.precision.value,
        "learnt": learnt.learnt,
        "repeats": [
            {"name": name, "identity": learnt.repeats.get(name)} for name in calibration.repeats
        ],
        "facts": learnt.facts,
        **_scales(calibration),
        "alike": alike and {"repeats": list(alike.repeats), **_scales(alike)},
    }


def _scales(calibration: Calibration) -> dict[str, Any]:
    return {
        "taught_by": calibration.taught_by,
        "signals": {
            name: {
                "steps": scale.steps.tolist(),
                "scale": scale.scale.tolist(),
                "growth": scale.growth,
                "doubling_steps": scale.doubling_steps,
                "lasting": scale.lasting,
                "ending": scale.ending,
            }
            for name, scale in calibration.signals.items()
        },
        "tensors": [
            {
                "step": step,
                "names": list(scale.names),
                "gradient": None if scale.gradient is None else scale.gradient.tolist(),
                "update": None if scale.update is None else scale.update.tolist(),
                "gradient_spread": scale.gradient_spread,
                "update_spread": scale.update_spread,
            }
            for step, scale in sorted(calibration.tensors.items())
        ],
        "modules": {
            f"{module} {tensor}": [
                calibration.modules.get(ModuleTensor(module, tensor, backward))
                for backward in (False, True)
            ]
            for module, tensor in dict.fromkeys(
                (each.module, each.tensor) for each in calibration.modules
            )
        },
        "problems": list(calibration.problems),
    }


# ------------------------------------------------------------------ reading


def read_calibrations(path: Path) -> tuple[StoredCalibration, ...]:
    """All calibrations of a file, in order.

    Raises StoreError if the file is missing, damaged or of a newer schema.
    """
    try:
        file = _File.model_validate(read_json(path))
    except StoreError as error:
        if not path.is_file() or "newer converge" in str(error):
            raise
        _damaged(path, "it is not a calibration file")
    except ValidationError as error:
        first = error.errors()[0]
        _damaged(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    for entry in file.calibrations:
        problems = list(_inconsistencies(entry, len(entry.repeats)))
        if entry.alike is not None:
            problems += _inconsistencies(entry.alike, len(entry.alike.repeats))
        for problem in problems:
            _damaged(path, f"control {entry.control!r}: {problem}")
    if not file.calibrations:
        _damaged(path, "it has no calibration: none is kept from repeats that were stopped early")
    return tuple(_learnt(entry) for entry in file.calibrations)


def _damaged(path: Path, what: str) -> NoReturn:
    raise StoreError(
        f"{path}: not a usable calibration: {what}; make it again with: "
        f"converge calibrate EXPERIMENT --out {path}"
    )


def _inconsistencies(entry: _Scales, repeats: int) -> Iterator[str]:
    """Inconsistencies that a complete calibration file cannot have."""
    for name, signal in entry.signals.items():
        yield from _signal_problems(name, signal)
    for tensors in entry.tensors:
        for kind, scales in (("gradient", tensors.gradient), ("update", tensors.update)):
            if scales is not None and len(scales) != len(tensors.names):
                yield f"step {tensors.step} has {len(scales)} {kind} scales"
            elif not all(map(_is_size, scales or ())):
                yield f"a {kind} scale at step {tensors.step} is negative or not finite"
    for name, noise in entry.modules.items():
        if " " not in name or not all(map(_is_size, filter(None, noise))):
            yield f"module {name!r} has no name of a tensor, or a noise that is not one"
    if not 0 <= entry.taught_by <= repeats:
        yield f"learnt from {entry.taught_by} of {repeats} repeats"
    if not entry.taught_by and entry.signals:
        yield "has scales, but no repeat from which they were learnt"


def _signal_problems(name: str, signal: _Signal) -> Iterator[str]:
    steps = signal.steps
    if len(steps) != len(signal.scale) or not steps:
        yield f"{name} has {len(signal.scale)} scales for {len(steps)} steps"
    elif any(later <= step for step, later in pairwise(steps)):
        yield f"the steps of {name} do not increase"
    elif not all(map(_is_size, (*signal.scale, signal.lasting or 0.0, signal.ending or 0.0))):
        yield f"a scale of {name} is negative or not finite"
    elif not math.isfinite(signal.growth) or not (signal.doubling_steps or 1.0) > 0:
        yield f"{name} has an impossible growth"


def _is_size(scale: float) -> bool:
    return math.isfinite(scale) and scale >= 0


def _learnt(entry: _Entry) -> StoredCalibration:
    learnt = _calibration(entry, entry, [repeat.name for repeat in entry.repeats])
    if entry.alike is not None:
        alike = _calibration(entry, entry.alike, entry.alike.repeats)
        learnt = replace(learnt, alike=alike)
    return StoredCalibration(
        calibration=learnt,
        repeats={repeat.name: repeat.identity for repeat in entry.repeats},
        facts=entry.facts,
        learnt=entry.learnt,
    )


def _calibration(entry: _Entry, scales: _Scales, repeats: Sequence[str]) -> Calibration:
    return Calibration(
        control=entry.control,
        identity=entry.identity,
        precision=entry.precision,
        repeats=tuple(repeats),
        taught_by=scales.taught_by,
        signals={
            name: SignalScale(
                steps=np.array(signal.steps, dtype=np.int64),
                scale=np.array(signal.scale, dtype=np.float64),
                growth=signal.growth,
                doubling_steps=signal.doubling_steps,
                lasting=signal.lasting,
                ending=signal.ending,
            )
            for name, signal in scales.signals.items()
        },
        tensors={
            tensors.step: TensorScale(
                names=tuple(tensors.names),
                gradient=_floats(tensors.gradient),
                update=_floats(tensors.update),
                gradient_spread=tensors.gradient_spread,
                update_spread=tensors.update_spread,
            )
            for tensors in scales.tensors
        },
        modules={
            ModuleTensor(name.rpartition(" ")[0], name.rpartition(" ")[2], backward): value
            for name, noise in scales.modules.items()
            for backward, value in zip((False, True), noise, strict=True)
            if value is not None
        },
        problems=tuple(scales.problems),
    )


def _floats(values: list[float] | None) -> Floats | None:
    return None if values is None else np.array(values, dtype=np.float64)


# -------------------------------------------------------- matching a control

DIGESTS = frozenset({"rank_code", "data", "inject"})
"""Facts that are content hashes."""
LONGEST_SHOWN = 60
"""Most characters of a value in a sentence on what has changed."""


def find_calibration(
    learnt: Sequence[StoredCalibration], identity: str | None
) -> StoredCalibration | None:
    """The calibration of the control with that identity; None if there is none."""
    return next((each for each in learnt if each.calibration.identity == identity), None)


def what_changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Clauses on the differences between the facts of two controls, in the order of ``now``."""
    before, after = (flattened(json.loads(json.dumps(dict(each)))) for each in (then, now))
    return tuple(
        _change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*after, *before))
        if after.get(key) != before.get(key)
    )


def _change(key: str, before: object, after: object) -> str:
    """One clause; digests are not shown, because they mean nothing to people."""
    if key in DIGESTS and before is not None and after is not None:
        return f"{key} has changed"
    return f"{key} is {_show(after)}, was {_show(before)}"


def _show(value: object) -> str:
    text = "not there" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
