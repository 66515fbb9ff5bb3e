"""The operation inside a wrong module that makes its output wrong.

Two runs from the same weights and samples have recorded every operation in the first call of the
module, on every rank. A rank of the test set is compared with one of the control that got the same
tensors. From the wrong output one goes back to what made it, up to tensors that the control has as
well: another way to compute the same is not wrong, however much differs in between. So one has
the operations between right tensors and the wrong output, in both runs. Those at the end that both
have alike only pass on what is wrong. Where tensors cannot be compared, no operation is named.

A difference is relative to the norm of the control's tensor. It is more than noise from ``BEYOND``
times what the control's repeats show for that tensor, but at least the rounding of the precision
(``activations.FLOORS``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.activations import BEYOND, FLOORS
from converge_harness.model import GIVEN, ModuleCall, Operation, Precision, TensorSums

GROWS = 10.0
"""A result that is off by less than this multiple of its inputs' differences may be rounding that
the operation amplifies."""
_SHOWN = 4
"""Operations of a run that a sentence lists."""
Calls = Mapping[int, ModuleCall]
"""By rank."""


@dataclass(frozen=True, slots=True)
class OperationFinding:
    """What is known of the wrong operation."""

    sentence: str
    operation: str = ""
    """The first wrong operation of the test set (of the control, if the test set lacks it); empty
    if it is not known."""
    is_right: bool = False
    """Whether what the module returned in the rerun is right."""


class _Found(NamedTuple):
    """What one rank shows: ``place`` orders findings by how early they are."""

    place: int
    finding: OperationFinding


def wrong_operation(
    test: Calls, control: Calls, repeats: Sequence[Calls], precision: Precision
) -> OperationFinding:
    """The operation inside of the module that both runs recorded.

    Args:
        test: of the test set.
        control: of its control, or its matched control.
        repeats: of repeats of the control; none: only the rounding of the precision counts.
        precision: the coarser one of the two runs.
    """
    module = next((call.module for call in (*test.values(), *control.values())), "the module")
    for whose, calls in (("test set", test), ("control", control)):
        if all(call.problem for call in calls.values()):
            problem = next((call.problem for call in calls.values()), "no rank has recorded it")
            return unknown_operation(module, f"in the {whose}, {problem}")
    found, refused = {}, ""
    for rank, call in sorted(test.items()):
        if call.problem:
            refused = refused or f"on rank {rank}, {call.problem}"
            continue
        other, again, why = _partner(rank, control, call, repeats, precision)
        if other is None:
            refused = refused or f"on rank {rank}, {why}"
        else:
            found[rank] = _Pair(call, other, again, precision).first_wrong()
    if not found:
        return unknown_operation(module, refused)
    wrong = {rank: each for rank, each in found.items() if each is not None}
    if not wrong and refused:
        compared = ", ".join(map(str, found))
        why = f"what its first call returns is right in the rerun on the ranks {compared}"
        return unknown_operation(module, f"{why}, and {refused}")
    if not wrong:
        said = f"no operation inside {module} is wrong: in the rerun its first call returns what "
        return OperationFinding(f"{said}the control's does", is_right=True)
    rank = min(wrong, key=lambda each: (wrong[each].place, each))
    finding = wrong[rank].finding
    right = sorted(found.keys() - wrong.keys())
    if right and finding.operation:
        only = f"on rank {rank}, but not on rank {right[0]}: {finding.sentence}"
        return OperationFinding(only, finding.operation)
    return finding


def unknown_operation(module: str, why: str) -> OperationFinding:
    """That the wrong operation inside of a module is unknown; ``why`` is a clause."""
    return OperationFinding(f"the wrong operation inside {module} is unknown: {why}")


def _partner(
    rank: int, control: Calls, call: ModuleCall, repeats: Sequence[Calls], precision: Precision
) -> tuple[ModuleCall | None, Sequence[ModuleCall], str]:
    """The control's call with the same inputs, its repeats, and why there is none."""
    why = "the control has no such call"
    for other in sorted(control, key=lambda each: (each != rank, each)):
        candidate = control[other]
        if candidate.problem:
            continue
        again = [each[other] for each in repeats if other in each and not each[other].problem]
        differs = _other_inputs(call, candidate, again, precision)
        if not differs:
            return candidate, again, ""
        if why == "the control has no such call":
            why = differs
    return None, (), why


