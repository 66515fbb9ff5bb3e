"""What the pictures are drawn with: a frame, lines, a legend, and the bytes of its files.

Built on matplotlib's object API, so no state is shared and no display is needed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import LineStyleType

from harness.report.curves import Curve

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
_NAME_LENGTH = 34


class Line(NamedTuple):
    label: str
    curve: Curve
    colour: str
    stroke: str = "solid"
    """Plotly's name, as in :mod:`harness.report.palette`; ``none`` for points only."""
    width: float = 1.4
    marker: str = ""
    """Matplotlib's name of what stands at every step."""


def frame(title: str, what: str, y_title: str, pad: float | None = None) -> tuple[Figure, Axes]:
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
        f"{short(title)} · {what}", loc="left", color=INK, weight="bold", pad=pad
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


def plot(axes: Axes, lines: Sequence[Line]) -> bool:
    """Whether there was anything to draw."""
    for line in lines:
        # A curve of one step is a point, and a point has no line.
        single = "o" if len(line.curve) == 1 else ""
        axes.add_line(_artist(line, line.curve, line.marker or single))
    axes.autoscale_view()
    return any(line.curve for line in lines)


def handles_of(lines: Iterable[Line]) -> list[tuple[Line2D, str]]:
    return [(_artist(line, Curve(), line.marker), line.label) for line in lines]


def _artist(line: Line, curve: Curve, marker: str) -> Line2D:
    artist = Line2D(curve.steps, curve.values, color=line.colour, linewidth=line.width)
    artist.set_linestyle(_STROKES[line.stroke])
    artist.set_marker(marker)
    if line.marker:
        hollow = line.stroke != "none"
        artist.set_markerfacecolor("none" if hollow else line.colour)
    return artist


def to_files(figure: Figure, axes: Axes, handles: Sequence[tuple[Line2D, str]]) -> Picture:
    """The finished picture in both forms; it says nothing of the time and machine it was made."""
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
        text.set_text(short(label))
    return {form: _saved(figure, form) for form in ("png", "svg")}


def _saved(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    unsaid = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    # Letters as paths, because a reader's fonts are not known; the salt makes ids reproducible.
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "converge"}):
        # A name in a script that the bundled font lacks is drawn as boxes; that is no one's error.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format=form, metadata=unsaid)
    return buffer.getvalue()


def short(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else f"{text[: _NAME_LENGTH - 1]}…"
