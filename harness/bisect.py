"""Which revision of a line is the first that behaves like the newest one: a binary search.

It is that of ``git bisect``; revisions that cannot be judged are skipped. Pure;
``matrix/bisect.py`` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Suspects:
    """What is known of a line of revisions, which are numbered from 0, the oldest."""

    before: int
    """The newest one that behaves as the oldest."""
    until: int
    """The oldest one that behaves as the newest."""
    skipped: frozenset[int] = frozenset()
    """Those that cannot be judged."""

    @property
    def suspects(self) -> range:
        """The revisions one of which is the first that behaves as the newest."""
        return range(self.before + 1, self.until + 1)

    @property
    def trials_left(self) -> int:
        """How many trials are needed, if every revision can be judged."""
        return math.ceil(math.log2(self.until - self.before))

    def following(self) -> int | None:
        """The revision to try next: the middle of the widest gap between tried ones.

        Between two that could be judged, that is the middle. The neighbours of one that cannot be
        built often cannot be built either, so it goes far away from them. None: all were tried.
        """
        inside = (each for each in self.skipped if self.before < each < self.until)
        tried = sorted({self.before, self.until, *inside})
        older, newer = max(pairwise(tried), key=lambda gap: gap[1] - gap[0])
        return (older + newer) // 2 if newer - older > 1 else None

    def after(self, number: int, *, as_newest: bool | None) -> Suspects:
        """With the result of a trial; None: that revision cannot be judged."""
        if as_newest is None:
            return replace(self, skipped=self.skipped | {number})
        return replace(self, until=number) if as_newest else replace(self, before=number)


def search(
    start: Suspects,
    as_newest: Callable[[int], bool | None],
    may_go_on: Callable[[int], bool],
    tell: Callable[[Suspects], None],
) -> Suspects:
    """Try revisions until nothing is left to try, or the budget ends.

    Args:
        start: at least the two ends of the line.
        as_newest: tries a revision: whether it behaves as the newest one (True) or as the oldest
            (False), or cannot be judged (None).
        may_go_on: whether the budget allows for another trial after so many.
        tell: gets what is known after every trial.
    """
    found, trials = start, 0
    while (number := found.following()) is not None and may_go_on(trials):
        found = found.after(number, as_newest=as_newest(number))
        trials += 1
        tell(found)
    return found
