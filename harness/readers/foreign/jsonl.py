"""JSONL files, one row per line, as evidence."""

from __future__ import annotations

from converge_harness.errors import EvidenceError
from converge_harness.model import Evidence
from converge_harness.readers.foreign.format import Format, Source
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.lines import json_objects, line_of
from converge_harness.run_folder.layout import JOB


def read_jsonl(source: Source) -> Evidence:
    """One JSON object per line; lines without a loss or grad norm (validation) are left out.

    Raises EvidenceError naming file and line.
    """
    path, text = source.path, source.text
    if source.document is not None and "\n" in text.strip():
        raise EvidenceError(
            f"{path}: is one JSON object, but neither a trainer_state.json (it has no "
            f"'log_history') nor golden values (no entry has 'values'); {source.readable}"
        )
    _require_foreign(source)
    rows = RowCollector(str(path), line_of(path), source.columns)
    for line, values in json_objects(path, text):
        rows.add(line, values)
    return rows.evidence(path.stem)


FORMAT = Format("JSONL", read=read_jsonl, has_content=lambda source: source.is_json)


def _require_foreign(source: Source) -> None:
    """Raise EvidenceError for a metrics file of ours that lies outside of its run folder.

    Read as anybody's JSONL it would be judged without any audit.
    """
    path = source.path
    _, first = next(json_objects(path, source.text), (0, {}))
    if first.get("kind") == "header" and "identity" in first:
        raise EvidenceError(
            f"{path}: holds the metrics of a run of converge, but {path.parent / JOB} is "
            "missing, so nothing says what the run was meant to be; give its whole run folder"
        )
