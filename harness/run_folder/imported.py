"""``imported/rank-NNNNN.json``: files that a rank imported from outside of its toolchain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict, cast

from converge_harness.run_folder.documents import write_json
from converge_harness.run_folder.layout import IMPORTED


class ImportedDocument(TypedDict, total=False):
    """The file of one rank."""

    began: float
    """When the rank started, in seconds since 1970; missing in files of older versions."""
    files: dict[str, str | None]
    """SHA-256 by path. Null: a module that cannot be read as a file (for example in a zip archive),
    or a file written since the rank started, which may have imported an earlier version."""


def write_imported(run_folder: Path, rank: int, document: ImportedDocument) -> None:
    folder = run_folder / IMPORTED
    folder.mkdir(exist_ok=True)
    write_json(folder / f"rank-{rank:05d}.json", document)


def read_imported(run_folder: Path) -> list[ImportedDocument]:
    """The files of all ranks, in their order; none of a run without them."""
    paths = sorted((run_folder / IMPORTED).glob("*.json"))
    return [cast("ImportedDocument", json.loads(path.read_bytes())) for path in paths]
