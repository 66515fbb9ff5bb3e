"""What a plan costs at most, and what it costs if its test sets are stopped early."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from converge_harness.launch.continuing import saves_where_it_waits
from converge_harness.launch.local.memory import available_bytes
from converge_harness.launch.local.supervisor import cpu_slots, waiting_ranks
from converge_harness.launch.stopping import (
    is_worth_ending,
    looks,
    read_by,
    settling_looks,
    waiting,
)
from converge_harness.launch.waiting_groups import WaitingGroup, groups_of
from converge_harness.model import Job, Launcher, Plan, Role
from converge_harness.trainers import comes_in_passes


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Runs that cannot all be in memory at once, and so do not wait for each other."""

    names: tuple[str, ...]
    """Their controls; the sets, if none judges them."""
    ranks: int
    """Ranks that would have to be in memory at least."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens that the runs of a plan train, together; samples where no length of one is known."""

    counted_in: str
    """``tokens`` or ``samples``."""
    at_most: int
    """If every run trains to its last step."""
    settled: int
    """If every test set that may be settled is, at its first look, and what only such sets are
    judged by ends with the last of them.
    """
    waits: bool
    """Whether it does: all runs wait for each other. Where they do not, one that trains faster than
    the sets ends later, and one that trains before them has trained to its end."""
    waiting_ranks: int
    """How many ranks are in memory at most in runs that wait; 0: none does."""
    room: int
    """How many may be."""
    too_large: tuple[TooLarge, ...]
    """What does not wait because of that."""
    known_wrong: int | None
    """Until a test set that is wrong at its first step is known to FAIL, if it and the runs that it
    is judged by train at once: the most of any set that may be stopped; None if none may."""

    def sentence(self, tokens_per_gpu_second: float | None) -> str:
        """For people; in GPU-hours if the throughput is known."""
        if tokens_per_gpu_second is None:
            most = f"{_rounded(self.at_most)} {self.counted_in}"
        else:
            hours = self.at_most / tokens_per_gpu_second / 3600
            rate = f"{tokens_per_gpu_second:,g} {self.counted_in} per second and GPU"
            most = f"{hours:,.1f} GPU-hours at {rate}"
        parts = [f"cost: {most} if every run trains to its last step"]
        if self.settled < self.at_most:
            beside = "" if self.waits else " and its control and the repeats train beside it"
            settled = f"if every set is settled at its first look{beside}"
            parts.append(f"{self._share(self.settled)} {settled}")
        if self.known_wrong is not None:
            beside = "" if self.waits else ", if they train side by side"
            parts.append(
                f"{self._share(self.known_wrong)} is what a set, its control and the repeats train "
                f"until it is found to be wrong at its first step{beside}"
            )
        if self.waiting_ranks:
            parts.append(f"up to {self.waiting_ranks} ranks wait for others in memory meanwhile")
        parts += [
            f"the runs of {', '.join(each.names)} do not wait for each other, since {each.ranks} "
            f"ranks would have to be in memory at once and {self.room} may "
            "(waiting_ranks in [stop])"
            for each in self.too_large
        ]
        return "; ".join(parts)

    def _share(self, tokens: int) -> str:
        return f"{tokens / self.at_most:.1%}"


def cost_of(plan: Plan) -> Cost:
    """The cost of a plan; a seed checkpoint trains nothing, and a baseline is not run."""
    count = Counter(job.identity for job in plan.jobs)
    by_identity = {job.identity: job for job in plan.without_baseline.jobs}
    jobs = by_identity.values()
    # The run of two sets is trained once, and never stopped.
    alone = [job for job in jobs if count[job.identity] == 1]
    first = {job.name: found[0] for job in alone if (found := looks(job, plan.experiment))}
    settling = {
        job.name: found[0] for job in alone if (found := settling_looks(job, plan.experiment))
    }
    groups = _waiting_groups(plan)
    slots = cpu_slots(len(os.sched_getaffinity(0)), plan.jobs, plan.experiment.cpu_ranks)
    room = waiting_ranks(plan.experiment, len(slots.free), available_bytes())
    waiting_groups = [group for group in groups if group.least_ranks() <= room]
    waiting_runs = {run for group in waiting_groups for run in group.members if group.judging}
    too_large = [group for group in groups if group.least_ranks() > room]
    waits = bool(groups) and not too_large and all(group.judging for group in groups)
    for identity, readers in read_by(plan).items():
        read = by_identity[identity]
        last = max(settling.get(each.name, each.steps) for each in readers)
        saves = saves_where_it_waits(read, (last,)) if identity in waiting_runs else ()
        in_passes = comes_in_passes(read) or bool(saves)
        if is_worth_ending(read, last, in_passes=in_passes):
            settling[read.name] = last
    wrong = (
        sum(tokens_of(each, first[job.name]) for each in (job, *plan.judged_by(job)))
        for job in alone
        if job.name in first
    )
    return Cost(
        counted_in=plan.counted_in,
        at_most=sum(map(tokens_of, jobs)),
        settled=sum(tokens_of(job, settling.get(job.name)) for job in jobs),
        waits=waits,
        waiting_ranks=min(room, sum(group.ranks for group in waiting_groups)),
        room=room,
        too_large=tuple(_too_large(group, by_identity) for group in too_large),
        known_wrong=max(wrong, default=None),
    )


_WRITTEN_OUT = 1_000_000


def _rounded(amount: int) -> str:
    """``320``, ``1.2e+07``."""
    return f"{amount:,}" if amount < _WRITTEN_OUT else f"{amount:.2g}"


def _waiting_groups(plan: Plan) -> tuple[WaitingGroup, ...]:
    """The runs that would wait for each other if there is room; none on GPUs or a cluster."""
    on_gpu = plan.surroundings.hardware.startswith("gpu")
    if plan.experiment.launcher is not Launcher.LOCAL or on_gpu:
        return ()
    jobs = {job.identity: job for job in plan.without_baseline.jobs}.values()
    readers = read_by(plan)
    return groups_of(jobs, waiting(jobs, plan.experiment, readers).keys(), readers)


def _too_large(group: WaitingGroup, jobs: Mapping[str, Job]) -> TooLarge:
    judging = [jobs[run] for run in group.judging]
    controls = [job.name for job in judging if job.role is Role.CONTROL]
    names = controls or [jobs[run].name for run in group.sets]
    return TooLarge(tuple(names), group.least_ranks())


def gpu_hours(job: Job, throughput: float) -> float:
    """GPU-hours of a job at a throughput in tokens per GPU and second; 0 for a seed checkpoint.

    The number of GPUs cancels out: twice as many take half the time. A frozen step counts like any
    other, since the update that it omits is cheap.
    """
    return tokens_of(job) / throughput / 3600


def tokens_of(job: Job, until: int | None = None) -> int:
    """What a job trains, up to a step if one is given, with its frozen steps."""
    if job.role is Role.SEED:
        return 0
    steps = job.steps if until is None else min(until, job.steps)
    return (steps + job.frozen) * job.tokens_per_step