def _other_inputs(
    call: ModuleCall, control: ModuleCall, again: Sequence[ModuleCall], precision: Precision
) -> str:
    """How what the module gets differs, in a clause; empty if it does not."""
    got, expected = (_kinds(each.inputs) for each in (call, control))
    if got != expected:
        return (
            f"it gets {got}, and in the control {expected}; operations are compared where a rank "
            "of each gets the same"
        )
    limit = BEYOND * _noise(control.inputs, [each.inputs for each in again], FLOORS[precision])
    distances = list(map(_distance, call.inputs, control.inputs))
    off = [place for place, distance in enumerate(distances) if not distance <= limit]
    if not off:
        return ""
    if len(off) == len(distances):
        return f"what it gets is off by {max(distances):.2g} already, as of other samples"
    place = off[0]
    return (
        f"its input {place + 1} of {len(distances)}, {call.inputs[place].kind}, is off by "
        f"{distances[place]:.2g} already, while others agree: look at what makes it"
    )


class _Pair:
    """A rank's call of the module, and one of the control's with the same inputs."""

    def __init__(
        self,
        call: ModuleCall,
        other: ModuleCall,
        repeats: Sequence[ModuleCall],
        precision: Precision,
    ) -> None:
        self.call, self.other = call, other
        self._floor = FLOORS[precision]
        self._repeats = [each for each in repeats if _layout(each) == _layout(other)]

    def first_wrong(self) -> _Found | None:
        """The first wrong operation; None if what the module returns is right."""
        test, control = self.call.outputs, self.other.outputs
        again = [each.outputs for each in self._repeats]
        end = len(self.call.operations)
        if [each.kind for each in test] != [each.kind for each in control]:
            return _Found(end, self._not_known("it returns tensors of other shapes or types"))
        off = [
            place
            for place in range(len(control))
            if not self._agree(test[place], control, place, again)
        ]
        if not off:
            return None
        if self.call.left_out or self.other.left_out:
            why = f"it has more than {len(self.call.operations)} operations, of which no more are"
            return _Found(end, self._not_known(f"{why} recorded"))
        noise = self._noise_of_all()
        theirs, ours = _Known(self.other, noise, self._floor), _Known(self.call, {}, self._floor)
        path = _path(self.call, [test[place] for place in off], theirs.has)

        def known(tensor: TensorSums) -> bool:
            least = BEYOND * max(self._floor, noise.get(tensor.made_by, 0.0))
            return ours.has(tensor, least * _scale(tensor))

        other = _path(self.other, [control[place] for place in off], known)
        by = max(_distance(test[place], control[place]) for place in off)
        made = [each[place].made_by for each in (test, control) for place in off[:1]]
        return self._between(path, other, made, by)

    def _between(self, way: _Path, control_way: _Path, made: list[int], by: float) -> _Found:
        """What the operations on the two ways from right tensors to the wrong output show.

        ``made`` is what made the first wrong output, in the test set and in the control.
        """
        path, other = way.operations, control_way.operations
        ours, theirs = self.call.operations, self.other.operations
        if path and (twin := self._twin(ours[path[0]], ours, theirs)) is not None:
            return self._same_operation(path[0], twin)
        if other and (twin := self._twin(theirs[other[0]], theirs, ours)) is not None:
            return self._same_operation(twin, other[0])
        if path and _keys(ours[each] for each in path) == _keys(theirs[each] for each in other):
            return self._same_operation(path[0], other[0])  # no rewrite: it gets something else
        if why := way.unseen or control_way.unseen:
            return _Found(len(ours), self._not_known(why))
        # An operation may return what it got (times a weight of ones) and so leave no way.
        if not path and made[0] >= 0 and not self._has(theirs, ours[made[0]]):
            path = made[:1]
        if not other and made[1] >= 0 and not self._has(ours, theirs[made[1]]):
            other = made[1:]
        return self._parted(path, other, by)

    def _parted(self, path: list[int], other: list[int], by: float) -> _Found:
        """What the operations on the two ways are, as far as they differ."""
        test = [self.call.operations[each] for each in path]
        control = [self.other.operations[each] for each in other]
        while test and control and _key(test[-1]) == _key(control[-1]):
            test.pop()
            control.pop()
        if not test and not control:
            why = "every tensor that it computes is right, but it returns others of them"
            return _Found(len(self.call.operations), self._not_known(why))
        if not test:
            what = f"the test set lacks {_listed(control)}"
        elif not control:
            what = f"the test set runs {_listed(test)} in addition"
        else:
            what = f"the test set runs {_listed(test)} where the control runs {_listed(control)}"
        place = path[0] if test else len(self.call.operations)
        makers = [each.made_by for each in (*test, *control)[0].inputs if each.made_by >= 0]
        call = self.call if test else self.other
        after = f"after {_named(call, max(makers))}, which agrees" if makers else "at its begin"
        sentence = f"{self._inside} {after}, {what}; what the module returns is off by {by:.2g}"
        return _Found(place, OperationFinding(sentence, (*test, *control)[0].name))

    def _twin(
        self, operation: Operation, own: Sequence[Operation], others: Sequence[Operation]
    ) -> int | None:
        """The other run's operation of the same name with the same inputs.

        Not if it is that of another operation of this run, which has its result as well.
        """
        for place, each in enumerate(others):
            if self._alike(operation, each) and not self._has(own, each):
                return place
        return None

    def _has(self, operations: Sequence[Operation], wanted: Operation) -> bool:
        """Whether one of them has its name, its inputs and its results."""
        limit = BEYOND * self._floor
        return any(
            self._alike(each, wanted) and _worst(each.outputs, wanted.outputs) <= limit
            for each in operations
        )

    def _alike(self, one: Operation, other: Operation) -> bool:
        """Whether they have one name, and got the same."""
        limit = BEYOND * self._floor
        return _key(one) == _key(other) and _worst(one.inputs, other.inputs) <= limit

    def _same_operation(self, place: int, of: int) -> _Found:
        """The first operation on both ways, of the same name: its inputs or itself are wrong."""
        test, control = self.call.operations[place], self.other.operations[of]
        named = _named(self.call, place)
        if [each.kind for each in test.inputs] != [each.kind for each in control.inputs]:
            got, expected = (_kinds(each.inputs) for each in (test, control))
            sentence = f"{self._inside} {named} gets {got}, in the control {expected}"
            return _Found(place, OperationFinding(sentence, test.name))
        again = [each.operations[of].inputs for each in self._repeats]
        wrong = [
            number
            for number, tensor in enumerate(test.inputs)
            if not self._agree(tensor, control.inputs, number, again)
        ]
        if wrong:
            return self._wrong_input(place, of, wrong[0])
        if any(not each.sums for each in (*test.inputs, *test.outputs)):
            why = f"{named} has tensors of a kind that cannot be compared"
            return _Found(place, self._not_known(why))
        repeated = [each.operations[of].outputs for each in self._repeats]
        noise = _noise(control.outputs, repeated, self._floor)
        off, inputs = _worst(test.outputs, control.outputs), _worst(test.inputs, control.inputs)
        if off <= GROWS * inputs:
            grown = f"{named} is off by {off:.2g}, and what it gets by {inputs:.2g}, as of rounding"
            return _Found(place, self._not_known(grown))
        sentence = (
            f"{self._inside} {named} {_by(off, noise)} while its inputs agree"
            f"{_other_settings(test, control)}"
        )
        return _Found(place, OperationFinding(sentence, test.name))

    def _wrong_input(self, place: int, of: int, number: int) -> _Found:
        test, control = self.call.operations[place], self.other.operations[of]
        off = _distance(test.inputs[number], control.inputs[number])
        source = _source(test.inputs[number].made_by, self.call)
        other = _source(control.inputs[number].made_by, self.other)
        sentence = (
            f"{self._inside} input {number + 1} of {_named(self.call, place)} is off by {off:.2g}: "
            f"it is {source}" + (f", and in the control {other}" if other != source else "")
        )
        return _Found(place, OperationFinding(sentence, test.name))

    def _agree(
        self,
        test: TensorSums,
        control: Sequence[TensorSums],
        place: int,
        again: Sequence[Sequence[TensorSums]],
    ) -> bool:
        noise = _noise([control[place]], [[each[place]] for each in again], self._floor)
        return _distance(test, control[place]) <= BEYOND * noise

    def _noise_of_all(self) -> dict[int, float]:
        """By operation of the control."""
        return {
            place: _noise(
                each.outputs,
                [repeat.operations[place].outputs for repeat in self._repeats],
                self._floor,
            )
            for place, each in enumerate(self.other.operations)
        }

    @property
    def _inside(self) -> str:
        return f"inside {self.call.module},"

    def _not_known(self, why: str) -> OperationFinding:
        return unknown_operation(self.call.module, why)


