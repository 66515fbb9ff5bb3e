"""``plots/passes-NAME.png``: the curve of one run in several passes, and where it is joined."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from harness.report.curves import Curve
from harness.report.downsample import downsample
from harness.report.marks import Mark, MarkKind, marks
from harness.report.palette import SYMBOLS, Style
from harness.report.passes import PassesView
from harness.report.plot_parts import (
    BAND,
    INK,
    QUIET,
    Line,
    Picture,
    frame,
    handles_of,
    plot,
    short,
    to_files,
)
from harness.report.view import ReportView, TestView

_CHARACTERS = 120
"""Characters of a label across the axes."""
_ROW_POINTS = 12.0
_FAULT = "#b03a00"


def draw_passes(
    view: ReportView, test: TestView, resumed: PassesView, look: Style
) -> Picture | None:
    """The picture of one set; None without any curve."""
    every = marks(resumed, _CHARACTERS)
    rows = max((mark.row + 1 for mark in every), default=0)
    what = f"{short(test.run.name)}: loss"
    figure, axes = frame(view.title, what, "loss (nats per token)", pad=6 + _ROW_POINTS * rows)
    lines = _lines(view, test, resumed, look)
    if not plot(axes, lines):
        return None
    for mark in sorted(every, key=lambda mark: -mark.row):  # lines pass behind the labels below
        _draw(axes, mark)
    return to_files(figure, axes, handles_of(lines))


def _lines(view: ReportView, test: TestView, resumed: PassesView, look: Style) -> list[Line]:
    control = next(run for run in view.references if run.name == test.verdict.control)
    curve = test.run.signal("loss")
    firsts = [each.steps[0] for each in resumed.passes[1:] if each.steps]
    first = np.isin(curve.steps, firsts)
    lines = [
        Line(f"control {control.name}", downsample(control.signal("loss")), BAND, width=7.0),
        Line(
            f"{SYMBOLS[test.verdict.judgement]} {test.run.name}",
            downsample(curve),
            look.colour,
            look.stroke,
        ),
    ]
    lines += [
        Line(f"pass {each.number}, replayed", downsample(again), QUIET, "dot", 1.2, "o")
        for each in resumed.passes
        if (again := each.superseded.get("loss", Curve()))
    ]
    resumes = Curve(curve.steps[first], curve.values[first])
    if resumes:
        lines.append(Line("resumed", resumes, look.colour, "none", marker="D"))
    return lines


def _draw(axes: Axes, mark: Mark) -> None:
    fault = mark.kind is MarkKind.FAULT
    stroke: dict[str, Any] = {
        "color": _FAULT if fault else QUIET,
        "linewidth": 1.0,
        "linestyle": (0, (2, 2)) if mark.kind is MarkKind.RESTART else "-",
    }
    axes.axvline(
        mark.step,
        **stroke,
        zorder=1,
    )
    label = axes.annotate(
        " ",
        (mark.step, 1.0),
        (0, 3 + _ROW_POINTS * mark.row),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if mark.leftwards else "left",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        # On from the top of the axes to the label.
        arrowprops={
            "arrowstyle": "-",
            "shrinkA": 0,
            "shrinkB": 0,
            "relpos": (1 if mark.leftwards else 0, 0),
            **stroke,
        },
        color=_FAULT if fault else INK,
    )
    label.set_parse_math(False)
    label.set_text(f"{mark.text} " if mark.leftwards else f" {mark.text}")
