"""``plots/``: the figures as PNG and SVG, without a browser, for READMEs, papers and mails.

The overview looks like the figure in torchtitan's converging guide: every set over the control, in
one picture. ``passes-NAME`` is the curve of one run in several passes, and where they join. Built
on matplotlib's object API, so no state is shared and no display is needed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.typing import LineStyleType

from converge_harness.model import Judgement
from converge_harness.report.renderers.downsample import corners, downsample, sizes
from converge_harness.report.renderers.marks import Mark, MarkKind, marks
from converge_harness.report.renderers.palette import SYMBOLS, Style, style
from converge_harness.report.renderers.scales import SignedLog, ratio_needs_log, ratio_range
from converge_harness.report.text import digits
from converge_harness.report.view.curves import Curve
from converge_harness.report.view.report_view import ReportView, TestView
from converge_harness.report.view.resumed_run import PassesView
from converge_harness.wording import control_called

Picture = dict[str, bytes]
"""File form (``png``, ``svg``) to content."""

_SIZE_INCHES = (11.0, 5.6)
_DPI = 150
INK, QUIET, SHADE, BAND = "#1b1f24", "#6a737d", "#dfe3e8", "#c3c9cf"
_STROKES: dict[str, LineStyleType] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (5, 2, 1, 2)),
    "none": "none",
}
_LONG_RUN, _BUCKETS = 400, 200
"""Steps beyond which differences are drawn as sizes, and how many of these."""
_NAME_LENGTH = 34
_LABEL_CHARACTERS = 120
"""Characters of a label across the axes."""
_ROW_POINTS = 12.0
_FAULT = "#b03a00"


class Line(NamedTuple):
    label: str
    curve: Curve
    colour: str
    stroke: str = "solid"
    """Plotly's name, as in :mod:`report.renderers.palette`; ``none`` for points only."""
    width: float = 1.4
    marker: str = ""
    """Matplotlib's name of the marker at every step."""


def draw(view: ReportView) -> dict[str, bytes]:
    """File name to PNG or SVG. A figure without any curve is left out."""
    pictures = {
        "overview": _overview(view),
        "differences": _differences(view),
        "grad_norm_ratio": _grad_norm_ratio(view),
    }
    for index, test in enumerate(view.tests):
        if test.resumed:
            name = f"passes-{test.run.anchor.removeprefix('set-')}"
            pictures[name] = _passes_of(view, test, test.resumed, style(index))
    return {
        f"{name}.{form}": content
        for name, picture in pictures.items()
        if picture
        for form, content in picture.items()
    }


def _overview(view: ReportView) -> Picture | None:
    controls = [
        Line(control_called(run.name), downsample(run.signal("loss")), BAND, width=7.0)
        for run in view.controls
    ]
    tests = _test_lines(view, lambda test: test.run.signal("loss"))
    lines = [*controls, *tests]
    figure, axes = _frame(view.title, "loss", "loss (nats per token)")
    if not _plot(axes, [*controls, *_seed_lines(view), *tests]):
        return None
    handles = _handles_of(lines)
    if view.entropy_floor is not None:
        axes.axhline(view.entropy_floor, color=QUIET, linewidth=1.2, linestyle=(0, (2, 2)))
        label = f"entropy floor {digits(view.entropy_floor)}"
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (2, 2))), label))
    return _to_files(figure, axes, handles)


def _differences(view: ReportView) -> Picture | None:
    """Signed, step by step; of a long run their sizes, because noise crosses zero all the time."""
    curves = [test.comparison("loss").difference for test in view.tests]
    differ = any(np.any(np.abs(curve.values) > 0) for curve in curves)
    is_long = max(map(len, curves), default=0) > _LONG_RUN
    return _sizes(view) if differ and is_long else _signed_differences(view)


def _sizes(view: ReportView) -> Picture | None:
    tests = _test_lines(view, lambda test: sizes(test.comparison("loss").difference, _BUCKETS))
    repeats = [
        Line("A/A repeat", sizes(curve, _BUCKETS), QUIET, "dot", 1.0)
        for repeat in view.repeats
        if (curve := repeat.comparisons["loss"].difference)
    ]
    figure, axes = _frame(
        view.title,
        "loss: size of the difference to the control",
        "relative difference, the largest of nearby steps (log scale)",
    )
    if not _plot(axes, [line._replace(curve=_positive(line.curve)) for line in (*repeats, *tests)]):
        return None
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(float(value))))
    limits = _limits(view)
    for limit in map(downsample, map(corners, limits)):
        axes.plot(limit.steps, limit.values, color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)))
    return _finished(view, figure, axes, tests, repeats, limits)


