"""``plots/``: the figures as PNG and SVG: without a browser, for READMEs, papers and mails.

In the manner of the figure of torchtitan's converging guide: every set over the control, in one
picture.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from harness.model import Judgement
from harness.report.curves import Curve
from harness.report.downsample import corners, downsample
from harness.report.palette import SYMBOLS, style
from harness.report.pass_plot import draw_passes
from harness.report.plot_parts import (
    BAND,
    INK,
    QUIET,
    SHADE,
    Line,
    Picture,
    frame,
    handles_of,
    plot,
    to_files,
)
from harness.report.scales import SignedLog, ratio_needs_log, ratio_range
from harness.report.text import number
from harness.report.view import ReportView, TestView


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
            pictures[name] = draw_passes(view, test, test.resumed, style(index))
    return {
        f"{name}.{form}": content
        for name, picture in pictures.items()
        if picture
        for form, content in picture.items()
    }


def _overview(view: ReportView) -> Picture | None:
    controls = [
        Line(f"control {run.name}", downsample(run.signal("loss")), BAND, width=7.0)
        for run in view.controls
    ]
    tests = _test_lines(view, lambda test: test.run.signal("loss"))
    lines = [*controls, *tests]
    figure, axes = frame(view.title, "loss", "loss (nats per token)")
    if not plot(axes, [*controls, *_seed_lines(view), *tests]):
        return None
    handles = handles_of(lines)
    if view.entropy_floor is not None:
        axes.axhline(view.entropy_floor, color=QUIET, linewidth=1.2, linestyle=(0, (2, 2)))
        label = f"entropy floor {number(view.entropy_floor)}"
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (2, 2))), label))
    return to_files(figure, axes, handles)


def _differences(view: ReportView) -> Picture | None:
    tests = _test_lines(view, lambda test: test.comparison("loss").difference)
    repeats = [
        Line(f"A/A {repeat.run.repeat or repeat.run.name}", downsample(curve), QUIET, "dot", 1.0)
        for repeat in view.repeats
        if (curve := repeat.comparisons["loss"].difference)
    ]
    limits = list(
        dict.fromkeys(
            test.comparison("loss").limit for test in view.tests if test.comparison("loss").limit
        )
    )
    lines = [*repeats, *tests]
    axis = SignedLog.over([*(line.curve for line in lines), *limits])
    figure, axes = frame(
        view.title, "loss: difference to the control", "relative difference (signed log scale)"
    )
    placed = [line._replace(curve=_placed(line.curve, axis)) for line in lines]
    if not plot(axes, placed):
        return None
    axes.set_ylim(*axis.span)
    axes.yaxis.set_major_locator(FixedLocator(list(axis.ticks)))
    axes.yaxis.set_major_formatter(FixedFormatter(list(axis.ticks.values())))
    axes.axhline(0.0, color=INK, linewidth=0.8, zorder=1)
    handles = handles_of(tests)
    if repeats:
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (1, 1.5))), "A/A repeats"))
    for limit in map(downsample, map(corners, limits)):
        high = axis.place(limit.values)
        axes.fill_between(limit.steps, -high, high, color=SHADE, alpha=0.5, zorder=0)
        for side in (-high, high):
            axes.plot(limit.steps, side, color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)))
    if limits:
        handles.append((Line2D([], [], color=QUIET, linestyle=(0, (4, 2))), "tolerance"))
    for index, test in enumerate(view.tests):
        if test.verdict.onset_step is not None:
            onset = axes.axvline(test.verdict.onset_step, color=style(index).colour, zorder=1)
            onset.set(linewidth=1.2, linestyle=(0, (2, 3)))
    return to_files(figure, axes, handles)


def _placed(curve: Curve, axis: SignedLog) -> Curve:
    finite = np.where(np.isfinite(curve.values), curve.values, np.nan)
    return Curve(curve.steps, axis.place(finite))


def _grad_norm_ratio(view: ReportView) -> Picture | None:
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
    return to_files(figure, axes, handles_of(lines))


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
