"""The passes of a resumed run (``passes/NNN``): each by itself, and merged into one curve.

A step belongs to the last pass that trained it, and steps after the checkpoint from which a later
pass resumed are not part of the final state. So each pass discards all earlier passes' steps after
the checkpoint that it started from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from converge_harness.model import (
    Activations,
    Column,
    DropoutMasks,
    Evidence,
    Flags,
    Floats,
    FrozenSamples,
    Integers,
    ObjectiveTerms,
    Pass,
    ReplayConflict,
    ReplicaSample,
    Struck,
    TensorSample,
)
from converge_harness.readers.lines import fail
from converge_harness.readers.run_folder.arrays import (
    read_activations,
    read_frozen,
    read_loaded,
    read_samples,
    read_saved,
    read_whole,
)
from converge_harness.readers.run_folder.documents import read_fault, read_in_force
from converge_harness.readers.run_folder.metrics import Metrics, read_metrics
from converge_harness.run_folder.faults import REQUIRED, struck_files
from converge_harness.run_folder.layout import METRICS_FILES, PASSES
from converge_harness.run_folder.passes import passes_with_metrics


@dataclass(frozen=True, slots=True, eq=False)
class PassEvidence:
    """A pass, with the other evidence of its ranks."""

    itself: Pass
    metrics: Metrics
    samples: tuple[TensorSample, ...]
    frozen: FrozenSamples | None = None
    """Of a pass that began at the initial weights, with frozen steps before them."""
    activations: Activations | None = None


def read_passes(folder: Path) -> tuple[PassEvidence, ...]:
    """The passes of a run folder in the order of their starts; empty for other runs.

    A pass that died before it wrote a header is left out. Raises EvidenceError for a folder that
    also has metrics of its own, for contradicting files of a pass, and what ``read_metrics`` and
    ``read_state`` raise; StoreError for newer files.
    """
    folders = passes_with_metrics(folder)
    own = next((name for name in METRICS_FILES if (folder / name).is_file()), None)
    if folders and own:
        fail(
            str(folder),
            f"has {own} and {PASSES}/, so two runs; delete the folder and run the job again",
        )
    passes = [one for entry in folders if (one := _read_pass(entry)) is not None]
    return tuple(sorted(passes, key=lambda one: one.itself.number))


def _read_pass(folder: Path) -> PassEvidence | None:
    metrics = read_metrics(folder)
    where = str(folder)
    if metrics.identity is None and not metrics.values.steps.size:
        return None
    if not folder.name.isdecimal() or metrics.number != int(folder.name):
        fail(where, f"its metrics are of pass {metrics.number}, which is not the folder's name")
    if metrics.world_size is None:
        fail(where, "the header of its metrics has no world_size; run the job again")
    loaded = read_loaded(folder)
    said = metrics.loaded
    if loaded is not None and said is not None and loaded.step != said.step:
        fail(
            where,
            f"state was loaded at step {loaded.step}, but its metrics name step {said.step}",
        )
    return PassEvidence(
        Pass(
            number=metrics.number,
            segment=metrics.segment,
            world_size=metrics.world_size,
            loaded_step=said.step if said else None,
            started=said.at if said else None,
            steps=metrics.values.steps,
            signals=metrics.values.signals,
            batch_digests=metrics.batch_digests,
            ended=metrics.end is not None,
            in_force=read_in_force(folder),
            loaded=loaded,
            saved=read_saved(folder),
            whole=read_whole(folder),
            random_states=metrics.random_states,
        ),
        metrics,
        read_samples(folder),
        read_frozen(folder),
        read_activations(folder),
    )


def read_struck(folder: Path) -> tuple[Struck, ...]:
    """Faults that happened, in the order of the script.

    Raises EvidenceError for a file that does not say which fault happened when, StoreError for a
    newer one.
    """
    return tuple(_struck(index, path) for index, path in struck_files(folder).items())


def _struck(index: int, path: Path) -> Struck:
    value = read_fault(path)
    missing = [key for key in REQUIRED if value.get(key) is None]
    if missing:
        fail(str(path), f"lacks {', '.join(missing)}; run the job again")
    if value["index"] != index:
        fail(str(path), f"index is {value['index']}, which is not the file's name")
    return Struck(
        index=value["index"],
        kind=value["kind"],
        step=value["step"],
        at=float(value["at"]),
        number=value.get("pass"),
        torn=bool(value.get("torn")),
        rank=value.get("rank"),
        node=value.get("node"),
        curve_step=value.get("curve_step"),
    )


T = TypeVar("T")
Sample = TypeVar("Sample", TensorSample, ReplicaSample, DropoutMasks, ObjectiveTerms)


class _Part(NamedTuple):
    """The part of the final state that a pass contributed."""

    of_pass: PassEvidence
    kept: Flags
    """Shape (steps of the pass,)."""

    @property
    def steps(self) -> Integers:
        return self.of_pass.itself.steps[self.kept]

    @property
    def owned(self) -> frozenset[int]:
        """Its steps, with 0 if it started from the seed checkpoint."""
        first = {0} if not self.of_pass.itself.loaded_step else set()
        return frozenset(first | set(self.steps.tolist()))


def merge(passes: Sequence[PassEvidence], last_step: int | None, **more: Any) -> Evidence:
    """Merge the evidence of a run's passes, at least one, in the order of their starts.

    ``last_step`` is the job's: the run is complete when its last pass was meant to end there, and
    did. A pass that made no step discards none. ``more`` are further fields of ``Evidence``.
    """
    parts = _parts(passes)
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps)

    def in_order(values: Callable[[PassEvidence], Iterable[T]]) -> tuple[T, ...]:
        found = [
            value
            for part in parts
            for value, keep in zip(values(part.of_pass), part.kept.tolist(), strict=True)
            if keep
        ]
        return tuple(found[place] for place in order.tolist())

    def drawn(values: Callable[[PassEvidence], tuple[T, ...]]) -> tuple[T | None, ...]:
        def or_nothing(one: PassEvidence) -> tuple[T | None, ...]:
            return values(one) or (None,) * one.itself.steps.size

        return in_order(or_nothing) if any(map(values, passes)) else ()

    def drawn_globally(library: str) -> tuple[str | None, ...]:
        return drawn(lambda one: one.metrics.global_random_states.get(library, ()))

    libraries = dict.fromkeys(name for one in passes for name in one.metrics.global_random_states)

    signals = {signal: None for one in passes for signal in one.itself.signals}
    missing = [
        (step, name)
        for part in parts
        for step, name in part.of_pass.metrics.grads_missing
        if step in part.owned
    ]
    end = passes[-1].metrics.end
    return Evidence(
        steps=steps[order],
        signals={signal: _column(signal, parts, order) for signal in signals},
        batch_digests=in_order(lambda one: one.metrics.batch_digests),
        batch_agrees=in_order(lambda one: one.metrics.batch_agrees),
        random_states=drawn(lambda one: one.metrics.random_states),
        random_shared=drawn(lambda one: one.metrics.random_shared),
        global_random_states={library: drawn_globally(library) for library in libraries},
        masks=_latest((part, part.of_pass.metrics.masks) for part in parts),
        terms=_latest((part, part.of_pass.metrics.terms) for part in parts),
        in_force=next((one.itself.in_force for one in passes if one.itself.in_force), None),
        complete=end is not None and end == last_step,
        expected_steps=last_step,
        grads_missing=tuple(dict.fromkeys(name for _, name in missing)),
        grads_missing_at=frozenset(missing),
        samples=_latest((part, part.of_pass.samples) for part in parts),
        replicas=_latest((part, part.of_pass.metrics.replicas) for part in parts),
        # Every start from the initial weights makes them again; the last one counts.
        frozen=next((one.frozen for one in reversed(passes) if one.frozen), None),
        activations=next((one.activations for one in reversed(passes) if one.activations), None),
        problems=tuple(dict.fromkeys(sentence for part in parts for sentence in _problems(part))),
        replayed=_replayed(passes),
        uncounted=frozenset(
            (step, name)
            for part in parts
            for step, name in part.of_pass.metrics.uncounted
            if step in part.owned
        ),
        replay_conflicts=tuple(each for one in passes for each in _twice(one)),
        passes=tuple(one.itself for one in passes),
        **more,
    )


def _parts(passes: Sequence[PassEvidence]) -> list[_Part]:
    """The passes, each with its steps that no later one discarded or trained again."""
    parts = []
    for index, one in enumerate(passes):
        steps = one.itself.steps
        kept = np.ones(steps.size, dtype=np.bool_)
        for later in (other.itself for other in passes[index + 1 :]):
            if later.steps.size:
                start = int(later.steps[0]) - 1 if later.loaded_step is None else later.loaded_step
                kept &= (steps <= start) & ~np.isin(steps, later.steps)
        parts.append(_Part(one, kept))
    return parts


def _column(signal: str, parts: Sequence[_Part], order: Integers) -> Column:
    """A signal at the kept steps, with missing values where a pass does not have it."""
    values: list[Floats] = []
    present: list[Flags] = []
    for part in parts:
        column = part.of_pass.itself.signals.get(signal)
        if column is None:
            values.append(np.full(part.steps.size, np.nan))
            present.append(np.zeros(part.steps.size, dtype=np.bool_))
        else:
            values.append(column.values[part.kept])
            present.append(column.present[part.kept])
    return Column(np.concatenate(values)[order], np.concatenate(present)[order])


def _latest(taken: Iterable[tuple[_Part, Sequence[Sample]]]) -> tuple[Sample, ...]:
    """The samples of the steps that belong to each pass, in order."""
    found: dict[int, Sample] = {}
    for part, samples in taken:
        found |= {sample.step: sample for sample in samples if sample.step in part.owned}
    return tuple(found[step] for step in sorted(found))


def _problems(part: _Part) -> Iterator[str]:
    """What the probe could not measure in the kept steps, and problems of the pass."""
    number = part.of_pass.itself.number
    yield from (f"pass {number}: {sentence}" for sentence in part.of_pass.metrics.values.problems)
    for step, sentence in part.of_pass.metrics.problems:
        if step in part.owned:
            yield f"step {step}: {sentence}"


def _replayed(passes: Sequence[PassEvidence]) -> tuple[int, ...]:
    """Clauses on steps that several passes trained."""
    steps, counts = np.unique(
        np.concatenate([one.itself.steps for one in passes]), return_counts=True
    )
    return tuple(steps[counts > 1].tolist())


def _twice(one: PassEvidence) -> Iterator[ReplayConflict]:
    """Steps that one pass has twice, which no restart explains."""
    for step in one.metrics.values.replayed:
        values = one.metrics.values.differences.get(step, ("with equal values",))
        yield ReplayConflict(step, ", and ".join(values), within=one.itself.number)
