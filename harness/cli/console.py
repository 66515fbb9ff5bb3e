"""Consoles that show what would steer a terminal, or be unseen there, instead of handing it on.

Notes, keys, config values and the words of a failed rank come from files of others: an escape
sequence in them could rewrite what stands above, a bidirectional override what a line says, and
with a space of no width two names look alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

LAYOUT = frozenset("\n\t")
WIDE = 120
"""Characters from which the whole verdict table is readable; also the width of CI logs."""


def shown(text: str) -> str:
    r"""A text with each letter that cannot be printed as Python writes it: ``\x1b``, ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in LAYOUT
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


class PlainConsole(Console):
    """rich's console: its own colours and bars reach the terminal, those of texts do not."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(shown(segment.text), segment.style)
            for segment in buffer
        )


def make_console() -> Console:
    """A console as wide as its terminal, or wide enough for a log."""
    console = PlainConsole(highlight=False)
    return console if console.is_terminal else PlainConsole(highlight=False, width=WIDE)


def error_console() -> Console:
    """For what does not belong to the answer: it goes to standard error."""
    return PlainConsole(stderr=True, highlight=False, soft_wrap=True)


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Print a text as it is: what users name may look like markup, and a terminal wraps lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)
