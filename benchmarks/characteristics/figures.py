"""The figures of docs/operating-characteristics.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from characteristics.rates import Bias, FalseAlarms, Power
from converge_harness.report.renderers.palette import OKABE_ITO

GOAL = 0.01
_DPI = 110
_MARKERS = "osD^vP"


def draw_false_alarms(found: Sequence[FalseAlarms], path: Path) -> None:
    """False-alarm rate per experiment with its interval, a row per situation."""
    figure = Figure(figsize=(7.5, 0.28 * len(found) + 1.2), layout="constrained")
    axes = figure.subplots()
    laws = list(dict.fromkeys(one.situation.law.name for one in found))
    for row, one in enumerate(found):
        place = laws.index(one.situation.law.name)
        low, high = one.experiments.interval
        axes.plot([100 * low, 100 * high], [row, row], color=OKABE_ITO[place], linewidth=2)
        axes.plot([100 * one.experiments.value], [row], _MARKERS[place], color=OKABE_ITO[place])
    axes.axvline(100 * GOAL, color="#444444", linestyle="--", linewidth=1)
    axes.annotate("goal 1%", (100 * GOAL, -0.9), xytext=(4, 0), textcoords="offset points")
    axes.set_yticks(
        range(len(found)),
        [
            f"{one.situation.law.name}, {one.situation.steps:,} steps, x{one.situation.factor:g}"
            for one in found
        ],
    )
    axes.set_ylim(len(found) - 0.4, -1.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("experiments of 11 correct test sets with a FAIL, in % (95% interval)")
    _plain(axes)
    figure.savefig(path, dpi=_DPI)


def draw_power(found: Sequence[Power], path: Path) -> None:
    """A panel per law and start of the bias: how often a bias gives FAIL, by length of the run."""
    laws = list(dict.fromkeys(one.law.name for one in found))
    figure = Figure(figsize=(2.3 * len(laws) + 0.6, 4.6), layout="constrained")
    panels = figure.subplots(2, len(laws), sharex=True, sharey=True, squeeze=False)
    for row, late in enumerate((False, True)):
        for column, law in enumerate(laws):
            axes = panels[row, column]
            here = [one for one in found if one.law.name == law and one.bias.from_middle == late]
            for place, bias in enumerate(dict.fromkeys(one.bias for one in here)):
                _power_curve(axes, [one for one in here if one.bias == bias], bias, place)
            axes.set_xscale("log")
            axes.set_ylim(-4, 104)
            axes.set_title(f"{law}, from {'the middle' if late else 'step 1'}", fontsize=9)
            _plain(axes)
    figure.supxlabel("steps of the run", fontsize=9)
    figure.supylabel("test sets that FAIL, in %", fontsize=9)
    panels[0, 0].legend(title="bias of the loss", fontsize=8, title_fontsize=8, frameon=False)
    figure.savefig(path, dpi=_DPI)


def _power_curve(axes: Axes, found: Sequence[Power], bias: Bias, place: int) -> None:
    axes.plot(
        [one.steps for one in found],
        [100 * one.detected.value for one in found],
        marker=_MARKERS[place],
        markersize=4,
        color=OKABE_ITO[place],
        label=f"{bias.size:.1%}",
    )


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.5)
