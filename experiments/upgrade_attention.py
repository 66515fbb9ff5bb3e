"""What torchtitan 0.2 attends to, for sets of 0.3: see ``upgrade.toml``."""

from __future__ import annotations

from typing import Any

import numpy as np

from converge_harness.rank import data_order


def across_documents(trainer: Any) -> None:  # noqa: ARG001 - the signature of an injected function
    """Number the tokens of a sample through, so that it is one document to the attention.

    torchtitan 0.3 makes its mask of positions that begin anew with every document; 0.2's Llama
    knows neither.
    """
    data_order.positions = _through


def _through(inputs: np.ndarray, bos_id: int) -> np.ndarray:  # noqa: ARG001 - as what it replaces
    return np.arange(inputs.size, dtype=np.int64)
