"""``metrics.jsonl`` of a run folder: what the run reported step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from converge_harness.model import (
    Column,
    Disagreement,
    DropoutMasks,
    ObjectiveTerm,
    ObjectiveTerms,
    ReplicaSample,
)
from converge_harness.readers.lines import (
    Place,
    fail,
    json_objects,
    line_of,
    number_at,
    numbers,
    read_text,
    step_number,
    step_numbers,
)
from converge_harness.readers.points import LastValues, Points, last_values
from converge_harness.run_folder import metrics as contract
from converge_harness.run_folder.layout import METRICS, METRICS_FILES, METRICS_PART
from converge_harness.run_folder.metrics import (
    BATCH_AGREES,
    BATCH_DIGEST,
    END,
    GLOBAL_STATES,
    HEADER,
    HEADER_SHAPES,
    KINDS,
    LOADED,
    MASKS,
    MISSING_NAMES,
    PROBLEMS,
    RANDOM_SHARED,
    RANDOM_STATE,
    REPLICAS,
    SIGNALS,
    STEP,
    TERMS,
    UNCOUNTED,
    EndDocument,
    HeaderDocument,
    LoadedDocument,
)
from converge_harness.run_folder.shapes import is_texts, misfit
from converge_harness.store import upgraded

_Line = tuple[int, dict[str, Any]]
"""A line number and the line's object."""
_Lines = Sequence[_Line]


class Loaded(NamedTuple):
    """What a pass reported after loading a checkpoint."""

    step: int | None
    """None: neither one of the run's checkpoints nor the job's seed checkpoint."""
    at: float | None
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """The content of a metrics file, with every step once."""

    identity: str | None
    values: LastValues
    batch_digests: tuple[str | None, ...]
    batch_agrees: tuple[bool | None, ...]
    grads_missing: tuple[tuple[int, str], ...]
    """Parameters without a gradient, each with its step."""
    replicas: tuple[ReplicaSample, ...]
    problems: tuple[tuple[int, str], ...]
    """By step, sentences on what the probe could not measure."""
    end: int | None
    """The step in the end line; None if the run did not get there."""
    expected_steps: int | None
    uncounted: frozenset[tuple[int, str]] = frozenset()
    random_states: tuple[str | None, ...] = ()
    random_shared: tuple[bool | None, ...] = ()
    global_random_states: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    masks: tuple[DropoutMasks, ...] = ()
    terms: tuple[ObjectiveTerms, ...] = ()
    """As in ``Evidence``."""
    number: int | None = None
    """For a pass, as are the following fields."""
    segment: int | None = None
    world_size: int | None = None
    loaded: Loaded | None = None

    def names_missing(self) -> tuple[str, ...]:
        """Parameters that had no gradient at some step."""
        return tuple(dict.fromkeys(name for _, name in self.grads_missing))

    def sentences(self) -> tuple[str, ...]:
        """The problems, each with its step."""
        sentences = (f"step {step}: {sentence}" for step, sentence in self.problems)
        return tuple(dict.fromkeys(sentences))


def read_metrics(folder: Path) -> Metrics:
    """Read the metrics file of a folder: the finished one if both exist, empty if none does.

    Raises EvidenceError naming file and line, StoreError for a newer file.
    """
    path = next((folder / name for name in METRICS_FILES if (folder / name).is_file()), None)
    if path is None:
        return Metrics(None, last_values({}), (), (), (), (), (), end=None, expected_steps=None)
    text = read_text(path)
    if path.name == METRICS_PART:
        # A killed writer may leave half a line, which does not count.
        text = text[: text.rfind("\n") + 1]
    place = line_of(path)
    header, lines = _by_kind(path, text)
    steps = lines[STEP]
    values, digests, agrees = _last_values(place, steps)
    random_states, random_shared = _random(place, steps, values.steps.tolist())
    samples, differences = replica_samples(place, lines[REPLICAS])
    expected = header.get("steps")
    return Metrics(
        identity=header.get("identity"),
        values=replace(values, differences=_both(values.differences, differences)),
        batch_digests=digests,
        batch_agrees=agrees,
        random_states=random_states,
        random_shared=random_shared,
        global_random_states=_global_states(place, steps, values.steps.tolist()),
        masks=_masks(place, steps),
        terms=_terms(place, steps),
        grads_missing=_texts(place, steps, MISSING_NAMES),
        replicas=samples,
        problems=_texts(place, steps, PROBLEMS),
        uncounted=_uncounted(place, steps),
        end=_end(place, lines[END]),
        expected_steps=None if expected is None else step_number(place, 1, expected),
        number=header.get("pass"),
        segment=header.get("segment"),
        world_size=header.get("world_size"),
        loaded=_loaded(place, lines[LOADED]),
    )


