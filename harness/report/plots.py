"""``plots/*.png``: the figures for people without a browser, and for READMEs and mails.

In the manner of the figure of torchtitan's converging guide: every set over the control, in one
picture.
"""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from harness.model import Judgement
from harness.report.curves import Curve
from harness.report.downsample import corners, downsample
from harness.report.palette import SYMBOLS, style
from harness.report.pass_plot import draw_passes
from harness.report.plot_parts import BAND, INK, QUIET, SHADE, Line, frame, handles_of, plot, to_png
from harness.report.scales import decades, raised, ratio_needs_log, ratio_range, zero_line
from harness.report.text import number
from harness.report.view import ReportView, TestView


def draw(view: ReportView) -> dict[str, bytes]:
    """File name to PNG. A figure without any curve is left out."""
    drawings: dict[str, Callable[[ReportView], bytes | None]] = {
        "overview.png": _overview,
        "differences.png": _differences,
        "grad_norm_ratio.png": _grad_norm_ratio,
    }
    rendered = {name: render(view) for name, render in drawings.items()}
    for index, test in enumerate(view.tests):
        if test.resumed:
            name = f"passes-{test.run.anchor.removeprefix('set-')}.png"
            rendered[name] = draw_passes(view, test, test.resumed, style(index))
    return {name: png for name, png in rendered.items() if png is not None}


def _overview(view: ReportView) -> bytes | None:
    lines = [
        *(
            Line(f"control {run.name}", downsample(run.signal("loss")), BAND, width=7.0)
            for run in view.controls
        ),
        *_test_lines(view, lambda test: test.run.signal("loss")),
    ]
    figure, axes = frame(view.title, "loss", "loss (nats per token)")
    if not plot(axes, lines):
        return None
    handles = handles_of(lines)
    if view.entropy_floor is not None:
        axes.axhline(view.entropy_floor, color=QUIET, linewidth=1.2, linestyle=(0, (2, 2)))
        label = f"entropy floor {number(view.entropy_floor)}"
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (2, 2))), label))
    return to_png(figure, axes, handles)


def _differences(view: ReportView) -> bytes | None:
    lines = _test_lines(view, lambda test: test.comparison("loss").difference)
    limits = list(
        dict.fromkeys(
            test.comparison("loss").limit for test in view.tests if test.comparison("loss").limit
        )
    )
    every = [*(line.curve for line in lines), *limits]
    zero = zero_line(every)
    figure, axes = frame(
        view.title, "loss: difference to the control", "relative difference (log scale)"
    )
    if not plot(axes, [line._replace(curve=raised(line.curve, zero)) for line in lines]):
        return None
    axes.set_yscale("log")
    ticks = decades(zero, every)
    axes.set_ylim(10.0 ** ticks[0] / 1.6, 10.0 ** ticks[-1])
    axes.yaxis.set_major_locator(FixedLocator([10.0**exponent for exponent in ticks]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "0" if value < 2 * zero else number(float(value)))
    )
    handles = handles_of(lines)
    for limit in map(downsample, map(corners, limits)):
        axes.fill_between(
            limit.steps, 10.0 ** ticks[0] / 1.6, limit.values, color=SHADE, alpha=0.5, zorder=0
        )
        axes.plot(limit.steps, limit.values, color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)))
    if limits:
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (4, 2))), "tolerance"))
    return to_png(figure, axes, handles)


def _grad_norm_ratio(view: ReportView) -> bytes | None:
    lines = _test_lines(view, lambda test: test.comparison("grad_norm").ratio)
    figure, axes = frame(view.title, "grad norm: ratio to the control", "test / control")
    if not plot(axes, lines):
        return None
    if ratio_needs_log(line.curve for line in lines):
        axes.set_yscale("log")
        axes.set_ylabel("test / control (log scale)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(float(value))))
        axes.yaxis.set_minor_locator(FixedLocator([]))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        if span := ratio_range(line.curve for line in lines):
            axes.set_ylim(*span)
    axes.axhline(1.0, color=INK, linewidth=1.0, zorder=1)
    return to_png(figure, axes, handles_of(lines))


def _test_lines(view: ReportView, pick: Callable[[TestView], Curve]) -> list[Line]:
    """One line per test set with such a curve; what needs a person is drawn thicker and on top."""
    lines = []
    for index, test in enumerate(view.tests):
        judgement, curve = test.verdict.judgement, pick(test)
        colour, stroke = style(index)
        width = 1.2 if judgement is Judgement.PASS else 2.2
        label = f"{SYMBOLS[judgement]} {test.run.name}"
        if curve:
            lines.append(Line(label, downsample(curve), colour, stroke, width))
    return sorted(lines, key=lambda line: line.width)
