"""What a signature says when it recognises a bug."""

from __future__ import annotations

from typing import NamedTuple

from harness.model import CauseClass


class Cause(NamedTuple):
    """Why a test set got its verdict."""

    sentence: str = ""
    """With the numbers behind it; empty on PASS."""
    kind: CauseClass | None = None
    """None unless the judgement is FAIL."""
    look_at: str = ""
    """What a person of the field would open first; empty when unknown."""