def _signed_differences(view: ReportView) -> Picture | None:
    tests = _test_lines(view, lambda test: test.comparison("loss").difference)
    repeats = [
        Line(f"A/A {repeat.run.repeat or repeat.run.name}", downsample(curve), QUIET, "dot", 1.0)
        for repeat in view.repeats
        if (curve := repeat.comparisons["loss"].difference)
    ]
    limits = _limits(view)
    lines = [*repeats, *tests]
    axis = SignedLog.over([*(line.curve for line in lines), *limits])
    figure, axes = _frame(
        view.title, "loss: difference to the control", "relative difference (signed log scale)"
    )
    placed = [line._replace(curve=_placed(line.curve, axis)) for line in lines]
    if not _plot(axes, placed):
        return None
    axes.set_ylim(*axis.span)
    axes.yaxis.set_major_locator(FixedLocator(list(axis.ticks)))
    axes.yaxis.set_major_formatter(FixedFormatter(list(axis.ticks.values())))
    axes.axhline(0.0, color=INK, linewidth=0.8, zorder=1)
    for limit in map(downsample, map(corners, limits)):
        high = axis.place(limit.values)
        axes.fill_between(limit.steps, -high, high, color=SHADE, alpha=0.5, zorder=0)
        for side in (-high, high):
            axes.plot(limit.steps, side, color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)))
    return _finished(view, figure, axes, tests, repeats, limits)


def _limits(view: ReportView) -> list[Curve]:
    """The tolerances of the loss, each once."""
    found = (test.comparison("loss").limit for test in view.tests)
    return list(dict.fromkeys(limit for limit in found if limit))


def _finished(
    view: ReportView,
    figure: Figure,
    axes: Axes,
    tests: Sequence[Line],
    repeats: Sequence[Line],
    limits: Sequence[Curve],
) -> Picture:
    """A picture of differences with its legend and the steps of onset."""
    handles = _handles_of(tests)
    if repeats:
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (1, 1.5))), "A/A repeats"))
    if limits:
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (4, 2))), "tolerance"))
    for index, test in enumerate(view.tests):
        if test.verdict.onset_step is not None:
            onset = axes.axvline(test.verdict.onset_step, color=style(index).colour, zorder=1)
            onset.set(linewidth=1.2, linestyle=(0, (2, 3)))
    return _to_files(figure, axes, handles)


def _positive(curve: Curve) -> Curve:
    """What a log scale can show."""
    return Curve(curve.steps, np.where(curve.values > 0, curve.values, np.nan))


def _placed(curve: Curve, axis: SignedLog) -> Curve:
    finite = np.where(np.isfinite(curve.values), curve.values, np.nan)
    return Curve(curve.steps, axis.place(finite))


