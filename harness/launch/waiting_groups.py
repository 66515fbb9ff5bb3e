"""How many runs may wait for each other in memory. Pure.

Runs that wait at their looks (``stopping.wait_steps``) keep their memory while others have their
slots. A control, its repeats and the sets that are judged by them are a group: all its controls and
repeats have to be in memory at once, with one set after another, or none of them could train on. So
a group starts only where there is room for that much beside what is left of other groups. Within
this room every waiting run is waited for by runs that can start, so there is no deadlock. A
group that is too large for the room never waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from converge_harness.model import Job


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """Runs that wait for each other; their numbers of ranks, by identity."""

    judging: Mapping[str, int]
    """Controls and repeats."""
    sets: Mapping[str, int]

    @property
    def members(self) -> frozenset[str]:
        return frozenset((*self.judging, *self.sets))

    @property
    def ranks(self) -> int:
        """Of all members."""
        return sum(self.judging.values()) + sum(self.sets.values())

    def least_ranks(self) -> int:
        """With fewer ranks in memory they cannot wait for each other."""
        return self.reserved(begun=(), over=())

    def reserved(self, *, begun: Collection[str], over: Collection[str]) -> int:
        """Ranks that it has in memory or still needs there at once.

        Args:
            begun: identities of runs that are in memory.
            over: identities of runs that have ended.
        """
        judging = sum(ranks for run, ranks in self.judging.items() if run not in over)
        left = {run: ranks for run, ranks in self.sets.items() if run not in over}
        here = sum(ranks for run, ranks in left.items() if run in begun)
        return judging + max([here, *left.values()], default=0)


class MayStart(Enum):
    """Whether a run may start."""

    WAITING = "it waits at its looks"
    NOT_WAITING = "it waits at none"
    LATER = "when others have ended"


def groups_of(
    jobs: Iterable[Job], waiting: Collection[str], read_by: Mapping[str, Sequence[Job]]
) -> tuple[WaitingGroup, ...]:
    """The groups of runs that wait for each other.

    Args:
        jobs: each once. waiting: identities of those that wait at some step.
        read_by: by identity of a control or repeat, the sets that read it.
    """
    ranks = {job.identity: job.world_size for job in jobs if job.identity in waiting}
    joined: list[set[str]] = [{identity} for identity in ranks]
    for identity, sets in read_by.items():
        related = {identity, *(each.identity for each in sets)}
        touched = [each for each in joined if each & related]
        joined = [each for each in joined if not each & related]
        joined += [set().union(*touched)] if touched else []
    return tuple(
        WaitingGroup(
            judging={each: ranks[each] for each in ranks if each in group and each in read_by},
            sets={each: ranks[each] for each in ranks if each in group and each not in read_by},
        )
        for group in joined
    )


def still_fit(
    groups: Sequence[WaitingGroup], room: int, *, begun: Collection[str], over: Collection[str]
) -> bool:
    """Whether groups that have begun to wait can go on, now that there is less room.

    Args:
        groups: all that there was room for. room: what there is now.
        begun: as for ``may_start``. over: as for ``may_start``.
    """
    here = [group for group in groups if not group.members.isdisjoint(begun)]
    needed = sum(group.reserved(begun=begun, over=over) for group in here)
    return needed <= room and all(group.least_ranks() <= room for group in here)


def may_start(
    run: str,
    groups: Sequence[WaitingGroup],
    room: int,
    *,
    begun: Collection[str],
    over: Collection[str],
) -> MayStart:
    """Whether a run may start, and whether it then waits at its looks.

    Args:
        run: its identity. groups: of all runs. room: for how many ranks of groups there is memory.
        begun: identities of runs that are in memory.
        over: of those that have ended, and of those that wait no more: they have slots to the end.
    """
    own = next((group for group in groups if run in group.members), None)
    if own is None or own.least_ranks() > room:
        return MayStart.NOT_WAITING
    with_it = {*begun, run}
    here = [
        group
        for group in groups
        if group.least_ranks() <= room and not group.members.isdisjoint(with_it)
    ]
    needed = sum(group.reserved(begun=with_it, over=over) for group in here)
    return MayStart.WAITING if needed <= room else MayStart.LATER
