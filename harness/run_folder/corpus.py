"""The files of a corpus that ranks read (``converge_harness.corpus`` writes them)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict, cast

from converge_harness.run_folder.shapes import COUNT, NUMBER, TEXT, Shape, misfit

FACTS = "corpus.json"
TOKENS = "tokens.npy"
SCHEMA = 1
"""That of ``corpus.json``."""


class CorpusDocument(TypedDict):
    """``corpus.json``."""

    schema: int
    generator: int
    """Version of what determines a corpus' bytes."""
    seed: int
    vocab_size: int
    bos_id: int
    eos_id: int
    tokens: int
    """Length of ``tokens.npy``, special tokens included."""
    documents: int
    predicted_tokens: int
    """Of each document every token after its bos, its eos included."""
    entropy_nats_per_token: float
    """Per predicted token."""
    tokens_sha256: str
    """Of the bytes of the array."""
    text_sha256: str
    """Of the documents, one a line."""


SHAPES: Mapping[str, Shape] = {
    **dict.fromkeys(
        ("generator", "seed", "vocab_size", "bos_id", "eos_id", "tokens", "documents"), COUNT
    ),
    "predicted_tokens": COUNT,
    "entropy_nats_per_token": NUMBER,
    "tokens_sha256": TEXT,
    "text_sha256": TEXT,
}


def read_corpus(folder: Path) -> CorpusDocument:
    """``corpus.json`` of a corpus' folder.

    Raises OSError if it cannot be read, and ValueError, which names it, if it has another schema,
    lacks a key or has a value of another shape.
    """
    path = folder / FACTS
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is a {type(value).__name__}, not a JSON object")  # noqa: TRY004 (a damaged file)
    if value.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema is {value.get('schema')!r}, not {SCHEMA}")
    if found := misfit(value, SHAPES):
        raise ValueError(f"{path}: {found}")
    if missing := [key for key in SHAPES if value.get(key) is None]:
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    return cast("CorpusDocument", value)


def documents_of(folder: Path) -> Path:
    """``{"text": ...}`` a line, for loaders that tokenize themselves.

    In a folder of its own, so that Hugging Face's ``load_dataset`` can read the folder.
    """
    return folder / "text" / "documents.jsonl"