def _by_kind(path: Path, text: str) -> tuple[HeaderDocument, dict[str, list[_Line]]]:
    """The header, without any key if the file is empty, and the lines by kind.

    At most one of them is an end line.
    """
    place = line_of(path)
    header: dict[str, Any] = {}
    lines: dict[str, list[_Line]] = {kind: [] for kind in KINDS}
    for line, value in json_objects(path, text):
        kind = value.get("kind")
        if not header:
            if kind != HEADER:
                fail(place(line), f"kind is {kind!r}, but the first line must be the header")
            schema = value.get("schema")
            header = upgraded(path, METRICS, value)
            if found := misfit(header, HEADER_SHAPES):
                fail(place(line), found)
        elif lines[END]:
            fail(place(line), "a line after the end line")
        elif not isinstance(kind, str) or kind not in lines:
            kinds = ", ".join(map(repr, KINDS[:-1]))
            fail(place(line), f"kind is {kind!r}, must be {kinds} or {KINDS[-1]!r}")
        else:
            later = upgraded(path, METRICS, {**value, "schema": schema})
            del later["schema"]
            lines[kind].append((line, later))
    return cast("HeaderDocument", header), lines


def _end(place: Place, lines: _Lines) -> int | None:
    """The step that the end line names; None without one."""
    ends = ((line, cast("EndDocument", value)) for line, value in lines)
    return next((step_number(place, line, end.get("steps")) for line, end in ends), None)


def _loaded(place: Place, lines: _Lines) -> Loaded | None:
    """What a pass loaded; None if it did not report it, or died before."""
    if len(lines) > 1:
        fail(place(lines[1][0]), "a second line of kind 'loaded', but a pass loads once")
    for line, value in lines:
        loaded = cast("LoadedDocument", value)
        at = number_at(place, line, "at", loaded.get("at"))
        if "step" in loaded and loaded["step"] is None:
            return Loaded(None, at)
        return Loaded(step_number(place, line, loaded.get("step")), at)
    return None


def _last_values(
    place: Place, lines: _Lines
) -> tuple[LastValues, tuple[str | None, ...], tuple[bool | None, ...]]:
    """Signals, batch digests and their agreement, with every step once."""
    rows = [line for line, _ in lines]
    steps = step_numbers(place, rows, [value.get("step") for _, value in lines])
    columns = {
        name: numbers(place, rows, name, [value.get(name) for _, value in lines])
        for name in SIGNALS
    }
    columns = {name: column for name, column in columns.items() if column.present.any()}
    digests, names = _digest_codes(place, lines)
    columns |= {BATCH_DIGEST: digests, BATCH_AGREES: _flags(place, lines)}
    values = last_values(
        {name: Points(steps, column) for name, column in columns.items()},
        spell={
            BATCH_DIGEST: lambda code: names[int(code)],
            BATCH_AGREES: lambda flag: str(bool(flag)),
        },
    )
    signals = dict(values.signals)
    codes, flags = signals.pop(BATCH_DIGEST), signals.pop(BATCH_AGREES)
    return (
        replace(values, signals=signals),
        tuple(None if code is None else names[int(code)] for code in codes),
        tuple(None if flag is None else bool(flag) for flag in flags),
    )


def _digest_codes(place: Place, lines: _Lines) -> tuple[Column, list[str]]:
    """Digests as numbers, which have a last value like signals, and the digest of each number."""
    codes: dict[str, int] = {}
    column: list[float | None] = []
    for line, values in lines:
        value = values.get(BATCH_DIGEST)
        if not (value is None or isinstance(value, str)):
            fail(place(line), f"{BATCH_DIGEST} is {value!r}, which is not a string")
        column.append(None if value is None else codes.setdefault(value, len(codes)))
    return Column.of(column), list(codes)


def _random(
    place: Place, lines: _Lines, steps: Iterable[int]
) -> tuple[tuple[str | None, ...], tuple[bool | None, ...]]:
    """What each step drew from, and whether ranks drew the same; of a step's lines the last counts.

    Both are empty for runs of older versions, which did not record it.
    """
    states: dict[int, str | None] = {}
    shared: dict[int, bool | None] = {}
    for line, values in lines:
        if RANDOM_STATE not in values:
            continue
        state, alike = values[RANDOM_STATE], values.get(RANDOM_SHARED)
        if not isinstance(state, str):
            fail(place(line), f"{RANDOM_STATE} is {state!r}, which is not a string")
        if not (alike is None or isinstance(alike, bool)):
            fail(place(line), f"{RANDOM_SHARED} is {alike!r}, must be true, false or null")
        step = step_number(place, line, values.get("step"))
        states[step], shared[step] = state, alike
    if not states:
        return (), ()
    ordered = list(steps)
    return tuple(map(states.get, ordered)), tuple(map(shared.get, ordered))


