"""Names in ``compile.components``, a list of any strings in torchtitan's config."""

from __future__ import annotations

from typing import Any

from converge_harness.rank.settings import KeyProblem

COMPONENTS = ("loss", "model")
"""What torchtitan looks for in it."""


def unknown_components(config: Any) -> list[KeyProblem]:
    """Names in a built config that would compile nothing."""
    return [
        KeyProblem("compile.components", f"torchtitan compiles no {name!r}", COMPONENTS)
        for name in config.compile.components
        if name not in COMPONENTS
    ]
