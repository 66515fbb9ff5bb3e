"""What ``docs/causes.md`` says of a class of cause, for a page without a network."""

from __future__ import annotations

import functools
import re

from markdown_it import MarkdownIt
from markupsafe import Markup

from converge_harness.model import CauseClass
from converge_harness.shipped import shipped

PAGE = "docs/causes.md"
_LOCAL_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")
"""A link to a file of the project, which is not there beside a report."""


@functools.cache
def cause_section(kind: CauseClass) -> Markup:
    """What the class means, a case, and how to look further; in HTML.

    Empty for a class of somebody's own, and where the page is missing: a report needs neither.
    """
    page = shipped(PAGE)
    if not page.is_file():
        return Markup()
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = {title.lower(): text for title, _, text in (each.partition("\n") for each in sections)}
    if kind.value not in texts:
        return Markup()
    text = _LOCAL_LINK.sub(r"\1", texts[kind.value])
    # Raw HTML in the text stays text.
    html = MarkdownIt("commonmark", {"html": False}).render(text)
    return Markup(html)  # noqa: S704 (of our own page)