class _Known:
    """All tensors of a call, to ask whether it has one that equals another."""

    def __init__(self, call: ModuleCall, noise: Mapping[int, float], floor: float) -> None:
        tensors: list[tuple[TensorSums, float]] = []
        for place, each in enumerate(call.operations):
            limit = BEYOND * max(floor, noise.get(place, 0.0))
            tensors += [(tensor, limit) for tensor in each.outputs]
            tensors += [(tensor, BEYOND * floor) for tensor in each.inputs if tensor.made_by < 0]
        tensors += [(tensor, BEYOND * floor) for tensor in call.inputs]
        by_kind: dict[tuple[str, int], list[tuple[TensorSums, float]]] = {}
        for tensor, limit in tensors:
            if tensor.sums:
                by_kind.setdefault((tensor.kind, tensor.not_finite), []).append((tensor, limit))
        self._tables = {
            kind: (
                np.array([tensor.sums for tensor, _ in some]),
                np.array([_scale(tensor) * limit for tensor, limit in some]),
            )
            for kind, some in by_kind.items()
        }

    def has(self, tensor: TensorSums, least: float = 0.0) -> bool:
        """Whether one equals it within noise; so does a tensor that cannot be compared.

        ``least`` is a distance of their sums that is noise in any case.
        """
        if not tensor.sums:
            return True
        table = self._tables.get((tensor.kind, tensor.not_finite))
        if table is None:
            return False
        sums, limits = table
        distances = np.linalg.norm(sums - np.array(tensor.sums), axis=1)
        return bool((distances <= np.maximum(limits, least)).any())


