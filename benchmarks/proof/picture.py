"""``benchmark.png`` and ``.svg``: the result at one glance."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from converge_harness.report.renderers.palette import OKABE_ITO
from proof.results import OURS, ProvenBug, Result, RuleScore

CAUGHT, ALARM = OKABE_ITO[0], OKABE_ITO[1]
_INK, _QUIET, _GRID = "#1b1f24", "#8c959f", "#dfe3e8"
_DPI = 150
_HATCH = "////"


def draw(results: Sequence[Result]) -> dict[str, bytes]:
    """Format (``png``, ``svg``) to content, a row per regime; nothing without bugs."""
    shown = [result for result in results if result.proof.bugs]
    if not shown:
        return {}
    size = (12.0, 5.4 * len(shown))
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(shown), 2, width_ratios=[1.7, 1], squeeze=False)
    for (left, right), result in zip(rows, shown, strict=True):
        proof = result.proof
        _rules(left, proof.scores, len(proof.bugs), len(proof.correct))
        _by_step(right, proof.bugs)
        if len(results) > 1:
            for axes in (left, right):
                title = f"{result.regime.title}: {axes.get_title(loc='left')}"
                axes.set_title(title, loc="left", weight="bold", color=_INK)
    return {name: _rendered(figure, name) for name in ("png", "svg")}


def _rules(axes: Axes, scores: Sequence[RuleScore], bugs: int, correct: int) -> None:
    """Two bars per rule, as shares: bugs caught, and false alarms."""
    height = 0.38
    for at, score in enumerate(scores):
        ours = score.name == OURS
        for offset, count, of, colour in (
            (-height / 2, score.bugs_caught, bugs, CAUGHT),
            (height / 2, score.false_alarms, correct, ALARM),
        ):
            axes.barh(
                at + offset,
                100 * count / of if of else 0,
                height,
                color=colour,
                alpha=1.0 if ours else 0.55,
                hatch=_HATCH if colour == ALARM else None,
                edgecolor="white",
                linewidth=0,
            )
            axes.text(
                (100 * count / of if of else 0) + 1,
                at + offset,
                f"{count} of {of}",
                va="center",
                fontsize=8.5,
                color=_INK,
                weight="bold" if ours else "normal",
            )
    axes.set_yticks(range(len(scores)), [f"{each.name}\n{each.source}" for each in scores])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="y", labelsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("% of the bugs, % of the correct set-ups")
    axes.set_title("Bugs caught, and false alarms, by rule", loc="left", weight="bold", color=_INK)
    axes.legend(
        [axes.patches[0], axes.patches[1]],
        ["silent bugs caught (more is better)", "false alarms (fewer is better)"],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    _frame(axes, "x")


def _by_step(axes: Axes, bugs: Sequence[ProvenBug]) -> None:
    """How many bugs have begun, and how many are caught, by each step."""
    caught = [
        each.graded.answer.first_step
        for each in bugs
        if each.graded.answer.caught and each.graded.answer.first_step is not None
    ]
    begun = [each.graded.bug.first_step for each in bugs]
    last = max(each.run.steps for each in bugs)
    steps = range(max(last, *begun, *caught, 1) + 1)
    axes.step(
        steps,
        [sum(first <= step for first in begun) for step in steps],
        where="post",
        color=_QUIET,
        linewidth=2,
        linestyle=(0, (4, 2)),
        label="have had an effect",
    )
    axes.step(
        steps,
        [sum(first <= step for first in caught) for step in steps],
        where="post",
        color=CAUGHT,
        linewidth=2.6,
        label=f"caught by {OURS}",
    )
    axes.set_ylim(0, len(bugs) * 1.06 + 0.5)
    axes.set_xlim(0, steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_title(f"Of {len(bugs)} bugs, by step", loc="left", weight="bold", color=_INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=9)
    _frame(axes, "y")


def _frame(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.grid(visible=True, axis=grid, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)


def _rendered(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Neither dates nor versions in it: the same result is the same file.
    metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
