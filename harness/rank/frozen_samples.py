"""What frozen steps leave: ``frozen.npz``, one entry per batch (``docs/architecture.md``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.rank.rows import Rows
from harness.rank.sketch import SUMS
from harness.rank.tensors import Table
from harness.run_folder.arrays import frozen_steps, head, write_arrays
from harness.run_folder.layout import FROZEN


class FrozenSamples:
    """Collects the frozen steps, on every rank alike; one of them writes the file."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gradients: list[Table] = []
        self._measured: list[Mapping[str, Any]] = []

    def add(self, gradients: Table, measured: Mapping[str, Any]) -> None:
        """One frozen step: the rows of its whole gradients, and what a step's line would say."""
        self._gradients.append(gradients)
        self._measured.append(measured)

    def write(self, folder: Path) -> None:
        """Write the file atomically. The last step that was added took the first batch again.

        A loss that could not be measured is NaN, a digest that could not is empty.
        """
        *first, again = self._gradients
        *measured, _ = self._measured
        rows = np.stack(first)
        losses = [each["loss_recomputed"] for each in measured]
        problems = {each for some in self._measured for each in some.get("problems", ())}
        if self._measured[-1]["batch_digest"] != self._measured[0]["batch_digest"]:
            problems.add("the second pass over the first frozen batch took other samples")
        write_arrays(
            folder / FROZEN,
            head(self._rows.names, self._rows.sizes)
            | frozen_steps(
                sketch=rows[:, :, :SUMS],
                norm=np.sqrt(rows[:, :, SUMS]),
                loss=[math.nan if loss is None else loss for loss in losses],
                batch_digests=[each["batch_digest"] or "" for each in measured],
                again=again[:, :SUMS],
                problems=sorted(problems),
            ),
        )