class _Path(NamedTuple):
    """Operations between right tensors and wrong ones."""

    operations: list[int]
    """In order."""
    unseen: str
    """Why a wrong tensor on the way has no operation that made it, in a clause; else empty."""


def _path(
    call: ModuleCall, wrong: Iterable[TensorSums], is_right: Callable[[TensorSums], bool]
) -> _Path:
    """From wrong tensors back to right ones."""
    found: set[int] = set()
    todo, unseen = list(wrong), ""
    while todo:
        tensor = todo.pop()
        if is_right(tensor):
            continue
        if tensor.made_by < 0:
            unseen = "a part of it is computed where no operation is seen, as in compiled code"
            continue
        maker = call.operations[tensor.made_by]
        if all(each.sums != tensor.sums for each in maker.outputs):
            unseen = "one of its tensors is changed in place through another view of it"
        elif tensor.made_by not in found:
            found.add(tensor.made_by)
            todo += maker.inputs
    return _Path(sorted(found), unseen)


def _key(operation: Operation) -> tuple[str, ...]:
    """Operations are the same if they have one name, and results of one kind."""
    return (operation.name, *(tensor.kind for tensor in operation.outputs))


def _keys(operations: Iterable[Operation]) -> list[tuple[str, ...]]:
    return list(map(_key, operations))


