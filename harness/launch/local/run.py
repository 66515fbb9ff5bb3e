"""One job while its processes run: its progress, and its result."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from converge_harness.launch import processes
from converge_harness.launch.local.curve_steps import CurveSteps
from converge_harness.launch.next_call import (
    CallOutcome,
    Decision,
    after,
    calls_again,
    hang_limit_s,
    next_by_curve,
)
from converge_harness.launch.progress import Growth, MetricsTail, Pace, no_step, remaining_s
from converge_harness.launch.warm import SERVER_GONE
from converge_harness.model import (
    GRACE_S,
    Experiment,
    Fault,
    FaultKind,
    Job,
    RankError,
    RunRecord,
    RunStatus,
)
from converge_harness.run_folder.checkpoints import is_whole, newest_whole
from converge_harness.run_folder.faults import struck_files
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.metrics import StepLine
from converge_harness.run_folder.passes import last_step
from converge_harness.run_folder.records import CallDocument, RunFacts
from converge_harness.run_folder.starts import last_start_ended_well
from converge_harness.store import RunLock
from converge_harness.trainers import (
    Call,
    Rendezvous,
    is_complete,
    trainer_of,
)
from converge_harness.trainers.failure import launcher_tail, rank_log


@dataclass(slots=True)
class Run:
    """A started job: its calls so far, its slots, and its progress."""

    job: Job
    folder: Path
    slots: tuple[int, ...]
    attempt: int
    lock: RunLock
    call: RunningCall
    """The running call."""
    warm: bool
    environment: Mapping[str, str]
    """Pinned environment variables of its processes."""
    payload: JobDocument
    tail: MetricsTail
    growth: Growth | None = None
    """For a program without step reports."""
    curve: CurveSteps | None = None
    """Of the running call, if faults strike once its curve has their steps."""
    waits: tuple[int, ...] = ()
    """The steps after which its ranks still wait until they are let train on, in order."""
    saves: tuple[int, ...] = ()
    """The steps, of ``waits``, at which they write a checkpoint before they wait."""
    in_passes: bool = False
    """Whether its evidence is in passes."""
    waiting_since: float | None = None
    """Since when its ranks wait, and others have its slots; None: they train."""
    continues_from: int | None = None
    """The step of the checkpoint from which it continues; None: it has started anew."""
    earlier: list[RunningCall] = field(default_factory=list)
    """Finished calls, in order."""
    struck: dict[int, int] = field(default_factory=dict)
    """Faults that converge has caused, and in which pass."""
    started: float = field(default_factory=time.monotonic)
    """When it started, plus the time that it has waited for others since: no time of a run
    includes that."""
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    last: StepLine | None = None
    """Its last step, or that of the checkpoint from which it continues and where it waits again."""
    made: int = 0
    """Number of finished steps, including replayed ones, since it was started."""
    first_step_at: float = 0.0
    last_step_at: float = 0.0

    @property
    def calls(self) -> tuple[RunningCall, ...]:
        """All calls so far, in order."""
        return (*self.earlier, self.call)

    @property
    def is_waiting(self) -> bool:
        """Whether its ranks wait for other runs now."""
        return self.waiting_since is not None

    @property
    def has_begun(self) -> bool:
        """Whether its ranks train, or have loaded the checkpoint after which they wait again."""
        return bool(self.made) or self.tail.loaded

    def wait(self) -> None:
        """Its ranks wait from now on."""
        self.waiting_since = time.monotonic()

    def train_on(self, slots: tuple[int, ...]) -> None:
        """They train again, in these slots: its next step is due from now on."""
        now = time.monotonic()
        waited = 0.0 if self.waiting_since is None else now - self.waiting_since
        self.started += waited
        self.first_step_at += waited
        self.call.started += waited
        self.last_step_at = now
        self.slots, self.waiting_since = slots, None

    @property
    def may_begin_anew(self) -> bool:
        """Whether that costs no finished step, and no finished start of a program without them."""
        return not self.made and (self.growth is None or not self.earlier)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was started, without those in which it waited for other runs."""
        now = time.monotonic() if self.waiting_since is None else self.waiting_since
        return now - self.started

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the pace since the first."""
        if self.last is None:
            return None
        return remaining_s(
            self.last.step, self.job.steps, self.last_step_at - self.first_step_at, self.made - 1
        )

    @property
    def pace(self) -> Pace:
        return Pace(self.job.world_size, self.elapsed_s, self.eta_s)

    def new_steps(self) -> tuple[StepLine, ...]:
        """Steps that finished since the last time, including replayed ones."""
        steps = self.tail.new_steps()
        if self.growth is not None:
            self.growth.look()
        if self.curve is not None:
            self.curve.look()
            self.call.steps = len(self.curve.steps)
        if steps:
            self.last_step_at = time.monotonic()
            if not self.made:
                self.first_step_at = self.last_step_at
            self.last = steps[-1]
            self.made += len(steps)
            self.call.steps += len(steps)
        return steps

    def fault_of_curve(self) -> tuple[int, Fault] | None:
        """The fault that strikes now by the curve of the running call, with its index, if one does.

        One ends a start, so the next one strikes a later start.
        """
        if self.curve is None or self.tail.number in self.struck.values():
            return None
        return next_by_curve(self.job, self.curve.steps, self.struck)

    def last_look(self) -> None:
        """Read what the curve of the running call still lacks, now that nobody writes it."""
        if self.curve is not None:
            self.curve.look(is_over=True)
            self.call.steps = len(self.curve.steps)

    @property
    def stopped_when_asked(self) -> bool:
        """Whether a program stopped with 0 after ``preempt``, before its end.

        Never under torchrun, which then ends with an error. Ask after ``last_look``.
        """
        if self.call.asked_at is None or self.call.returncode != 0:
            return False
        if self.curve is None:
            return last_step(self.folder) != self.job.steps
        return not self.curve.steps or self.curve.steps[-1] < self.job.steps

    def is_over(self) -> bool:
        """Whether the running call is over; ask before ``new_steps``, so as to miss none."""
        return self.call.is_over(complete=self.tail.reached == self.job.steps)

    def overdue(self, experiment: Experiment) -> str:
        """The exceeded timeout, as a sentence; empty if there is none."""
        now = time.monotonic()
        hang_limit = self._hang_limit_s(experiment.progress_timeout_s)
        if hang_limit is not None:
            self.call.hangs_since = self.call.hangs_since or now
            # Without the probe a curve that still grows shows that nobody waits for the rank.
            grew_at = self.curve.grew_at if self.curve is not None else 0.0
            if now - max(self.call.hangs_since, grew_at) <= hang_limit:
                return ""
            return f"no step finished for {hang_limit:g} s after a rank was made to hang"
        if self.growth is not None:
            return self.growth.overdue(experiment.startup_timeout_s, experiment.progress_timeout_s)
        stepped_at = self.last_step_at if self.call.steps else None
        return no_step(experiment, self.job, self.last, self.call.started, stepped_at)

    def _hang_limit_s(self, progress_timeout_s: float) -> float | None:
        """Of a rank that hangs now because the script says so; None when none does."""
        recovery = self.job.spec.recovery
        if recovery is None or FaultKind.HANG not in {fault.kind for fault in recovery.faults}:
            return None  # asked at every poll: looks into no folder for nothing
        last = self.last.step if self.last is not None and self.call.steps else None
        struck = struck_faults(self.folder) - self.call.faults_before
        return hang_limit_s(self.job, struck, last, progress_timeout_s)

    def decide(self) -> Decision:
        """What comes after the call that is over, if ``calls_again`` holds for the job."""
        recovery = self.job.spec.recovery
        target = self.call.call.segment
        until = self.job.steps if target is None else self.job.spec.segments[target].until
        reached = last_step(self.folder)
        if self.growth is not None:  # the judge reads its curve
            reached = until if last_start_ended_well(self.folder) else None
        complete = reached == self.job.steps
        form = trainer_of(self.job.spec).checkpoint_form(self.job)
        newest = newest_whole(self.folder, form)
        outcome = CallOutcome(
            ended_well=not self.stopped_when_asked
            and (self.call.returncode == 0 or (complete and len(self.call.agents) > 1)),
            reached=reached,
            steps=self.call.steps,
            struck=struck_faults(self.folder) - self.call.faults_before,
            nodes=max(len(self.call.left), recovery.nodes[0] if recovery else 1),
            checkpoint=is_whole(self.folder, until, form),
            saved=newest is not None and newest > (self.call.call.resumes_from or 0),
        )
        return after(self.job, self.call.call, outcome)

    def error(self) -> RankError | None:
        """What went wrong with a job whose last call is over; None if nothing did."""
        if not calls_again(self.job):
            if self.call.returncode != 0:
                return self._rank_error()
            if not is_complete(self.job, self.folder):
                last = None if self.last is None else self.last.step
                why = trainer_of(self.job.spec).incomplete(self.job, self.folder, last)
                return RankError(0, why, launcher_tail(self.call.agents[0].logs))
            return None
        decision = self.decide()
        problem = decision.problem
        if not problem:
            return None
        if self.call.returncode == 0:
            trainer = trainer_of(self.job.spec)
            how = decision.hint or trainer.unsaved(self.job)
            message = f"{problem}: {how}" if how else problem
            if self.growth is not None and not self.growth.curves.exists():  # no step is known
                message = trainer.incomplete(self.job, self.folder, None, self.call.call)
            return RankError(0, message, launcher_tail(self.call.agents[0].logs))
        error = self._rank_error()
        return replace(error, message=f"{problem}: {error.message}")

    def _rank_error(self) -> RankError:
        """The error of the rank that failed first in the finished call."""
        if self.warm and self.call.returncode == SERVER_GONE:
            return RankError(0, "the warm start lost its server")
        logs, left = ([agent.logs for agent in of] for of in (self.call.agents, self.call.left))
        return trainer_of(self.job.spec).error(logs, left, self.call.returncode)

    def hung(self, sentence: str) -> RankError:
        """The error of a job that was killed after a timeout, with the end of rank 0's log."""
        logs = self.call.agents[0].logs
        return RankError(0, sentence, rank_log(logs, 0) or launcher_tail(logs))

    def record(self, status: RunStatus, error: RankError | None) -> RunRecord:
        return RunRecord(
            name=self.job.name,
            identity=self.job.identity,
            folder=self.folder,
            status=status,
            wall_s=self.elapsed_s,
            argv=self.calls[0].argv,
            error=error,
        )

    def facts(self) -> RunFacts:
        """What ``record.json`` has in addition to the record."""
        return {
            "started": self.started_at,
            "host": socket.gethostname(),
            "versions": dict(self.job.toolchain.versions),
            "warm": self.warm,
            "environment": dict(self.environment),
            "job": self.payload,
            **self._calls(),
        }

    def _calls(self) -> RunFacts:
        return {"calls": [call.facts() for call in self.calls]} if self.in_passes else {}


