"""The operation inside a wrong module: the first whose result is off while what it gets is right.

Two runs from the same weights and samples have recorded every operation in the first call of the
module, on every rank. Where a rank of each holds tensors of one shape, and got the same ones, their
operations are aligned by name and shape. Whatever cannot be compared is not told.

- An operation of both whose result is off while its inputs agree is the wrong one.
- Operations that only one run has matter if what they compute is off, where it is used next or
  returned. If it agrees, they are another way to compute the same.
- Else it is an input that no operation of the module makes: a weight, or what compiled code makes.

A difference is relative to the norm of the control's tensor. It is more than noise from ``BEYOND``
times what the control's repeats show for that operation, but at least the rounding of the precision
(``activations.FLOORS``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

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
class OperationTold:
    """What is known of the wrong operation."""

    sentence: str
    operation: str = ""
    """The first wrong operation of the test set (of the control, if the test set lacks it); empty
    if it is not told."""


class _Found(NamedTuple):
    """What one rank shows: ``place`` orders findings by how early they are."""

    place: int
    told: OperationTold


def wrong_operation(
    test: Calls, control: Calls, repeats: Sequence[Calls], precision: Precision
) -> OperationTold:
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
            return _not_told(module, f"in the {whose}, {problem}")
    found, refused = {}, ""
    for rank, call in sorted(test.items()):
        if call.problem:
            continue
        pair = _Pair(call, *_partner(rank, control, call, repeats, precision), precision)
        if pair.other is None:
            refused = refused or f"on rank {rank}, {pair.why}"
        else:
            found[rank] = pair.first_wrong()
    if not found:
        return _not_told(module, refused)
    wrong = {rank: each for rank, each in found.items() if each is not None}
    if not wrong:
        first = test[min(found)]
        so = f"all {len(first.operations)} operations of its first call agree"
        if first.left_out:
            so = f"the first {len(first.operations)} operations of its first call agree"
        return _not_told(module, so)
    rank = min(wrong, key=lambda each: (wrong[each].place, each))
    told = wrong[rank].told
    right = sorted(found.keys() - wrong.keys())
    if right and told.operation:
        only = f"on rank {rank}, but not on rank {right[0]}: {told.sentence}"
        return OperationTold(only, told.operation)
    return told


def _not_told(module: str, why: str) -> OperationTold:
    return OperationTold(f"which operation inside {module} is wrong cannot be told: {why}")


def _partner(
    rank: int, control: Calls, call: ModuleCall, repeats: Sequence[Calls], precision: Precision
) -> tuple[ModuleCall | None, Sequence[ModuleCall], str]:
    """The control's call with the same inputs, its repeats, and why there is none."""
    why = "the control has no such call"
    for other in sorted(control, key=lambda each: (each != rank, each)):
        its = control[other]
        if its.problem:
            continue
        again = [each[other] for each in repeats if other in each and not each[other].problem]
        differs = _other_inputs(call, its, again, precision)
        if not differs:
            return its, again, ""
        if why == "the control has no such call":
            why = differs
    return None, (), why


def _other_inputs(
    call: ModuleCall, its: ModuleCall, again: Sequence[ModuleCall], precision: Precision
) -> str:
    """How what the module gets differs, in a clause; empty if it does not."""
    mine, theirs = ([each.kind for each in tensors] for tensors in (call.inputs, its.inputs))
    if mine != theirs:
        return (
            f"it gets {' '.join(mine) or 'no tensors'}, and in the control "
            f"{' '.join(theirs) or 'no tensors'}; operations are compared where a rank of each "
            "gets the same"
        )
    noise = max((_worst(each.inputs, its.inputs) for each in again), default=0.0)
    off = _worst(call.inputs, its.inputs)
    if off <= BEYOND * max(noise, FLOORS[precision]):
        return ""
    return f"what it gets is off by {off:.2g} already, as of other samples"