def _layout(call: ModuleCall) -> tuple[list[tuple[tuple[str, ...], int]], int]:
    """What two calls have alike if their tensors can be compared place by place."""
    operations = [(_key(each), len(each.inputs)) for each in call.operations]
    return operations, len(call.outputs)


def _noise(
    control: Sequence[TensorSums], again: Sequence[Sequence[TensorSums]], floor: float
) -> float:
    """The largest finite difference of repeats' tensors from the control's, at least ``floor``."""
    learnt = (_worst(each, control) for each in again)
    return max(floor, *(each for each in learnt if math.isfinite(each)), 0.0)


def _named(call: ModuleCall, place: int) -> str:
    operation = call.operations[place]
    where = f" in {operation.module}" if operation.module else ""
    return f"{operation.name} (operation {place + 1} of {len(call.operations)}{where})"


def _kinds(tensors: Iterable[TensorSums]) -> str:
    return " ".join(each.kind for each in tensors) or "no tensors"


def _source(maker: int, call: ModuleCall) -> str:
    """Where a tensor comes from, in words."""
    if maker >= 0:
        return f"the result of {call.operations[maker].name} (operation {maker + 1})"
    if maker == GIVEN:
        return "what the module was called with"
    return "made by nothing that could be seen: a weight, a constant, or what compiled code makes"


def _worst(test: Sequence[TensorSums], control: Sequence[TensorSums]) -> float:
    """The largest difference; infinite if there are other tensors."""
    if [each.kind for each in test] != [each.kind for each in control]:
        return math.inf
    return max(map(_distance, test, control), default=0.0)


def _distance(test: TensorSums, control: TensorSums) -> float:
    """Norm of the difference over the control's norm, as far as signed sums tell.

    Tensors that could not be read count as equal: what uses them shows whether they are.
    """
    if test.kind != control.kind or test.not_finite != control.not_finite:
        return math.inf
    if not test.sums or len(test.sums) != len(control.sums):
        return 0.0
    off, scale = math.dist(test.sums, control.sums), _scale(control)
    return off / scale if scale else (math.inf if off else 0.0)


def _scale(tensor: TensorSums) -> float:
    """Of the sums: so that a multiple shows as what it is, unless they happen to be small."""
    return max(math.hypot(*tensor.sums), tensor.norm * math.sqrt(len(tensor.sums)) / 2)


def _by(off: float, noise: float) -> str:
    if not math.isfinite(off):
        return "has other entries that are not finite, or is not zero where the control's is,"
    return f"is off by {off:.2g} (rounding: {noise:.1g})"


def _other_settings(test: Operation, control: Operation) -> str:
    """A clause on arguments that are no tensors, if they differ."""
    if test.settings == control.settings:
        return ""
    if len(test.settings) != len(control.settings):
        got, expected = (", ".join(each.settings) or "nothing" for each in (test, control))
        return f"; besides tensors it gets {got}, in the control {expected}"
    changed = list(_changed(test.settings, control.settings))
    return "; it gets " + ", ".join(f"{new} (control: {old})" for new, old in changed)


def _changed(test: Sequence[str], control: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((new, old) for new, old in zip(test, control, strict=True) if new != old)


def _listed(operations: Sequence[Operation]) -> str:
    """``aten.sqrt.default, aten.add.Tensor and 3 more``, with the data type of their results."""
    shown = [
        f"{each.name} ({each.outputs[0].kind.partition('[')[0]})" if each.outputs else each.name
        for each in operations[:_SHOWN]
    ]
    more = len(operations) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
