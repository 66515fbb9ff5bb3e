"""Correct resumes in the middle of a run: none of them may be called a bug."""

from __future__ import annotations

from typing import Any

from dropout import SEED, dropout
from resuming import resume


def resumed(trainer: Any) -> None:
    """Save after step 5, lose everything, load, and go on with step 6."""
    resume(trainer, 6)


def resumed_with_dropout(trainer: Any) -> None:
    """The same, with dropout whose generator is saved and loaded."""
    generator = dropout(trainer)
    resume(trainer, 6, before_loading=lambda: generator.manual_seed(SEED))
