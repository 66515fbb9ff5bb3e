"""What pages of ours hold inline: their styles and scripts, and plotly's."""

from __future__ import annotations

import base64
import functools
import gzip
from importlib.resources import files

from markupsafe import Markup
from plotly.offline import get_plotlyjs


def source(name: str, package: str = "harness.report") -> str:
    """The text of a file in a package's ``templates``."""
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


def resource(name: str, package: str = "harness.report") -> Markup:
    """Our own style or script, which must not be escaped."""
    return Markup(source(name, package))  # noqa: S704 - a file of ours, nothing from users


@functools.cache
def packed_plotly() -> str:
    """Plotly's script, compressed: 2 MB instead of 5 in every page; browsers unpack it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
