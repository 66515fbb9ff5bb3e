"""Colours and strokes that everybody can distinguish, on paper and on a dark screen.

Okabe and Ito, "Color Universal Design" (2008), without their yellow, which is invisible on white.
"""

from __future__ import annotations

from typing import NamedTuple

from converge_harness.model import Judgement

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STROKES = ("solid", "dash", "dot", "dashdot")

SYMBOLS = {
    Judgement.PASS: "✓",
    Judgement.FAIL: "✗",
    Judgement.INVALID: "∅",
    Judgement.ERROR: "!",
    Judgement.INCONCLUSIVE: "?",
}
"""Beside every verdict, because some people cannot distinguish the colours."""


class Style(NamedTuple):
    """How a set is drawn, the same in every plot of a report."""

    colour: str
    stroke: str
    """Plotly's name: solid, dash, dot, dashdot."""


def style(index: int) -> Style:
    """Style of the test set at this position: colours first, then strokes."""
    return Style(
        OKABE_ITO[index % len(OKABE_ITO)], _STROKES[index // len(OKABE_ITO) % len(_STROKES)]
    )