class _Pair:
    """A rank's call of the module, and one of the control's with the same inputs."""

    def __init__(
        self,
        call: ModuleCall,
        other: ModuleCall | None,
        repeats: Sequence[ModuleCall],
        why: str,
        precision: Precision,
    ) -> None:
        self.call, self.other, self.why = call, other, why
        self._floor = FLOORS[precision]
        self._repeats = repeats

    def first_wrong(self) -> _Found | None:
        """The first wrong operation; None if all agree."""
        if self.other is None:
            return None
        mine, its = self.call.operations, self.other.operations
        keys, others = _keys(mine), _keys(its)
        repeats = [each for each in self._repeats if _keys(each.operations) == others]
        blocks = SequenceMatcher(None, others, keys, autojunk=False).get_opcodes()
        apart = [block for block in blocks if block[0] != "equal"]
        for kind, begin, _, start, end in blocks:
            if kind != "equal":
                continue
            for place in range(start, end):
                of = begin + place - start
                again = [each.operations[of] for each in repeats]
                if (found := self._look_at(place, its[of], again, apart)) is not None:
                    return found
        return self._result(apart, repeats)

    def _look_at(
        self, place: int, its: Operation, again: Sequence[Operation], apart: Sequence[_Block]
    ) -> _Found | None:
        """What an operation of both runs shows; None if nothing is wrong."""
        mine = self.call.operations[place]
        noise = self._noise(its.outputs, [each.outputs for each in again])
        off = _worst(mine.outputs, its.outputs)
        if off <= BEYOND * noise:
            return None
        of_inputs = self._noise(its.inputs, [each.inputs for each in again])
        inputs = _worst(mine.inputs, its.inputs)
        if inputs > BEYOND * of_inputs:
            return self._wrong_input(place, mine, its, apart)
        named = self._named(place)
        if off <= GROWS * inputs:
            grown = (
                f"{named} is off by {off:.2g}, and what it gets by {inputs:.2g}, within rounding"
            )
            return _Found(place, _not_told(self.call.module, grown))
        sentence = (
            f"{self._inside} {named} {_by(off, noise)} while its inputs agree"
            f"{_other_settings(mine, its)}"
        )
        return _Found(place, OperationTold(sentence, mine.name))

    def _wrong_input(
        self, place: int, mine: Operation, its: Operation, apart: Sequence[_Block]
    ) -> _Found:
        """An operation gets another tensor than the control's, whose own maker agrees."""
        named = self._named(place)
        kinds = [[each.kind for each in one.inputs] for one in (mine, its)]
        if kinds[0] != kinds[1]:
            got, expected = (" ".join(each) or "no tensor" for each in kinds)
            sentence = f"{self._inside} {named} gets {got}, in the control {expected}"
            return _Found(place, OperationTold(sentence, mine.name))
        worst = _furthest(mine.inputs, its.inputs)
        makers = mine.inputs[worst].made_by, its.inputs[worst].made_by
        off = _distance(mine.inputs[worst], its.inputs[worst])
        if (block := _parting(makers, apart)) is not None:
            return self._parted(block, off)
        sentence = (
            f"{self._inside} input {worst + 1} of {named} is off by {off:.2g}: it is "
            f"{_source(makers[0], self.call)}"
        )
        if self.other and (other := _source(makers[1], self.other)) != _source(
            makers[0], self.call
        ):
            sentence += f", and in the control {other}"
        return _Found(place, OperationTold(sentence, mine.name))

    def _result(self, apart: Sequence[_Block], repeats: Sequence[ModuleCall]) -> _Found | None:
        """What the module returns, if every operation of both agrees."""
        if self.other is None or len(self.call.outputs) != len(self.other.outputs):
            return None
        noise = self._noise(self.other.outputs, [each.outputs for each in repeats])
        off = _worst(self.call.outputs, self.other.outputs)
        if off <= BEYOND * noise or self.call.left_out or self.other.left_out:
            return None
        worst = _furthest(self.call.outputs, self.other.outputs)
        end = len(self.call.operations)
        makers = self.call.outputs[worst].made_by, self.other.outputs[worst].made_by
        if (block := _parting(makers, apart)) is not None:
            return self._parted(block, off)
        why = f"what it returns is off by {off:.2g}, but no operation that could be seen is"
        return _Found(end, _not_told(self.call.module, why))

    def _parted(self, block: _Block, off: float) -> _Found:
        """Operations that only one of the runs has, and that compute something else."""
        _, begin, end, start, stop = block
        its = self.other.operations[begin:end] if self.other else ()
        mine = self.call.operations[start:stop]
        after = f"after {self._named(start - 1)}, which agrees," if start else "from its begin on"
        if not mine:
            what = f"the test set lacks {_listed(its)}"
        elif not its:
            what = f"the test set runs {_listed(mine)} in addition"
        else:
            what = f"the test set runs {_listed(mine)} where the control runs {_listed(its)}"
        which = ", whichever of them it is" if len(mine) > 1 else ""
        sentence = f"{self._inside} {after} {what}; the result is off by {off:.2g}{which}"
        first = (*mine, *its)[0]
        return _Found(start, OperationTold(sentence, first.name))

    def _noise(self, its: Sequence[TensorSums], again: Sequence[Sequence[TensorSums]]) -> float:
        learnt = [_worst(each, its) for each in again]
        return max(self._floor, *(each for each in learnt if math.isfinite(each)), 0.0)

    @property
    def _inside(self) -> str:
        return f"inside {self.call.module},"

    def _named(self, place: int) -> str:
        operation = self.call.operations[place]
        of = len(self.call.operations) + self.call.left_out
        where = f" in {operation.module}" if operation.module else ""
        return f"{operation.name} (operation {place + 1} of {of}{where})"


