"""The starts of a program without the probe (``passes/NNN/start.json``), by the curve of each.

Each start is a pass. It began after the step before the first one in its curve: that is where the
program really went on, whatever it was told to resume from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import Evidence, Pass
from converge_harness.readers.foreign.registry import read_foreign, read_unfinished
from converge_harness.readers.lines import fail
from converge_harness.readers.points import LastValues
from converge_harness.readers.run_folder.arrays import read_whole
from converge_harness.readers.run_folder.metrics import Metrics
from converge_harness.readers.run_folder.passes import PassEvidence, merge
from converge_harness.run_folder.layout import is_inside
from converge_harness.run_folder.starts import StartDocument, read_start, start_files
from converge_harness.trainers import curve_outside


class StartEvidence(NamedTuple):
    """A start of the program."""

    curve: Evidence
    """As the program wrote it."""
    as_pass: PassEvidence


def read_starts(folder: Path, columns: Mapping[str, str]) -> tuple[StartEvidence, ...] | None:
    """The starts of a run, in their order; None for a run of any other kind.

    A start that died before it wrote a curve, or whose curve is damaged, has no step.

    Args:
        folder: the run folder. columns: as for ``read_foreign``.

    Raises EvidenceError for a start whose file cannot be understood, for one that ended well
    without a curve or with one that cannot be understood, and for a curve whose losses are means
    over several steps; StoreError for a damaged manifest of a checkpoint.
    """
    files = start_files(folder)
    if not files:
        return None
    return tuple(_start(folder, number, path, columns) for number, path in files.items())


def _start(folder: Path, number: int, path: Path, columns: Mapping[str, str]) -> StartEvidence:
    try:
        start = read_start(path)
    except (OSError, ValueError) as error:
        fail(str(path), f"{error}; run the job again")
    curve = _curve(folder, start, columns)
    steps, differences = curve.steps, {each.step: (each.values,) for each in curve.replay_conflicts}
    ended = start.get("returncode") == 0
    nothing = (None,) * steps.size
    itself = Pass(
        number=number,
        segment=start.get("segment"),
        world_size=start["ranks"],
        loaded_step=max(int(steps[0]) - 1, 0) if steps.size else None,
        started=start["at"],
        steps=steps,
        signals=curve.signals,
        batch_digests=nothing,
        ended=ended,
        whole=read_whole(path.parent),
        by_curve=True,
        first_row_at=start.get("first_row_at"),
    )
    metrics = Metrics(
        identity=None,
        values=LastValues(
            steps=steps,
            signals=dict(curve.signals),
            # Rows that a logger writes twice alike are no replay.
            replayed=tuple(differences),
            differences=differences,
            problems=curve.problems,
        ),
        batch_digests=nothing,
        batch_agrees=nothing,
        grads_missing=(),
        replicas=(),
        problems=(),
        end=int(steps[-1]) if ended and steps.size else None,
        expected_steps=None,
    )
    return StartEvidence(curve, PassEvidence(itself, metrics, samples=()))


def steps_so_far(curve: Path, columns: Mapping[str, str]) -> range:
    """The steps of a start whose program still runs, from the first in its curve to the newest.

    Empty while the curve has none. ``columns`` as for ``read_foreign``. Raises EvidenceError for a
    curve that cannot be understood.
    """
    steps = read_unfinished(curve, columns).steps
    return range(int(steps[0]), int(steps[-1]) + 1) if steps.size else range(0)


def _curve(folder: Path, start: StartDocument, columns: Mapping[str, str]) -> Evidence:
    path = folder / start["curve"]
    if not is_inside(path, folder):
        raise curve_outside(path)
    if start.get("returncode") == 0:
        curve = read_foreign(path, columns)
    else:
        curve = _of_a_start_that_died(path, columns)
    # 0: each is a mean since the row before it, which is of one step where every step has a row.
    if curve.mean_over > 1 or (curve.mean_over == 0 and (np.diff(curve.steps) > 1).any()):
        fail(str(path), "its losses are means over several steps: log the loss of every step")
    return curve


def _of_a_start_that_died(path: Path, columns: Mapping[str, str]) -> Evidence:
    """Its curve as far as it was written; what cannot be read has no step, as if it were missing.

    Otherwise the other starts would lose their evidence by it.
    """
    try:
        return read_unfinished(path, columns)
    except EvidenceError as error:
        problem = f"its curve counts as one without a step, because it cannot be read: {error}"
        none = np.zeros(0, dtype=np.int64)
        return Evidence(name="", source=str(path), steps=none, signals={}, problems=(problem,))


def merge_starts(starts: Sequence[StartEvidence], last_step: int | None, **more: Any) -> Evidence:
    """One curve of all starts; a step counts as the last start that trained it has it.

    ``last_step`` is the job's, ``more`` are further fields of ``Evidence``.
    """
    curves = [each.curve for each in starts]
    merged = merge([each.as_pass for each in starts], last_step, **more)
    signals = merged.signals.keys()
    return replace(
        merged,
        batch_digests=(),
        batch_agrees=(),
        rounding={
            each: max(found)
            for each in signals
            if (found := [one.rounding[each] for one in curves if each in one.rounding])
        },
        significant={
            each: min(found)
            for each in signals
            if (found := [one.significant[each] for one in curves if each in one.significant])
        },
        contradictions=tuple(clause for one in curves for clause in one.contradictions),
    )
