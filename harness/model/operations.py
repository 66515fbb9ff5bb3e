"""What one module computed in its first call, operation by operation, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

GIVEN = -1
"""As a maker: the module was called with the tensor."""
UNSEEN = -2
"""As a maker: no operation that was seen: a weight, a constant, compiled code."""


@dataclass(frozen=True, slots=True)
class TensorSums:
    """A tensor as a rank holds it."""

    kind: str
    """Data type and shape: ``float32[4, 32, 256]``."""
    norm: float
    sums: tuple[float, ...]
    """Signed sums of its finite entries; empty if they could not be read."""
    not_finite: int
    made_by: int
    """Index of the operation that returned it last, ``GIVEN`` or ``UNSEEN``."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operation of ATen, or of another library."""

    name: str
    """``aten.mul.Tensor``."""
    module: str
    """The innermost module that called it; empty: the module that was looked at."""
    settings: tuple[str, ...]
    """Its arguments that are no tensors."""
    inputs: tuple[TensorSums, ...]
    outputs: tuple[TensorSums, ...]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A rank's first call of a module."""

    module: str
    problem: str
    """Why nothing of it was seen, in a clause; else empty."""
    operations: tuple[Operation, ...]
    left_out: int
    """Operations after these that were not recorded."""
    inputs: tuple[TensorSums, ...]
    outputs: tuple[TensorSums, ...]