def _grad_norm_ratio(view: ReportView) -> Picture | None:
    lines = _test_lines(view, lambda test: test.comparison("grad_norm").ratio)
    figure, axes = _frame(view.title, "grad norm: ratio to the control", "test / control")
    if not _plot(axes, lines):
        return None
    if ratio_needs_log(line.curve for line in lines):
        axes.set_yscale("log")
        axes.set_ylabel("test / control (log scale)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(float(value))))
        axes.yaxis.set_minor_locator(FixedLocator([]))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        if span := ratio_range(line.curve for line in lines):
            axes.set_ylim(*span)
    axes.axhline(1.0, color=INK, linewidth=1.0, zorder=1)
    return _to_files(figure, axes, _handles_of(lines))


def _seed_lines(view: ReportView) -> list[Line]:
    """Runs by other seeds: thin, in the colour of their set, and the controls' grey."""
    colours = {run.name: QUIET for run in view.controls}
    colours |= {test.run.name: style(index).colour for index, test in enumerate(view.tests)}
    return [
        Line(each.run.name, downsample(curve), colours.get(each.of, QUIET), width=0.8)
        for each in view.other_seeds
        if (curve := each.run.signal("loss"))
    ]


def _test_lines(view: ReportView, pick: Callable[[TestView], Curve]) -> list[Line]:
    """One line per test set with such a curve; failures are drawn thicker and on top."""
    lines = []
    for index, test in enumerate(view.tests):
        judgement, curve = test.verdict.judgement, pick(test)
        colour, stroke = style(index)
        width = 1.2 if judgement is Judgement.PASS else 2.2
        label = f"{SYMBOLS[judgement]} {test.run.name}"
        if curve:
            lines.append(Line(label, downsample(curve), colour, stroke, width))
    return sorted(lines, key=lambda line: line.width)


# ------------------------------------------------------- runs in several passes


def _passes_of(
    view: ReportView, test: TestView, resumed: PassesView, look: Style
) -> Picture | None:
    """The picture of one set; None without any curve."""
    every = marks(resumed, _LABEL_CHARACTERS)
    rows = max((mark.row + 1 for mark in every), default=0)
    what = f"{_short(test.run.name)}: loss"
    figure, axes = _frame(view.title, what, "loss (nats per token)", pad=6 + _ROW_POINTS * rows)
    lines = _pass_lines(view, test, resumed, look)
    if not _plot(axes, lines):
        return None
    for mark in sorted(
        every, key=lambda mark: -mark.row
    ):  # lines are drawn behind the labels below
        _draw_mark(axes, mark)
    return _to_files(figure, axes, _handles_of(lines))


def _pass_lines(view: ReportView, test: TestView, resumed: PassesView, look: Style) -> list[Line]:
    control = next(run for run in view.judged_against if run.name == test.verdict.control)
    curve = test.run.signal("loss")
    firsts = [each.steps[0] for each in resumed.passes[1:] if each.steps]
    first = np.isin(curve.steps, firsts)
    lines = [
        Line(control_called(control.name), downsample(control.signal("loss")), BAND, width=7.0),
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


def _draw_mark(axes: Axes, mark: Mark) -> None:
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
        # From the top of the axes to the label.
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


# ------------------------------------------------------------------------ parts


def _frame(title: str, what: str, y_title: str, pad: float | None = None) -> tuple[Figure, Axes]:
    """An empty picture with its axes.

    Args:
        title: Of the report, cut when it is long.
        what: What is drawn.
        y_title: Of the y axis.
        pad: Space between heading and axes, in points; None: matplotlib's.
    """
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heading = axes.set_title(
        f"{_short(title)} · {what}", loc="left", color=INK, weight="bold", pad=pad
    )
    heading.set_parse_math(False)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(y_title, color=INK)
    axes.grid(visible=True, color=SHADE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _plot(axes: Axes, lines: Sequence[Line]) -> bool:
    """Whether there was anything to draw."""
    for line in lines:
        # A curve of one step is a point, and a point has no line.
        single = "o" if len(line.curve) == 1 else ""
        axes.add_line(_artist(line, line.curve, line.marker or single))
    axes.autoscale_view()
    return any(line.curve for line in lines)


def _handles_of(lines: Iterable[Line]) -> list[tuple[Line2D, str]]:
    return [(_artist(line, Curve(), line.marker), line.label) for line in lines]


def _artist(line: Line, curve: Curve, marker: str) -> Line2D:
    artist = Line2D(curve.steps, curve.values, color=line.colour, linewidth=line.width)
    artist.set_linestyle(_STROKES[line.stroke])
    artist.set_marker(marker)
    if line.marker:
        hollow = line.stroke != "none"
        artist.set_markerfacecolor("none" if hollow else line.colour)
    return artist


def _to_files(figure: Figure, axes: Axes, handles: Sequence[tuple[Line2D, str]]) -> Picture:
    """The finished picture in both forms, without the time and machine that made it."""
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
    layout = figure.get_layout_engine()
    assert layout is not None  # noqa: S101 - _frame asks for one
    with warnings.catch_warnings():
        _ignore_missing_letters()
        layout.execute(figure)
    # Both forms have this layout; to find it takes as long as to draw.
    figure.set_layout_engine("none")
    # In this order: drawing an SVG leaves the figure with 72 dots per inch.
    return {form: _saved(figure, form) for form in ("png", "svg")}


def _saved(figure: Figure, form: str) -> bytes:
    """One form, by its own canvas: ``savefig`` would first draw everything once for nothing."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        _ignore_missing_letters()
        if form == "png":
            canvas: Any = FigureCanvasAgg(figure)
            canvas.print_png(buffer, metadata={"Software": None})
        else:
            # Letters as paths, because a reader's fonts are not known; the salt makes ids
            # reproducible.
            with rc_context({"svg.hashsalt": "converge"}):
                canvas = FigureCanvasSVG(figure)
                canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _ignore_missing_letters() -> None:
    """Characters that the bundled font lacks are drawn as boxes, without a warning."""
    warnings.filterwarnings("ignore", message="Glyph .* missing from")


def _short(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else f"{text[: _NAME_LENGTH - 1]}…"
