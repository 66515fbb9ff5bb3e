"""Consoles that escape control and invisible characters instead of printing them.

Notes, keys, config values and the error messages of ranks come from other people's files: an escape
sequence in them could overwrite the lines above, a bidirectional override could reorder a line, and
a zero-width space makes two names look alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

LAYOUT = frozenset("\n\t")
WIDE = 120
"""Columns that the whole verdict table needs; also the width used for CI logs."""


def shown(text: str) -> str:
    r"""A text with unprintable characters escaped, as ``\x1b`` and ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in LAYOUT
        else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


class PlainConsole(Console):
    """rich's console, which escapes what is in texts but not its own colours and bars."""

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
    """A console on standard error, for what is not part of the output."""
    return PlainConsole(stderr=True, highlight=False, soft_wrap=True)


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Print a text as it is: no markup (user's names may look like it), and no wrapping by rich."""
    console.print(text, style=style, markup=False, soft_wrap=True)
