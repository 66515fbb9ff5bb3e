"""Lines of ``metrics.jsonl`` on whether the copies of tensors agreed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.model import Disagreement, ReplicaSample
from harness.readers.lines import Place, fail, step_number
from harness.run_folder.shapes import is_count, is_counts, is_texts


def read_replicas(
    place: Place, lines: Iterable[tuple[int, Mapping[str, Any]]]
) -> tuple[tuple[ReplicaSample, ...], dict[int, tuple[str, ...]]]:
    """The last sample of every step, in order, and how earlier ones of a replay differ from it.

    Raises EvidenceError naming file and line.
    """
    samples: dict[int, ReplicaSample] = {}
    differences: dict[int, tuple[str, ...]] = {}
    for line, value in lines:
        sample = _sample(place(line), step_number(place, line, value.get("step")), value)
        before = samples.get(sample.step)
        if before is not None and _found(before) != _found(sample):
            differences[sample.step] = (
                f"tensors whose copies disagree {_words(before)}, then {_words(sample)}",
            )
        samples[sample.step] = sample
    return tuple(samples[step] for step in sorted(samples)), differences


def _found(sample: ReplicaSample) -> tuple[int, tuple[Disagreement, ...]]:
    return sample.count, sample.disagreements


def _words(sample: ReplicaSample) -> str:
    first = f" (first: {sample.disagreements[0].tensor})" if sample.disagreements else ""
    return f"{sample.count}{first}"


def _sample(where: str, step: int, value: Mapping[str, Any]) -> ReplicaSample:
    compared, count = value.get("compared"), value.get("count")
    if not is_counts(compared):
        fail(where, f"compared is {compared!r}, which is no JSON object of counts")
    if not is_count(count):
        fail(where, f"count is {count!r}, which is no count")
    listed = value.get("disagreements")
    if not isinstance(listed, list):
        fail(where, f"disagreements is {listed!r}, which is no list")
    if len(listed) > count or (count and not listed):
        fail(where, f"count is {count}, but {len(listed)} disagreements are listed")
    return ReplicaSample(
        step, compared, tuple(_disagreement(where, entry) for entry in listed), count
    )


def _disagreement(where: str, entry: object) -> Disagreement:
    fields = entry if isinstance(entry, dict) else {}
    kind, tensor = fields.get("kind"), fields.get("tensor")
    mesh_dims, groups = fields.get("mesh_dims"), fields.get("groups")
    if (
        not (isinstance(kind, str) and isinstance(tensor, str) and is_texts(mesh_dims))
        or not isinstance(groups, list)
        or not all(isinstance(group, list) and all(map(is_count, group)) for group in groups)
    ):
        fail(
            where,
            f"a disagreement is {entry!r}, must have kind and tensor (text), mesh_dims (list of "
            "text) and groups (lists of ranks)",
        )
    return Disagreement(kind, tensor, tuple(mesh_dims), tuple(tuple(group) for group in groups))
