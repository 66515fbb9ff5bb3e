"""The contents of our pages: their styles and scripts, and plotly's."""

from __future__ import annotations

import base64
import functools
from importlib.resources import files
from typing import Any

import numpy.typing as npt
from markupsafe import Markup

PLOTLY = "plotly-cartesian-4.1.1.min.js.gz"
"""plotly.js with only plots on two axes: a third of the PyPI package plotly's, and a page is ready
after 40% less work of the browser. It is the file of npm's plotly.js-cartesian-dist-min
4.1.1, compressed by ``gzip -9 -n``."""
PLOTLY_SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""Of that file, not compressed."""


def source(name: str, package: str = "converge_harness.report") -> str:
    """The text of a file in a package's ``templates``."""
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


def resource(name: str, package: str = "converge_harness.report") -> Markup:
    """Our own style or script, which must not be escaped."""
    return Markup(source(name, package))  # noqa: S704 - a file of ours, nothing from users


@functools.cache
def packed_plotly() -> str:
    """Plotly's script, compressed: 0.7 MB instead of 1.5 in every page; browsers unpack it."""
    packed = files("converge_harness.report").joinpath("vendor", PLOTLY).read_bytes()
    return base64.b64encode(packed).decode()


def typed_array(values: npt.NDArray[Any]) -> dict[str, str]:
    """Plotly's encoding of a little-endian array: its ``dtype`` (``f4``, ``i4``) and its bytes."""
    return {
        "dtype": values.dtype.str.removeprefix("<"),
        "bdata": base64.b64encode(values.tobytes()).decode(),
    }
