"""Parts of the page's figures as the data that ``templates/report.js`` draws; pure."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.report.curves import Curve
from harness.report.gradients import GradientMap
from harness.report.marks import Mark
from harness.report.scales import SignedLog

Figure = dict[str, Any]


def figure(
    traces: Iterable[dict[str, Any] | None],
    y_title: str,
    *,
    levels: Sequence[dict[str, Any]] = (),
    signed: dict[str, Any] | None = None,
    log: bool = False,
    span: tuple[float, float] | None = None,
    onset: int | None = None,
    smooth: bool = False,
) -> Figure:
    """A figure; ``smooth`` where the page's slider may smooth its curves."""
    return {
        "traces": [trace for trace in traces if trace],
        "yTitle": y_title,
        "levels": list(levels),
        "signed": signed,
        "log": log,
        "span": list(span) if span else None,
        "digits": math.ceil(1 - math.log10(span[1] - span[0])) if span else None,
        "onset": onset,
        "smooth": smooth,
        "heat": None,
    }


def heat_map(found: GradientMap) -> Figure:
    """Differences of all gradients, a row per parameter and a column per sampled step."""
    cells = {
        name: _typed("f4", np.minimum(values, np.finfo(np.float32).max).astype("<f4"))
        for name, values in (("difference", found.difference), ("limit", found.limit))
    }
    rows = [label(name) for name in found.names]
    return figure([], "") | {"heat": {"rows": rows, "steps": list(found.steps), **cells}}


def signed_axis(axis: SignedLog) -> dict[str, Any]:
    """What the page needs to place differences on their axis and to label it."""
    return {
        "unit": axis.unit,
        "values": list(axis.ticks),
        "labels": list(axis.ticks.values()),
        "range": list(axis.span),
    }


def mark_line(mark: Mark) -> dict[str, Any]:
    return {
        "x": mark.step,
        "text": label(mark.text),
        "kind": mark.kind.value,
        "row": mark.row,
        "leftwards": mark.leftwards,
    }


def label(text: str) -> str:
    """Plotly reads text as a subset of HTML, and what stands between dollars as TeX."""
    return html.escape(text, quote=False).replace("$", "&#36;")


def packed(curve: Curve) -> dict[str, Any]:
    """Little-endian float32 in base64, plotly's own form: a third of the size of text.

    Enough to draw with; ``report.json`` and the run folders hold every digit.
    """
    # Clipped, because a larger number would become an infinity, which plotly draws as a gap.
    largest = np.finfo(np.float32).max
    finite = np.where(np.isfinite(curve.values), curve.values, math.nan)
    result: dict[str, Any] = {"y": _typed("f4", np.clip(finite, -largest, largest).astype("<f4"))}
    if np.all(np.diff(curve.steps) == 1):
        return result | {"x0": int(curve.steps[0]), "dx": 1}
    return result | {"x": _typed("i4", curve.steps.astype("<i4"))}


def _typed(dtype: str, values: npt.NDArray[np.float32] | npt.NDArray[np.int32]) -> dict[str, str]:
    return {"dtype": dtype, "bdata": base64.b64encode(values.tobytes()).decode()}