def _global_states(
    place: Place, lines: _Lines, steps: Sequence[int]
) -> dict[str, tuple[str | None, ...]]:
    """By library, what each step drew from its global generator; of a step's lines the last counts.

    Empty for runs of older versions.
    """
    found: dict[str, tuple[str | None, ...]] = {}
    for library, key in GLOBAL_STATES.items():
        states: dict[int, str] = {}
        for line, values in lines:
            if key not in values:
                continue
            if not isinstance(values[key], str):
                fail(place(line), f"{key} is {values[key]!r}, which is not a string")
            states[step_number(place, line, values.get("step"))] = values[key]
        if states:
            found[library] = tuple(map(states.get, steps))
    return found


def _masks(place: Place, lines: _Lines) -> tuple[DropoutMasks, ...]:
    """The masks of every step that has some."""

    def masks(step: int, table: Mapping[str, Any]) -> DropoutMasks:
        document = contract.read_masks(table)
        return DropoutMasks(
            step,
            units=tuple(document["units"]),
            kept=tuple(document["kept"]),
            sums=tuple(document["sums"]),
            shared=document["shared"],
        )

    return _tables(place, lines, MASKS, masks)


def _terms(place: Place, lines: _Lines) -> tuple[ObjectiveTerms, ...]:
    """What the objective is made of, of every step in which the program showed it."""

    def terms(step: int, table: Mapping[str, Any]) -> ObjectiveTerms:
        document = contract.read_terms(table)
        return ObjectiveTerms(
            step,
            tokens=document["tokens"],
            targets=document["targets"],
            samples=document["samples"],
            microbatches=document["microbatches"],
            weight=document["weight"],
            uneven=document["uneven"],
            terms={name: ObjectiveTerm(**term) for name, term in document["sums"].items()},
        )

    return _tables(place, lines, TERMS, terms)


T = TypeVar("T")


def _tables(
    place: Place, lines: _Lines, key: str, read: Callable[[int, Mapping[str, Any]], T]
) -> tuple[T, ...]:
    """What steps have under a key, in order; of a step's lines the last counts.

    ``read`` gets the step and its table, and raises ValueError for a damaged one.
    """
    found: dict[int, T] = {}
    for line, values in lines:
        table = values.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            fail(place(line), f"{key} is {table!r}, which is not a table")
        step = step_number(place, line, values.get("step"))
        try:
            found[step] = read(step, table)
        except ValueError as error:
            fail(place(line), f"{key}: {error}")
    return tuple(found[step] for step in sorted(found))


def _flags(place: Place, lines: _Lines) -> Column:
    column: list[float | None] = []
    for line, values in lines:
        value = values.get(BATCH_AGREES)
        if not (value is None or isinstance(value, bool)):
            fail(place(line), f"{BATCH_AGREES} is {value!r}, must be true, false or null")
        column.append(value)
    return Column.of(column)


def _texts(place: Place, lines: _Lines, name: str) -> tuple[tuple[int, str], ...]:
    """The strings that step lines list under a name, each with its step."""
    found: list[tuple[int, str]] = []
    for line, values in lines:
        listed = values.get(name)
        if listed is None:
            continue
        if not is_texts(listed):
            fail(place(line), f"{name} is {listed!r}, which is not a list of strings")
        step = step_number(place, line, values.get("step"))
        found += [(step, text) for text in listed]
    return tuple(found)


def _uncounted(place: Place, lines: _Lines) -> frozenset[tuple[int, str]]:
    """Step and parameter of each gradient that could not be counted."""
    _texts(place, lines, UNCOUNTED)  # checks them
    return frozenset(
        (step_number(place, line, values.get("step")), name)
        for line, values in lines
        for name in contract.uncounted(values)
    )


def _both(
    some: Mapping[int, tuple[str, ...]], others: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    return {
        step: (*some.get(step, ()), *others.get(step, ())) for step in some.keys() | others.keys()
    }


def replica_samples(
    place: Place, lines: Iterable[tuple[int, Mapping[str, Any]]]
) -> tuple[tuple[ReplicaSample, ...], dict[int, tuple[str, ...]]]:
    """The last sample of every step, in order, and how earlier ones differ from it.

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
    try:
        found = contract.read_replicas(value)
    except ValueError as error:
        fail(where, str(error))
    listed = tuple(
        Disagreement(
            each["kind"],
            each["tensor"],
            tuple(each["mesh_dims"]),
            tuple(map(tuple, each["groups"])),
        )
        for each in found["disagreements"]
    )
    return ReplicaSample(step, found["compared"], listed, found["count"])
