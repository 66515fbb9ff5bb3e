"""``plots/*.png``: the three figures for people without a browser, and for READMEs and mails.

In the manner of the figure of torchtitan's converging guide: every set over the control, in one
picture. Built on matplotlib's object API, so no state is shared and no display is needed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.typing import LineStyleType

from harness.model import Judgement
from harness.report.curves import Curve
from harness.report.downsample import corners, downsample
from harness.report.palette import SYMBOLS, style
from harness.report.scales import decades, raised, ratio_needs_log, zero_line
from harness.report.text import number
from harness.report.view import ReportView, TestView

_SIZE_INCHES = (11.0, 5.6)
_DPI = 150
_INK, _QUIET, _SHADE, _BAND = "#1b1f24", "#6a737d", "#dfe3e8", "#c3c9cf"
_STROKES: dict[str, LineStyleType] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (5, 2, 1, 2)),
}
_NAME_LENGTH = 34


def draw(view: ReportView) -> dict[str, bytes]:
    """File name to PNG. A figure without any curve is left out."""
    drawings: dict[str, Callable[[ReportView], bytes | None]] = {
        "overview.png": _overview,
        "differences.png": _differences,
        "grad_norm_ratio.png": _grad_norm_ratio,
    }
    rendered = {name: render(view) for name, render in drawings.items()}
    return {name: png for name, png in rendered.items() if png is not None}


class _Line(NamedTuple):
    label: str
    curve: Curve
    colour: str
    stroke: str = "solid"
    width: float = 1.4


def _overview(view: ReportView) -> bytes | None:
    lines = [
        *(
            _Line(f"control {run.name}", downsample(run.signal("loss")), _BAND, width=7.0)
            for run in view.controls
        ),
        *_test_lines(view, lambda test: test.run.signal("loss")),
    ]
    figure, axes = _frame(view, "loss", "loss (nats per token)")
    if not _plot(axes, lines):
        return None
    handles = _handles(lines)
    if view.entropy_floor is not None:
        axes.axhline(view.entropy_floor, color=_QUIET, linewidth=1.2, linestyle=(0, (2, 2)))
        label = f"entropy floor {number(view.entropy_floor)}"
        handles.append((Line2D([], [], color=_QUIET, linestyle=(0, (2, 2))), label))
    return _png(figure, axes, handles)


def _differences(view: ReportView) -> bytes | None:
    lines = _test_lines(view, lambda test: test.comparison("loss").difference)
    limits = list(
        dict.fromkeys(
            test.comparison("loss").limit for test in view.tests if test.comparison("loss").limit
        )
    )
    every = [*(line.curve for line in lines), *limits]
    zero = zero_line(every)
    figure, axes = _frame(
        view, "loss: difference to the control", "relative difference (log scale)"
    )
    if not _plot(axes, [line._replace(curve=raised(line.curve, zero)) for line in lines]):
        return None
    axes.set_yscale("log")
    ticks = decades(zero, every)
    axes.set_ylim(10.0 ** ticks[0] / 1.6, 10.0 ** ticks[-1])
    axes.yaxis.set_major_locator(FixedLocator([10.0**exponent for exponent in ticks]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "0" if value < 2 * zero else number(float(value)))
    )
    handles = _handles(lines)
    for limit in map(downsample, map(corners, limits)):
        axes.fill_between(
            limit.steps, 10.0 ** ticks[0] / 1.6, limit.values, color=_SHADE, alpha=0.5, zorder=0
        )
        axes.plot(limit.steps, limit.values, color=_QUIET, linewidth=1.0, linestyle=(0, (4, 2)))
    if limits:
        handles.append((Line2D([], [], color=_QUIET, linestyle=(0, (4, 2))), "tolerance"))
    return _png(figure, axes, handles)


def _grad_norm_ratio(view: ReportView) -> bytes | None:
    lines = _test_lines(view, lambda test: test.comparison("grad_norm").ratio)
    figure, axes = _frame(view, "grad norm: ratio to the control", "test / control")
    if not _plot(axes, lines):
        return None
    if ratio_needs_log(line.curve for line in lines):
        axes.set_yscale("log")
        axes.set_ylabel("test / control (log scale)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(float(value))))
        axes.yaxis.set_minor_locator(FixedLocator([]))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.axhline(1.0, color=_INK, linewidth=1.0, zorder=1)
    return _png(figure, axes, _handles(lines))


def _test_lines(view: ReportView, pick: Callable[[TestView], Curve]) -> list[_Line]:
    """One line per test set with such a curve; what needs a person is drawn thicker and on top."""
    lines = []
    for index, test in enumerate(view.tests):
        judgement, curve = test.verdict.judgement, pick(test)
        colour, stroke = style(index)
        width = 1.2 if judgement is Judgement.PASS else 2.2
        label = f"{SYMBOLS[judgement]} {test.run.name}"
        if curve:
            lines.append(_Line(label, downsample(curve), colour, stroke, width))
    return sorted(lines, key=lambda line: line.width)


def _frame(view: ReportView, what: str, y_title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heading = axes.set_title(
        f"{_short(view.title)} · {what}", loc="left", color=_INK, weight="bold"
    )
    heading.set_parse_math(False)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(y_title, color=_INK)
    axes.grid(visible=True, color=_SHADE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _plot(axes: Axes, lines: Sequence[_Line]) -> bool:
    """Whether there was anything to draw."""
    for line in lines:
        # A curve of one step is a point, and a point has no line.
        marker = "o" if len(line.curve) == 1 else None
        axes.add_line(_artist(line, line.curve, marker))
    axes.autoscale_view()
    return any(line.curve for line in lines)


def _handles(lines: Iterable[_Line]) -> list[tuple[Line2D, str]]:
    return [(_artist(line, Curve()), line.label) for line in lines]


def _artist(line: _Line, curve: Curve, marker: str | None = None) -> Line2D:
    artist = Line2D(curve.steps, curve.values, color=line.colour, linewidth=line.width)
    artist.set_linestyle(_STROKES[line.stroke])
    artist.set_marker(marker or "")
    return artist


def _png(figure: Figure, axes: Axes, handles: Sequence[tuple[Line2D, str]]) -> bytes:
    # Labels are set afterwards: matplotlib drops those that begin with "_" and reads "$" as maths.
    legend = axes.legend(
        [handle for handle, _ in handles],
        [" " for _ in handles],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=8.5,
    )
    for text, (_, label) in zip(legend.get_texts(), handles, strict=True):
        text.set_parse_math(False)
        text.set_text(_short(label))
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the bundled font lacks is drawn as boxes; that is no one's error.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _short(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else f"{text[: _NAME_LENGTH - 1]}…"
