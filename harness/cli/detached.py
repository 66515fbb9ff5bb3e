"""``converge submit``, ``status``, ``collect``, ``cancel``: a cluster's jobs from any shell."""

from __future__ import annotations

import argparse
import getpass
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cli import matrix
from harness.cli.commands import conclude
from harness.cli.display import Display, requeued
from harness.cli.goldens import golden_record
from harness.cli.learnt import read_given
from harness.cli.nights import history_of
from harness.cli.running import Ran, gpu_ids, noticing_launches, options_of, site_of
from harness.cli.shared import make_console, names, report_folder, say, store_of
from harness.errors import ConfigError, Problem, suggest
from harness.gate import ExitCode
from harness.launch.events import Preparing
from harness.launch.slurm import detached
from harness.launch.slurm.backend import Phase
from harness.launch.slurm.detached import BROKEN_OFF, NOT_SUBMITTED, StatusRow
from harness.launch.slurm.job_status import JobStatus, Site
from harness.model import Job, Launcher, Plan, RankError, Role, RunRecord, RunStatus
from harness.plan import select
from harness.store import require_writable

_LISTED = 12
"""Of jobs that are left, so many are named."""


def submit(arguments: argparse.Namespace) -> ExitCode:
    """``converge submit``: exit code 0 when the scheduler has all that was to be submitted."""
    console = make_console()
    plan = _plan(arguments)
    store = store_of(arguments)
    store.require_writable()
    with Display(console) as display:
        to_submit = len(plan.without_golden.jobs)
        display(Preparing(time.time(), f"{plan.experiment.name}: {to_submit} jobs"))
        data = matrix.prepare_data(plan, store)
        site = site_of(plan, store, options_of(plan, data, fresh=arguments.fresh), display)
        observer = noticing_launches(display, arguments)
        submitted = detached.submit_plan(plan.without_golden, site, observer)
    told = [f"{submitted.submitted} submitted"]
    told += [f"{submitted.queued} in the queue before"] if submitted.queued else []
    told += [f"{submitted.reused} finished before"] if submitted.reused else []
    told += [f"{len(submitted.refused)} refused or skipped"] if submitted.refused else []
    say(console, f"jobs: {', '.join(told)}")
    if submitted.left:
        again = _again("submit", arguments)
        say(console, f"{len(submitted.left)} are not submitted: {submitted.why_left}")
        say(console, f"the same command submits them later: {again}")
    if any(record.status is RunStatus.REFUSED for record in submitted.refused):
        say(console, f"next: {_mend(plan)}, then: {_again('submit', arguments)}")
    elif submitted.submitted or submitted.queued:
        say(console, f"next: {_again('status', arguments)}")
    elif not submitted.left:
        say(console, f"next: {_again('collect', arguments)}")
    return ExitCode.UNDECIDED if submitted.left or submitted.refused else ExitCode.PASS


