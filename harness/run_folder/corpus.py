"""The files of a corpus that ranks read (``converge_harness.corpus`` writes them)."""

from __future__ import annotations

from pathlib import Path

FACTS = "corpus.json"
TOKENS = "tokens.npy"
SCHEMA = 1
"""That of ``corpus.json``."""


def documents_of(folder: Path) -> Path:
    """``{"text": ...}`` a line, for loaders that tokenize themselves.

    In a folder of its own, so that Hugging Face's ``load_dataset`` can read the folder.
    """
    return folder / "text" / "documents.jsonl"