def struck_faults(folder: Path) -> frozenset[int]:
    """Indices of a script's faults that have happened, according to ``faults/``."""
    return frozenset(struck_files(folder))


_SEARCH_SHARE = 20
"""How many times as long as a search for ranks that are not there the next one waits."""
_LINGER_S = 10.0
"""How long a node may continue after another has ended, or after training is complete: a surviving
agent can hang in torchrun's exit barrier.
"""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class Agent:
    """torchrun's agent on one node; its ranks are found by their working directory."""

    process: subprocess.Popen[bytes]
    folder: Path
    """Working directory; for the first node, and for a user's program, the run folder."""
    logs: Path
    slots: tuple[int, ...] = ()
    """Of its ranks."""
    lost: bool = False
    """Killed by a fault of the script."""


@dataclass(slots=True)
class RunningCall:
    """A started call: its agents, and what happened in it."""

    call: Call
    argv: tuple[str, ...]
    """The call of the first node, as a user would type it."""
    meeting: Rendezvous
    """The rendezvous of its agents."""
    agents: list[Agent]
    """By node."""
    faults_before: frozenset[int] = frozenset()
    """Faults of the script that had happened before it started."""
    started: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=_now)
    ended_at: str | None = None
    steps: int = 0
    """Number of step lines so far."""
    hangs_since: float | None = None
    """When a hang of the script was first detected."""
    asked_at: float | None = None
    """When ``preempt`` asked the ranks to stop."""
    grace_s: float = GRACE_S
    """How long they may then take."""
    out_of_grace: bool = False
    """Whether they had not stopped by then, so that converge has to end them."""
    _lingers_since: float | None = None
    _next_search: float = 0.0

    @property
    def left(self) -> list[Agent]:
        """Agents of nodes that no fault of the script has killed."""
        return [agent for agent in self.agents if not agent.lost]

    def node(self, number: int) -> Agent | None:
        """The agent of a node, counted among those that are left, as a script counts; or None."""
        left = self.left
        return left[number] if number < len(left) else None

    def ranks(self, agent: Agent, wanted: Collection[int]) -> dict[int, psutil.Process]:
        """The processes of ranks; none while not all of ``wanted`` are found.

        A search that finds nothing takes time, and the next one waits much longer than that.
        """
        began = time.monotonic()
        if began < self._next_search:
            return {}
        found = processes.ranks_of(agent.logs, agent.process.pid, wanted)
        self._next_search = time.monotonic() + _SEARCH_SHARE * (time.monotonic() - began)
        return found

    @property
    def targets(self) -> list[tuple[subprocess.Popen[bytes], Path]]:
        """Arguments for ``processes.end_all``."""
        return [(agent.process, agent.folder) for agent in self.agents]

    @property
    def returncode(self) -> int:
        """0, or the exit code of the first node that failed, once the call is over."""
        codes = (agent.process.returncode for agent in self.left)
        return next((code for code in codes if code), 0)

    def is_over(self, *, complete: bool) -> bool:
        """Whether its agents have ended, or the remaining ones will not do anything.

        ``complete``: training has finished.
        """
        running = [agent.process.poll() is None for agent in self.left]
        if not any(running):
            return True
        if self.asked_at is not None and time.monotonic() - self.asked_at > self.grace_s:
            self.out_of_grace = True
            return True
        if len(self.agents) == 1 or (all(running) and not complete):
            return False
        if self._lingers_since is None:
            self._lingers_since = time.monotonic()
        return time.monotonic() - self._lingers_since > _LINGER_S

    def give(self, grace_s: float) -> None:
        """Give the ranks, which are being asked to stop, so many seconds from now on."""
        self.asked_at, self.grace_s = time.monotonic(), grace_s

    def note_end(self) -> None:
        """Record that no process of it is left."""
        self.ended_at = self.ended_at or _now()

    def facts(self) -> CallDocument:
        """Its entry in ``record.json``."""
        return {
            "argv": list(self.argv),
            "segment": self.call.segment,
            "nodes": self.call.nodes,
            "started": self.started_at,
            "ended": self.ended_at,
            "returncode": self.returncode,
        }
