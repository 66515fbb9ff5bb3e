"""How many jobs run at once, by what they wait for; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.launch.cluster.submission import Submission


@dataclass(slots=True)
class Lanes:
    """At most ``limit`` jobs at once, by dependencies, so that it holds without a harness.

    Every lane is a chain of jobs each of which waits for the one before; None: no limit.
    """

    limit: int | None
    ends: deque[str] = field(default_factory=deque)
    """The last job of every lane, the oldest first."""

    def waits_for(self) -> tuple[str, ...]:
        """The jobs that must be over before the next one."""
        surplus = len(self.ends) + 1 - self.limit if self.limit is not None else 0
        return tuple(list(self.ends)[: max(surplus, 0)])

    def add(self, job_id: str) -> None:
        """Another job has been submitted, to wait for ``waits_for()``."""
        for _ in self.waits_for():
            self.ends.popleft()
        self.ends.append(job_id)

    def is_over(self, job_id: str) -> None:
        if job_id in self.ends:
            self.ends.remove(job_id)


def lanes_of(limit: int | None, submissions: Iterable[Submission]) -> Lanes:
    """The lanes that jobs in the queue are in."""
    queued = sorted(submissions, key=lambda each: each.submitted)
    waited_for = {id_ for each in queued for id_ in each.after_any}
    ids = [each.job_id for each in queued if each.job_id is not None]
    return Lanes(limit, deque(id_ for id_ in ids if id_ not in waited_for))
