"""``operations/rank-NNNNN.json``: the operations of one module's first call.

Only in runs whose job names the module (``operations_of``), which ``converge run --explain`` makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from converge_harness.run_folder.documents import SCHEMA, write_json
from converge_harness.run_folder.layout import OPERATIONS

MODEL = "the model"
"""As the module's name: the whole model."""
GIVEN = -1
"""As a maker: the module was called with the tensor."""
UNSEEN = -2
"""As a maker: no operation that was seen: a weight, a constant, compiled code."""


class TensorDocument(TypedDict, total=False):
    """A tensor as this rank holds it."""

    kind: str
    """Data type and shape: ``float32[4, 32, 256]``."""
    norm: float
    sums: list[float]
    """Signed sums of its finite entries; empty if they could not be read."""
    not_finite: int
    made_by: int
    """Index of the operation that returned it last, ``GIVEN`` or ``UNSEEN``."""


class OperationDocument(TypedDict):
    """One call of an operation of ATen, or of another library."""

    name: str
    """``aten.mul.Tensor``."""
    module: str
    """The innermost module that called it."""
    settings: list[str]
    """Its arguments that are no tensors."""
    inputs: list[TensorDocument]
    outputs: list[TensorDocument]


class ModuleCallDocument(TypedDict):
    """The file of one rank."""

    module: str
    problem: str
    """Why nothing of it was seen, in a clause; else empty."""
    operations: list[OperationDocument]
    left_out: int
    """Operations after these that were not recorded."""
    inputs: list[TensorDocument]
    outputs: list[TensorDocument]


def write_operations(run_folder: Path, rank: int, document: ModuleCallDocument) -> None:
    folder = run_folder / OPERATIONS
    folder.mkdir(exist_ok=True)
    write_json(folder / f"rank-{rank:05d}.json", {"schema": SCHEMA, **document})


def operations_files(run_folder: Path) -> dict[int, Path]:
    """The files by rank; none of a run without them."""
    found = sorted((run_folder / OPERATIONS).glob("rank-*.json"))
    return {int(path.stem.removeprefix("rank-")): path for path in found}
