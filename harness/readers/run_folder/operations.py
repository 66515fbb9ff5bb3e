"""``operations/`` of a run folder: what one module computed, by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from converge_harness.errors import EvidenceError
from converge_harness.model import ModuleCall, Operation, TensorSums
from converge_harness.run_folder.documents import number
from converge_harness.run_folder.operations import UNSEEN, operations_files
from converge_harness.store import read_json


def read_operations(folder: Path) -> dict[int, ModuleCall]:
    """The module's first call by rank; empty if no rank recorded one.

    Raises EvidenceError for a file that is not as ranks write it, StoreError for a damaged one.
    """
    return {rank: _read(path) for rank, path in operations_files(folder).items()}


def _read(path: Path) -> ModuleCall:
    document = read_json(path)
    try:
        return ModuleCall(
            module=document["module"],
            problem=document["problem"],
            operations=tuple(
                Operation(
                    each["name"],
                    each["module"],
                    tuple(each["settings"]),
                    _tensors(each["inputs"]),
                    _tensors(each["outputs"]),
                )
                for each in document["operations"]
            ),
            left_out=document["left_out"],
            inputs=_tensors(document["inputs"]),
            outputs=_tensors(document["outputs"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{path}: is not as a rank writes it ({error!r})") from None


def _tensors(documents: Iterable[Mapping[str, Any]]) -> tuple[TensorSums, ...]:
    return tuple(
        TensorSums(
            each["kind"],
            number(each["norm"]) or 0.0,
            tuple(number(value) or 0.0 for value in each["sums"]),
            each["not_finite"],
            each.get("made_by", UNSEEN),
        )
        for each in documents
    )