def status(arguments: argparse.Namespace) -> ExitCode:
    """``converge status``: a table, exit code 0 whatever it says."""
    console = make_console()
    plan = _plan(arguments)
    rows = detached.status(plan.without_golden, _site(plan, arguments, Display(console)))
    table = Table(title=escape(plan.experiment.name), title_justify="left", show_edge=False)
    for title in ("set", "job", "state"):
        table.add_column(title, overflow="fold")
    for title in ("steps", "loss", "elapsed"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("nodes", "reason"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(
            escape(row.name),
            row.job_id,
            escape(row.state if row.settled else f"{row.state}, not collected"),
            _steps(row),
            "" if row.loss is None else f"{row.loss:.4f}",
            "" if row.elapsed_s is None else _duration(row.elapsed_s),
            escape(row.nodes),
            escape(_reason(row)),
        )
    console.print(table)
    counts = Counter(row.state for row in rows)
    say(console, "\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
    over = all(row.state not in _NOT_OVER for row in rows)
    if over and counts[RunStatus.REFUSED]:
        say(console, f"next: {_mend(plan)}, then: {_again('submit', arguments)}")
    elif over and (counts[RunStatus.CANCELLED] or counts[RunStatus.INTERRUPTED]):
        say(console, f"next, to run the rest: {_again('submit', arguments)}")
        say(console, f"or to judge what there is: {_again('collect', arguments)}")
    elif over or any(not row.settled for row in rows):
        say(console, f"next: {_again('collect', arguments)}")
    elif counts[NOT_SUBMITTED] or counts[BROKEN_OFF]:
        say(console, f"next: {_again('submit', arguments)}")
    return ExitCode.PASS


def collect(arguments: argparse.Namespace) -> ExitCode:
    """``converge collect``: exit codes as of ``run``, and 3 while something is not over."""
    console = make_console()
    plan = _plan(arguments)
    surroundings = matrix.surroundings_of(plan.experiment, on_gpu=bool(gpu_ids()))
    given = read_given(plan, surroundings)
    store = store_of(arguments)
    store.require_writable()
    folder = report_folder(arguments, plan.experiment)
    require_writable(folder)
    with Display(console) as display:
        collected = detached.collect(plan.without_golden, _site(plan, arguments, display), display)
    if collected.left:
        _say_left(console, collected.left, arguments)
        if not arguments.partial or not collected.records:
            return ExitCode.UNDECIDED
    records = {each.job.identity: _not_over(each) for each in collected.left}
    records.update(collected.records)
    goldens = (job for job in plan.jobs if job.golden is not None)
    records.update((job.identity, golden_record(job)) for job in goldens)
    ran = Ran(tuple(records[job.identity] for job in plan.jobs), matrix.prepare_data(plan, store))
    code = conclude(
        console,
        plan,
        ran,
        folder,
        store=store,
        history=history_of(arguments),
        surroundings=surroundings,
        given=given,
        only=None if collected.left else names(arguments.only),
        begun=None,
    )
    return ExitCode.UNDECIDED if collected.left and code is ExitCode.PASS else code


def cancel(arguments: argparse.Namespace) -> ExitCode:
    """``converge cancel``: exit code 0 when all that was meant is over."""
    console = make_console()
    plan = _plan(arguments, whole=True)
    wanted = _wanted(plan, arguments)
    with Display(console) as display:
        done = detached.cancel(
            plan.without_golden,
            _site(plan, arguments, display),
            display,
            wanted=wanted,
            why=f"cancelled by converge cancel ({_who()})",
        )
    count = len(done.cancelled) + len(done.ending)
    say(console, f"{_jobs(count)} cancelled" if count else "nothing of it is in the queue")
    if done.ending:
        left = ", ".join(each.job.name for each in done.ending)
        say(console, f"not over yet: {left}; see {_again('status', arguments)}")
    for each in done.unsure:
        if each.submission is not None:
            say(
                console,
                f"{each.job.name}: its submission was interrupted; if Slurm has it, this cancels "
                f"it: scancel --name={shlex.quote(each.submission.name)}",
            )
    return ExitCode.UNDECIDED if done.ending or done.unsure else ExitCode.PASS


# --------------------------------------------------------------------- the plan

_NOT_OVER = frozenset({str(Phase.PENDING), str(Phase.RUNNING), NOT_SUBMITTED, BROKEN_OFF})


def _plan(arguments: argparse.Namespace, *, whole: bool = False) -> Plan:
    """The plan of the arguments, whose launcher must be a scheduler; ``whole``: without --only."""
    plan = matrix.load_plan(
        arguments.experiment,
        () if whole else names(arguments.only),
        on_gpu=bool(gpu_ids()),
        calibration=arguments.calibration,
        launcher=arguments.launcher,
        cluster=arguments.cluster,
    )
    if not all(job.spec.trainer.can.several_nodes for job in plan.jobs):
        raise ConfigError(
            Problem(
                f"{arguments.experiment}: trainer.kind",
                f"is {plan.jobs[0].spec.trainer.kind}, and `converge {arguments.command}` is for "
                "jobs of a scheduler, which runs torchtitan alone",
                f"on this machine: converge run {shlex.quote(str(arguments.experiment))}",
            )
        )
    if plan.experiment.launcher is Launcher.LOCAL:
        raise ConfigError(
            Problem(
                f"{arguments.experiment}: launcher",
                f"is local, and `converge {arguments.command}` is for jobs of a scheduler",
                'add --launcher slurm, or launcher = "slurm" to the file; on this machine: '
                f"converge run {shlex.quote(str(arguments.experiment))}",
            )
        )
    return plan


def _site(plan: Plan, arguments: argparse.Namespace, display: Display) -> Site:
    return site_of(plan, store_of(arguments), options_of(plan, {}), display)


def _wanted(plan: Plan, arguments: argparse.Namespace) -> Callable[[Job], bool]:
    """Which jobs ``--only`` means: jobs by their names, test sets as elsewhere."""
    # In the plan's order.
    by_name = dict.fromkeys(job.name for job in plan.without_golden.jobs)
    only = names(arguments.only) or tuple(by_name)
    sets = [name for name in only if name not in by_name]
    unknown = [name for name in sets if not _is_set(plan, name)]
    if unknown:
        valid = list(dict.fromkeys((*by_name, *(spec.name for spec in plan.experiment.tests))))
        path = str(arguments.experiment)
        raise ConfigError(
            [Problem(path, f"no job or set {each!r}", suggest(each, valid)) for each in unknown]
        )
    chosen = {name for name in only if name in by_name}
    if sets:
        chosen |= {spec.name for spec in select(plan.experiment, sets).tests}
    return lambda job: job.name in chosen


def _is_set(plan: Plan, name: str) -> bool:
    """Whether `select` takes it: a set, or what several are generated from."""
    try:
        select(plan.experiment, [name])
    except ConfigError:
        return False
    return True


# ------------------------------------------------------------------------ words


def _mend(plan: Plan) -> str:
    return f"mend [cluster] of {plan.experiment.path}, or your own cluster file"


def _say_left(console: Console, left: Sequence[JobStatus], arguments: argparse.Namespace) -> None:
    say(console, f"{_jobs(len(left))} {'is' if len(left) == 1 else 'are'} not over:")
    for each in left[:_LISTED]:
        say(console, f"  {each.job.name}: {_how(each)}")
    if len(left) > _LISTED:
        say(console, f"  and {len(left) - _LISTED} more")
    new = any(not each.in_queue for each in left)
    say(console, f"next: {_again('submit' if new else 'status', arguments)}")


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _how(job_status: JobStatus) -> str:
    """``pending as job 12 (Priority)``."""
    if job_status.submission is None:
        return NOT_SUBMITTED
    if job_status.state is None:
        return BROKEN_OFF
    reason = f" ({job_status.state.reason})" if job_status.state.reason else ""
    return f"{job_status.state.phase} as job {job_status.submission.job_id}{reason}"


def _not_over(job_status: JobStatus) -> RunRecord:
    """What a matrix is judged by where a job is not over."""
    return RunRecord(
        name=job_status.job.name,
        identity=job_status.job.identity,
        folder=job_status.folder,
        status=RunStatus.SKIPPED,
        wall_s=0.0,
        argv=(),
        error=RankError(None, f"not over: {_how(job_status)}"),
    )


def _again(command: str, arguments: argparse.Namespace) -> str:
    """Another command for the same plan, as a user would type it."""
    words = ["converge", command, str(arguments.experiment)]
    only = names(arguments.only)
    words += ["--only", *only] if only else []
    for option in ("launcher", "cluster", "store", "calibration"):
        value = getattr(arguments, option)
        words += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(words)


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        user = "somebody"
    return f"{user} on {socket.gethostname()}"


def _reason(row: StatusRow) -> str:
    told = [requeued(row.requeues)] if row.requeues else []
    return "; ".join([*told, row.reason] if row.reason else told)


def _steps(row: StatusRow) -> str:
    if row.role is Role.SEED:
        return ""
    return f"{row.step or 0}/{row.steps}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