_Block = tuple[str, int, int, int, int]
"""As of ``difflib``: what it is, then from where to where in the control and in the test set."""


def _keys(operations: Sequence[Operation]) -> list[tuple[str, ...]]:
    """Operations are the same if they have one name, and results of one kind."""
    return [(each.name, *(tensor.kind for tensor in each.outputs)) for each in operations]


def _parting(makers: tuple[int, int], apart: Sequence[_Block]) -> _Block | None:
    """The operations of one run alone that made a tensor; ``makers`` are the test set's, its."""
    mine, its = makers
    for block in apart:
        _, begin, end, start, stop = block
        if start <= mine < stop or begin <= its < end:
            return block
    return None


def _source(maker: int, call: ModuleCall) -> str:
    """Where a tensor comes from, in words."""
    if maker >= 0:
        return f"the result of {call.operations[maker].name} (operation {maker + 1})"
    if maker == GIVEN:
        return "what the module was called with"
    return "made by nothing that could be seen: a weight, a constant, or what compiled code makes"


def _furthest(mine: Sequence[TensorSums], its: Sequence[TensorSums]) -> int:
    """Index of the largest difference."""
    distances = [_distance(*pair) for pair in zip(mine, its, strict=True)]
    return distances.index(max(distances))


def _worst(mine: Sequence[TensorSums], its: Sequence[TensorSums]) -> float:
    """The largest difference; infinite if there are other tensors."""
    if [each.kind for each in mine] != [each.kind for each in its]:
        return math.inf
    return max(map(_distance, mine, its), default=0.0)


def _distance(mine: TensorSums, its: TensorSums) -> float:
    """Norm of the difference over the control's norm, as far as signed sums tell.

    Tensors that could not be read count as equal: what uses them shows whether they are.
    """
    if mine.kind != its.kind or mine.not_finite != its.not_finite:
        return math.inf
    if not mine.sums or len(mine.sums) != len(its.sums):
        return 0.0
    norm = math.dist(mine.sums, its.sums) / math.sqrt(len(its.sums))
    return norm / its.norm if its.norm else (math.inf if norm else 0.0)


def _by(off: float, noise: float) -> str:
    if not math.isfinite(off):
        return "has other entries that are not finite, or is not zero where the control's is,"
    return f"is off by {off:.2g} (rounding: {noise:.1g})"


def _other_settings(mine: Operation, its: Operation) -> str:
    """A clause on arguments that are no tensors, if they differ."""
    if mine.settings == its.settings:
        return ""
    if len(mine.settings) != len(its.settings):
        return f"; it gets {' '.join(mine.settings)}, in the control {' '.join(its.settings)}"
    changed = list(_changed(mine.settings, its.settings))
    return "; it gets " + ", ".join(f"{new} (control: {old})" for new, old in changed)


def _changed(mine: Sequence[str], its: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((new, old) for new, old in zip(mine, its, strict=True) if new != old)


def _listed(operations: Sequence[Operation]) -> str:
    """``aten.sqrt.default, aten.add.Tensor and 3 more``, with the data type of their results."""
    shown = [
        f"{each.name} ({each.outputs[0].kind.partition('[')[0]})" if each.outputs else each.name
        for each in operations[:_SHOWN]
    ]
    more = len(operations) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
