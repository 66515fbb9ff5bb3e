"""How many runs wait for each other in memory, and that none of them waits for ever."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_jobs import plan_of, tiny_job

from converge_harness.launch.local.memory import GIB, available_bytes, ranks_that_fit
from converge_harness.launch.local.supervisor import waiting_ranks
from converge_harness.launch.waiting_groups import (
    MayStart,
    WaitingGroup,
    groups_of,
    may_start,
    still_fit,
)
from converge_harness.model import Role

FAMILY = WaitingGroup(judging={"control": 2, "repeat": 2}, sets={"small": 1, "large": 4})


def start(run, room, begun=(), over=(), groups=(FAMILY,)):
    return may_start(run, groups, room, begun=begun, over=over)


def test_a_group_waits_only_if_all_that_judges_fits_in_memory_beside_its_largest_set():
    assert FAMILY.least_ranks() == 8
    assert start("control", 8) is MayStart.WAITING
    for run in FAMILY.members:
        assert start(run, 7) is MayStart.NOT_WAITING
    assert start("another", 0) is MayStart.NOT_WAITING  # it never waits


def test_sets_that_do_not_fit_beside_each_other_start_one_after_another():
    judging = ("control", "repeat")
    assert start("small", 8, begun=judging) is MayStart.WAITING
    assert start("large", 8, begun=(*judging, "small")) is MayStart.LATER
    assert start("large", 9, begun=(*judging, "small")) is MayStart.WAITING
    assert start("large", 8, begun=judging, over=("small",)) is MayStart.WAITING
    assert start("small", 8, begun=("control",), over=("repeat",)) is MayStart.WAITING


def test_what_one_group_still_needs_is_kept_from_others():
    other = WaitingGroup(judging={"other": 1}, sets={"its set": 1})
    groups = (FAMILY, other)
    # Although there is memory for it now: not for the set that FAMILY would wait for in it.
    assert start("other", 9, begun=("control",), groups=groups) is MayStart.LATER
    assert start("other", 10, begun=("control",), groups=groups) is MayStart.WAITING
    assert start("other", 8, over=FAMILY.members, groups=groups) is MayStart.WAITING
    # One that never waits needs no room of its own: it has its slots.
    assert start("other", 2, begun=("control",), groups=groups) is MayStart.WAITING


def test_controls_that_judge_a_set_together_are_one_group():
    control, matched = (tiny_job(name, role=Role.CONTROL) for name in ("control", "matched"))
    first, second, alone = (tiny_job(name) for name in ("first", "second", "alone"))
    jobs = (control, matched, first, second, alone)
    read_by = {control.identity: (first, second), matched.identity: (second,)}
    everyone = {job.identity for job in jobs}
    family, single = groups_of(jobs, everyone, read_by)[::-1]
    assert family.judging == {control.identity: 2, matched.identity: 2}
    assert family.sets == {first.identity: 2, second.identity: 2}
    assert single == WaitingGroup(judging={}, sets={alone.identity: 2})
    assert groups_of(jobs, (), read_by) == ()
    # A set that never waits leaves the others waiting.
    (apart,) = groups_of(jobs, {control.identity, first.identity}, read_by)
    assert apart.members == {control.identity, first.identity}


@pytest.mark.parametrize(("training", "most"), [(1, 4), (2, 8)])
def test_by_default_four_ranks_wait_for_each_that_trains_if_memory_suffices(training, most):
    assert ranks_that_fit(65 * GIB, training, 0) == most
    assert ranks_that_fit(5 * GIB - 1, training, 0) == 4 - training  # a GiB for each rank
    assert ranks_that_fit(GIB, training, 0) == 0
    # As soon as it is known that one needs more, fewer wait, or nobody.
    assert ranks_that_fit(65 * GIB, training, 16 * GIB) == 4 - training
    assert ranks_that_fit(65 * GIB, training, 60 * GIB) == 0


def test_who_says_how_many_ranks_may_wait_is_believed():
    plan = plan_of(tiny_job("one", ranks=1), waiting_ranks=100)
    assert waiting_ranks(plan.experiment, 1, GIB) == 100
    assert waiting_ranks(plan_of(tiny_job("one", ranks=1)).experiment, 1, 3 * GIB) == 2


def test_groups_that_wait_in_too_little_memory_stop_waiting():
    assert still_fit([FAMILY], 8, begun=("control", "large"), over=())
    assert not still_fit([FAMILY], 7, begun=("control", "large"), over=())
    assert still_fit([FAMILY], 7, begun=(), over=())  # it will not begin to wait
    # More sets are in memory than would be started now.
    assert not still_fit([FAMILY], 8, begun=("control", "small", "large"), over=())
    # One whose largest set has ended might have room, but what is left of it would not wait.
    assert not still_fit([FAMILY], 7, begun=("control",), over=("large",))


def group_files(folder, limit, used, dropped, *, names=("memory.max", "memory.current")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {dropped}\n")


def test_the_tightest_limit_of_a_control_group_counts(tmp_path):
    processes, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    machine = available_bytes(tmp_path / "no Linux", mounted)
    assert machine > 3000
    processes.write_text("4:cpuset:/\n0::/outer/inner\n")
    group_files(mounted / "outer", 3000, 2500, 1000)
    group_files(mounted / "outer/inner", "max", 100, 0)
    assert available_bytes(processes, mounted) == 1500
    group_files(mounted / "outer/inner", 200, 300, 0)
    assert available_bytes(processes, mounted) == 0
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    processes.write_text("4:cpu,memory:/hidden\n")
    assert available_bytes(processes, mounted) > 3000  # nothing is known of it
    group_files(mounted / "memory", 900, 100, 50, names=old)
    assert available_bytes(processes, mounted) == 850


# ------------------------------------------------------------------ nobody waits for ever


@dataclass
class Simulated:
    """A matrix whose runs train from look to look, each in slots, and wait there in memory."""

    groups: tuple[WaitingGroup, ...]
    slots: int
    room: int
    looks: int
    settled_at: dict[str, int | None]
    """The look at which a set is stopped; None: at none."""
    may_start: Callable = may_start
    at: dict[str, int] = field(default_factory=dict)
    """By run, the looks that it has come to; more than ``looks``: its end."""
    begun: set[str] = field(default_factory=set)
    may_wait: set[str] = field(default_factory=set)
    """Of those that have begun, the ones that wait at their looks."""
    waiting: set[str] = field(default_factory=set)
    over: dict[str, bool] = field(default_factory=dict)
    """By run, whether it was stopped."""

    def ranks(self, runs):
        every = {}
        for group in self.groups:
            every |= group.judging | group.sets
        return sum(every[run] for run in runs)

    def group(self, run):
        return next(group for group in self.groups if run in group.members)

    @property
    def past(self):
        """Runs that have waited at all their looks, or never wait, and train to their end."""
        at_looks = {run for run in self.may_wait if self.at[run] < self.looks}
        return self.begun - at_looks - self.waiting

    def fits(self, run):
        return self.ranks(self.begun - self.waiting) + self.ranks([run]) <= self.slots

    def has_come(self, run, look):
        return run in self.over or self.at.get(run, 0) >= look

    def may_train_on(self, run):
        """As ``Looks.may_train_on``, and whether it ends instead."""
        group, look = self.group(run), self.at[run]
        if run in group.sets:
            judged = all(self.has_come(each, look) for each in group.judging)
            return judged and self.settled_at[run] != look
        if all(each in self.over for each in group.sets):
            return not self.may_end(run)
        return any(
            (each in self.over and not self.over[each]) or self.at.get(each, 0) > look
            for each in group.sets
        )

    def may_end(self, run):
        """Whether a run is stopped at the look that it has come to."""
        group, look = self.group(run), self.at[run]
        if run in group.sets:
            judged = all(self.has_come(each, look) for each in group.judging)
            return judged and self.settled_at[run] == look
        return bool(group.sets) and all(self.over.get(each) for each in group.sets)

    def end(self, run, *, stopped):
        self.begun.discard(run)
        self.waiting.discard(run)
        self.may_wait.discard(run)
        self.over[run] = stopped

    def moves(self):
        """What the launcher could do now, each as a function."""
        found = []
        for run in sorted(self.begun):
            if self.at[run] <= self.looks and self.at[run] and self.may_end(run):
                found.append((self.end, (run,), {"stopped": True}))
            elif run not in self.waiting:
                found.append((self.train, (run,), {}))
            elif self.may_train_on(run) and self.fits(run):
                found.append((self.waiting.discard, (run,), {}))
        for group in self.groups:
            for run in sorted(group.members - self.begun - self.over.keys()):
                over = self.over.keys() | self.past
                may = self.may_start(run, self.groups, self.room, begun=self.begun, over=over)
                if may is not MayStart.LATER and self.fits(run):
                    found.append((self.begin, (run, may), {}))
        return found

    def begin(self, run, may):
        self.begun.add(run)
        self.at[run] = 0
        if may is MayStart.WAITING:
            self.may_wait.add(run)

    def train(self, run):
        self.at[run] += 1
        if self.at[run] > self.looks:
            self.end(run, stopped=False)
        elif run in self.may_wait:
            self.waiting.add(run)


@st.composite
def matrices(draw):
    sizes = st.integers(1, 4)
    groups = tuple(
        WaitingGroup(
            judging={f"{index}.judging.{each}": draw(sizes) for each in range(judging)},
            sets={f"{index}.set.{each}": draw(sizes) for each in range(sets)},
        )
        for index, (judging, sets) in enumerate(
            draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4))
        )
    )
    looks = draw(st.integers(1, 3))
    runs = [run for group in groups for run in group.sets]
    settled = {run: draw(st.none() | st.integers(1, looks)) for run in runs}
    return Simulated(groups, draw(st.integers(4, 10)), draw(st.integers(0, 30)), looks, settled)


@settings(max_examples=150)
@given(matrices(), st.randoms(use_true_random=False))
def test_in_any_order_of_events_every_run_ends_and_memory_suffices(matrix, order):
    """Whatever happens next among all that could, until nothing can."""
    while moves := matrix.moves():
        move, arguments, named = order.choice(moves)
        move(*arguments, **named)
        assert matrix.ranks(matrix.may_wait - matrix.past) <= matrix.room
        assert matrix.ranks(matrix.begun - matrix.waiting) <= matrix.slots
    assert not matrix.begun
    assert matrix.over.keys() == {run for group in matrix.groups for run in group.members}


def test_who_counts_only_what_is_in_memory_now_waits_for_ever():
    """That the simulation shows it: a control of each of two groups, and no room for any set."""

    def greedy(run, groups, room, *, begun, over):
        return MayStart.WAITING if len(begun) < room else MayStart.LATER

    groups = tuple(
        WaitingGroup(judging={f"{name} control": 1}, sets={f"{name} set": 1}) for name in "ab"
    )
    settled = {run: 1 for group in groups for run in group.sets}
    left = []
    for may in (greedy, may_start):
        matrix = Simulated(groups, 4, 2, 1, settled, may)
        while moves := matrix.moves():
            starts = [move for move in moves if move[0] == matrix.begin]
            controls = [move for move in starts if move[1][0].endswith("control")]
            move, arguments, named = (*controls, *moves)[0]
            move(*arguments, **named)
        left.append(matrix.begun)
    assert left == [{"a control", "b control"}, set()]
