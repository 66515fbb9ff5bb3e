"""Which jobs run side by side: pure packing of ranks into slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.model import Job, Role, Technique

RANKS_PER_CORE = 2
"""A rank waits for others (rendezvous, collectives, files) about half of its time."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Free places for ranks: GPU ids, or numbers on the CPU."""

    free: tuple[int, ...]

    def take(self, count: int) -> tuple[tuple[int, ...], Slots]:
        """The lowest ``count`` free places, and what is left.

        Raises ValueError when there are fewer: ask ``fits`` first.
        """
        if not self.fits(count):
            raise ValueError(f"{count} slots wanted, {len(self.free)} are free")
        return self.free[:count], Slots(self.free[count:])

    def give(self, taken: Iterable[int]) -> Slots:
        return Slots(tuple(sorted((*self.free, *taken))))

    def fits(self, count: int) -> bool:
        return count <= len(self.free)


def cpu_slots(cores: int, jobs: Sequence[Job], wanted: int | None) -> Slots:
    """Slots on the CPU: ``wanted``, else two ranks per core, and never too few for a job.

    The largest job always gets its slots: its ranks then share the cores.
    """
    largest = max((job.world_size for job in jobs), default=1)
    return Slots(tuple(range(max(wanted or RANKS_PER_CORE * cores, largest))))


def launch_order(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """Seed checkpoints (others wait for them), then the longest: large and compiled first.

    Small jobs come last and fill the slots that large ones leave.
    """
    return tuple(sorted(jobs, key=_weight, reverse=True))


def _weight(job: Job) -> tuple[bool, int]:
    compiled = Technique.COMPILE in job.spec.techniques
    return job.role is Role.SEED, job.world_size * job.steps * (2 if compiled else 1)
