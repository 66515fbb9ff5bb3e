"""``report.html``: one file, no network, interactive; the table needs no JavaScript at all."""

from __future__ import annotations

import functools
import hashlib
import re

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from converge_harness import __version__
from converge_harness.model import CauseClass, Tier
from converge_harness.report import text
from converge_harness.report.renderers import verdict_table
from converge_harness.report.renderers.assets import packed_plotly, resource, source
from converge_harness.report.renderers.figures import Figures
from converge_harness.report.renderers.json_document import to_json
from converge_harness.report.renderers.palette import SYMBOLS
from converge_harness.report.text import CAUSES_PAGE
from converge_harness.report.view.report_view import SIGNAL_TITLES, ReportView
from converge_harness.report.view.resumed_run import (
    FAULT_TITLES,
    PASS_TITLES,
    fault_cells,
    pass_cells,
)
from converge_harness.report.view.tensor_tables import SHOWN
from converge_harness.shipped import shipped

_LOCAL_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")
"""A relative link of the causes page: its target does not exist next to a report."""
LOG_LINES = 120
"""Lines of a failed rank's log in the page."""


def to_html(view: ReportView) -> str:
    """Render the page.

    Names and messages are escaped by jinja2, also inside the inline JSON. Should an escape ever be
    missed, the content security policy still keeps an injected script from running (only scripts
    with the page's nonce do) and the page from reaching any network.
    """
    figures = Figures(view)
    payload = figures.payload()
    environment = _environment()
    # A hash of the whole page, so nobody could know the nonce when they wrote a text in it.
    nonce = hashlib.sha256(f"{to_json(view)}{payload}".encode()).hexdigest()[:32]
    return environment.get_template("report.html.j2").render(
        view=view,
        payload=payload,
        figures=frozenset(payload["figures"]),
        nonce=nonce,
        styles=figures.styles,
        columns=verdict_table.columns(view),
        rows=[(test, verdict_table.row(test)) for test in view.by_severity],
        css=resource("report.css"),
        dark=resource("dark.css"),
        javascript=resource("report.js"),
        plotly=packed_plotly(),
        version=__version__,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "digits": text.digits,
        "duration": text.duration,
        "step_range": text.step_range,
        "glued": text.glued,
        "pass_cells": pass_cells,
        "fault_cells": fault_cells,
        "log_tail": lambda block: text.tail(block, LOG_LINES),
    }
    environment.globals |= {
        "FAULT_TITLES": FAULT_TITLES,
        "PASS_TITLES": PASS_TITLES,
        "SYMBOLS": SYMBOLS,
        "cause_section": cause_section,
        "excess": text.excess,
        "of_limit": text.of_limit,
        "ABSENT": text.ABSENT,
        "SHOWN": SHOWN,
        "SIGNAL_TITLES": SIGNAL_TITLES,
        "TIERS": tuple(Tier),
    }
    return environment


@functools.cache
def cause_section(kind: CauseClass) -> Markup:
    """What ``docs/causes.md`` says of a class of cause, in HTML: its meaning, a case, what to try.

    Empty for a class of somebody's own, and where the page is missing: a report needs neither.
    """
    page = shipped(CAUSES_PAGE)
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
