"""What a user sees while jobs run: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import argparse
import math
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from converge_harness.launch.events import (
    Ended,
    Event,
    GoingOn,
    Notice,
    Observer,
    Overview,
    Preparing,
    Queued,
    Retrying,
    Reused,
    RunsElsewhere,
    Started,
    Step,
    Waiting,
)
from converge_harness.matrix.run import Ran, run_jobs
from converge_harness.model import Job, Plan, RunRecord, RunStatus
from converge_harness.run_folder.layout import JOB_SCRIPT, LOGS
from converge_harness.store import Store
from converge_harness.wording import counted

STYLES = {
    RunStatus.FINISHED: "green",
    RunStatus.SKIPPED: "yellow",
    RunStatus.STOPPED: "yellow",
}


def run_shown(plan: Plan, store: Store, arguments: argparse.Namespace, console: Console) -> Ran:
    """Run every job of a plan, showing the progress.

    ``arguments`` are those of a command that runs jobs: ``fresh`` and ``cold``. Once a job is
    launched, their ``launched`` is set (``noticing_launches``).
    """
    with Display(console) as display:
        observer = noticing_launches(display, arguments)
        return run_jobs(plan, store, observer, fresh=arguments.fresh, warm=not arguments.cold)


def noticing_launches(observer: Observer, arguments: argparse.Namespace) -> Observer:
    """An observer that sets ``arguments.launched``, which changes how errors are reported."""

    def notice(event: Event) -> None:
        if isinstance(event, Started) or (isinstance(event, Queued) and event.job_id):
            arguments.launched = True
        observer(event)

    return notice


class Display:
    """An observer of the launcher: prints what a user wants to know.

    On a terminal every running job has a bar with step, loss and time left, and finished jobs
    scroll by above them. Elsewhere (CI, a file) there is one plain line per event. ``quiet``: no
    line but notices and restarts, only the bars.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._live = console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        self._total: TaskID | None = None
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Preparing() | Notice() | Reused() | RunsElsewhere() | GoingOn() | Waiting():
                self._print(*line(event), notable=isinstance(event, Notice))
            case Queued(job=job, job_id=job_id, to_create=to_create):
                if job_id:
                    how = "written as JobSet" if to_create else "submitted as job"
                    self._print(f"{job.name}: {how} {job_id}")
            case Started(job=job, attempt=attempt, nodes=nodes):
                self._start(job, attempt, nodes)
            case Step(job=job, step=step, loss=loss, eta_s=eta_s):
                self._step(job, step, loss, eta_s)
            case Retrying(job=job, reason=reason):
                self._drop(job)
                self._print(f"{job.name}: starting again, because {reason}", "yellow", notable=True)
            case Ended(job=job, record=record):
                self._drop(job)
                self._print(ending(job, record), STYLES.get(record.status, "red"))
            case Overview():
                self._overview(event)

    def _print(self, text: str, style: str = "", *, notable: bool = False) -> None:
        if self._quiet and not notable:
            return
        self._progress.console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def _start(self, job: Job, attempt: int, nodes: str) -> None:
        again = f", attempt {attempt}" if attempt > 1 else ""
        if not self._live:
            ranks = counted(job.world_size, "rank")
            where = f" of {nodes}" if nodes else ""
            self._print(f"{job.name}: started on {ranks}{where}{again}")
            return
        self._tasks[job.identity] = self._progress.add_task(
            escape(job.name), total=job.steps, note=f"starting{again}"
        )

    def _step(self, job: Job, step: int, loss: float | None, eta_s: float | None) -> None:
        task = self._tasks.get(job.identity)
        if task is not None:
            note = f"loss {loss:.4f}" if loss is not None else ""
            self._progress.update(task, completed=step, note=f"{note} {left(eta_s)}".strip())

    def _drop(self, job: Job) -> None:
        task = self._tasks.pop(job.identity, None)
        if task is not None:
            self._progress.remove_task(task)

    def _overview(self, event: Overview) -> None:
        if not self._live:
            return
        if self._total is None:
            self._total = self._progress.add_task("[bold]jobs", total=event.total, note="")
        self._progress.update(
            self._total, completed=event.done, total=event.total, note=escape(queue_note(event))
        )


def queue_note(event: Overview) -> str:
    """What the other jobs do, as ``4 running, 12 waiting (Priority)``, or the time left."""
    if not event.queued:
        return left(event.eta_s)
    reason = f" ({event.reason})" if event.reason else ""
    return f"{len(event.running)} running, {event.queued} waiting{reason}"


def line(
    event: Preparing | Notice | Reused | RunsElsewhere | GoingOn | Waiting,
) -> tuple[str, str]:
    """One line on an event that moves no bar, and its style."""
    match event:
        case Preparing(what=what):
            return what, ""
        case Notice(message=message):
            return f"warning: {message}", "yellow"
        case Reused(job=job, record=record):
            return f"{job.name}: reused {record.folder}", "dim"
        case RunsElsewhere(job=job):
            return f"{job.name}: another converge process runs it; waiting for its result", ""
        case GoingOn(job=job, reason=reason):
            return f"{job.name}: continues: {reason}", ""
        case Waiting(job=job, step=step):
            return f"{job.name}: waits after step {step} for the runs it is compared with", "dim"


def left(eta_s: float | None) -> str:
    """Time left, rounded: ``about 40 s left``."""
    if eta_s is None:
        return ""
    if eta_s < 90:  # noqa: PLR2004 - below it, seconds read better than minutes
        return f"about {math.ceil(eta_s)} s left"
    return f"about {math.ceil(eta_s / 60)} min left"


def requeued(times: int) -> str:
    """``requeued once``, ``requeued 2 times``."""
    return "requeued once" if times == 1 else f"requeued {times} times"


def ending(job: Job, record: RunRecord) -> str:
    """One line on how a job ended: ``fsdp2: finished in 12 s``."""
    line = f"{job.name}: {record.status}"
    if record.status not in (RunStatus.SKIPPED, RunStatus.REFUSED):
        line += f" in {record.wall_s:.0f} s"
        line += f", in its last start ({requeued(record.requeues)})" if record.requeues else ""
    if record.error is not None:
        line += f": {record.error.message}"
    if record.status in (RunStatus.CRASHED, RunStatus.HUNG, RunStatus.TIMED_OUT):
        line += f" (logs in {record.folder / LOGS})"
    if record.status is RunStatus.REFUSED:
        line += f" (as requested in {record.folder / JOB_SCRIPT})"
    return line
