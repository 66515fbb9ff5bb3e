"""Consoles that show what would steer a terminal, instead of handing it on.

Notes, keys, config values and the words of a failed rank come from files of others: an escape
sequence in them could rewrite what stands above, and a bidirectional override what a line says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

STEERING = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # all control characters but tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # which way a line runs
    "\u2028\u2029"  # other ends of lines
    "\ud800-\udfff"  # no characters: a path whose bytes are no UTF-8 has them
    "]"
)


def shown(text: str) -> str:
    r"""A text with every such character as Python writes it: ``\x1b``, ``\u202e``."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class PlainConsole(Console):
    """rich's console: its own colours and bars reach the terminal, those of texts do not."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(shown(segment.text), segment.style)
            for segment in buffer
        )
