"""What is new in a night, from its results and those of the nights before; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.history import Changed, Entry, changed_between
from harness.model import Judgement


@dataclass(frozen=True, slots=True)
class BadSet:
    """A test set that did not PASS."""

    entry: Entry
    told: bool
    """Whether a night since its last PASS had the same verdict and class of cause."""
    last_good: Entry | None
    """Its newest PASS; None when it never had one."""

    @property
    def changed(self) -> tuple[Changed, ...]:
        """Circumstances that differ from the last good night; empty, too, when there was none."""
        if self.last_good is None:
            return ()
        return changed_between(self.last_good.circumstances, self.entry.circumstances)


@dataclass(frozen=True, slots=True)
class Night:
    """One night of an experiment, as a person is told of it."""

    bad: tuple[BadSet, ...]
    recovered: tuple[Entry, ...]
    """Sets that PASS, and did not in their night before."""

    @property
    def news(self) -> tuple[BadSet, ...]:
        """Bad sets that nobody was told of yet."""
        return tuple(each for each in self.bad if not each.told)


def night(entries: Iterable[Entry], number: int) -> Night:
    """Night ``number`` among the results of an experiment, newest first; later ones do not count.

    A set that goes from FAIL to ERROR and back is told of twice, not three times: what counts is
    what was told since its last PASS. A FAIL of another class of cause is told of.
    """
    known = [entry for entry in entries if entry.night <= number]
    tonight = [entry for entry in known if entry.night == number]
    before = [entry for entry in known if entry.night < number]
    return Night(
        bad=tuple(
            _bad(entry, [each for each in before if each.test_set == entry.test_set])
            for entry in tonight
            if entry.verdict is not Judgement.PASS
        ),
        recovered=tuple(
            entry
            for entry in tonight
            if entry.verdict is Judgement.PASS and entry.previous not in (None, Judgement.PASS)
        ),
    )


def _bad(entry: Entry, before: Sequence[Entry]) -> BadSet:
    """``before``: earlier results of the same set, newest first."""
    good = next((at for at, each in enumerate(before) if each.verdict is Judgement.PASS), None)
    since = before[:good]
    return BadSet(
        entry=entry,
        told=any(_state(each) == _state(entry) for each in since),
        last_good=None if good is None else before[good],
    )


def _state(entry: Entry) -> tuple[object, ...]:
    return entry.verdict, entry.cause_class
