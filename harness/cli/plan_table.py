"""A plan as text: a table of its sets, and what each is, costs and is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from converge_harness.cli.console import say
from converge_harness.errors import ConfigError, Problem, ToolchainError
from converge_harness.matrix.cost import cost_of
from converge_harness.model import (
    CHECKOUT,
    ENOUGH_RERUNS,
    GRACE_S,
    Fault,
    FaultKind,
    Launcher,
    Plan,
    Repeat,
    RepeatKind,
    RestartOwner,
    Role,
    Torn,
)
from converge_harness.plan import PlanRow
from converge_harness.toolchains.find import build_hint
from converge_harness.trainers import find_toolchain, trainer_of
from converge_harness.wording import counted

MANY = 200
"""More sets than this are printed as plain text, which is much faster."""
TEXTS = ("set", "degrees")
"""Titles of the left-aligned columns."""


class Say(Protocol):
    """Prints a line, in a style if the console has styles."""

    def __call__(self, text: str | Text, style: str = "") -> None: ...


def print_plan(
    console: Console, made: Plan, described: Sequence[PlanRow], commands: Mapping[str, str]
) -> None:
    """Print a table of all sets, and what each is and is for.

    Args:
        console: prints it.
        made: the plan.
        described: its sets, as rows.
        commands: by the name of a set, the command that starts its ranks or submits its job.
    """
    put = _say_plainly(console) if len(described) > MANY else partial(say, console)
    if len(described) > MANY:
        for line in _plain_table(made, described):
            put(line)
    else:
        console.print(_plan_table(made, described))
    where = _where(made)
    for row in described:
        for text, style in _set_lines(row, commands[row.name], where):
            put(text, style)


_MOST_LISTED = 12


def _listed(names: Sequence[str]) -> str:
    """Names of runs; of many, the first, and how many more."""
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    shown = ", ".join(names[: _MOST_LISTED - 2])
    return f"{shown} and {len(names) - _MOST_LISTED + 2} more (converge plan --json names all)"


def print_left_out(console: Console, made: Plan) -> None:
    """Print which sets are not run, and why."""
    by_reason: dict[tuple[bool, str], list[str]] = {}
    for name, each in made.experiment.left_out.items():
        by_reason.setdefault((each.was_asked_for, each.why), []).append(name)
    for (asked, why), names in by_reason.items():
        fate = "left out, so INVALID in the report" if asked else "left out"
        say(console, f"{fate}: {_listed(names)}: {why}", "yellow")


def print_besides(console: Console, made: Plan) -> None:
    """Print what the sets need besides; raises ConfigError for a missing calibration."""
    print_left_out(console, made)
    besides = [job.name for job in made.jobs if job.role in (Role.SEED, Role.REPEAT)]
    say(console, f"\nalso run, for initial weights and limits: {_listed(besides)}")
    if others := [job.name for job in made.jobs if job.role is Role.OTHER_SEED]:
        say(console, f"by other seeds: {_listed(others)}")
    for line in (*_low_precision(made), *_noise(made)):
        say(console, line)
    if made.experiment.launcher is Launcher.SLURM:
        say(
            console,
            "the scripts are written and submitted by `converge submit` (or `run`); see one: "
            "--script NAME",
        )
    if made.experiment.launcher is Launcher.KUBERNETES:
        say(
            console,
            "the scripts and JobSets are written by `converge submit`; see a script: --script NAME",
        )
    if made.experiment.calibration is not None:
        if not made.experiment.calibration.is_file():
            again = f"make it with: converge calibrate {made.experiment.path}"
            raise ConfigError(
                Problem(f"calibration {made.experiment.calibration}", f"does not exist; {again}")
            )
        say(console, f"limits from the calibration {made.experiment.calibration}")
    say(console, f"per-tensor evidence: {_sampled(made)}")
    say(console, cost_of(made).sentence(made.experiment.tokens_per_gpu_second))
    for job in {job.toolchain.name: job for job in made.jobs}.values():
        each, trainer = job.toolchain, trainer_of(job.spec)
        if each.code:
            known = f": {each.versions[CHECKOUT]}" if CHECKOUT in each.versions else ""
            say(console, f"{trainer.kind} of {each.name}: {trainer.release(each)}{known}")
        if not each.python.exists():
            say(
                console,
                f"toolchain {each.name} is not built yet; {build_hint(each.name)}",
                "yellow",
            )


def print_refusals(console: Console, made: Plan) -> bool:
    """Print which toolchains a run refuses, which a plan only assumes; return whether one is."""
    refused = False
    # Each trainer asks something else of a toolchain, and more for probed programs.
    asked = {
        (job.toolchain.name, job.spec.trainer.kind, job.spec.trainer.can.probed): job
        for job in made.jobs
        if job.baseline is None and job.toolchain.python.exists()
    }
    for job in asked.values():
        try:
            find_toolchain(job.toolchain.name, trainer=job.spec.trainer)
        except ToolchainError as error:
            refused = True
            say(console, f"`converge run` refuses this: {error}", "yellow")
    return refused


def _low_precision(made: Plan) -> Iterator[str]:
    """The short runs that measure rounding in low precision, and their frozen steps."""
    for role, what in (
        (Role.REFERENCE, "references in float32"),
        (Role.MATCHED, "matched controls, in the precision of test sets"),
    ):
        if jobs := [job.name for job in made.jobs if job.role is role]:
            yield f"{what}, of one step: {', '.join(jobs)}"
    frozen = [job for job in made.jobs if job.frozen]
    if frozen:
        yield (
            f"frozen steps before training: {frozen[0].frozen}, in {len(frozen)} of "
            f"{len(made.jobs)} jobs"
        )


def _noise(made: Plan) -> Iterator[str]:
    """Whether repeats show what kernels that are not deterministic do by themselves."""
    if all(job.spec.deterministic for job in made.jobs) or made.experiment.calibration:
        return
    reruns = [each for each in made.experiment.repeats if each.kind is RepeatKind.RERUN]
    yield f"deterministic = false: the noise of a run is learnt from its reruns, {len(reruns)} here"
    if len(reruns) < ENOUGH_RERUNS and made.experiment.baseline is None:
        names = ", ".join(
            f'"{Repeat(RepeatKind.RERUN, number)}"' for number in range(1, ENOUGH_RERUNS + 1)
        )
        yield f"  {ENOUGH_RERUNS} or more can be compared with each other: repeats = [{names}, …]"


def _sampled(made: Plan) -> str:
    """The sampled steps of the longest job."""
    steps = max((job.sample_steps for job in made.jobs), key=len)
    if steps:
        return f"at steps {', '.join(map(str, steps))}"
    if not all(job.spec.trainer.can.probed for job in made.jobs):
        return "none (trainer.probe is false): only the loss curve is judged"
    return "none (probe.cadence is off)"


def _say_plainly(console: Console) -> Say:
    """Print without rich, which takes several seconds for thousands of sets."""

    def put(text: str | Text, style: str = "") -> None:  # noqa: ARG001 - plain text has none
        print(text, file=console.file)

    return put


def _plan_table(made: Plan, described: Sequence[PlanRow]) -> Table:
    table = Table(title=escape(str(made.experiment.path)), title_justify="left", show_edge=False)
    for title in TEXTS:
        table.add_column(title, overflow="fold")
    for title in _numbers(made):
        # The segments of a run make up the same global batch in different ways.
        table.add_column(title, justify="right", no_wrap=title != "batch", overflow="fold")
    for row in described:
        table.add_row(*map(escape, _cells(made, row)))
    return table


def _plain_table(made: Plan, described: Sequence[PlanRow]) -> Iterator[str]:
    """The same table as plain lines, not wrapped."""
    rows = [(*TEXTS, *_numbers(made)), *(_cells(made, row) for row in described)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield str(made.experiment.path)
    for row in rows:
        cells = [
            cell.ljust(width) if index < len(TEXTS) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _numbers(made: Plan) -> tuple[str, ...]:
    """Titles of the right-aligned columns."""
    nodes = ("nodes",) if made.experiment.cluster else ()
    return ("ranks", *nodes, "steps", "batch", f"{made.counted_in}/step")


def _cells(made: Plan, row: PlanRow) -> tuple[str, ...]:
    segments = ", ".join(str(each.parallelism) for each in row.segments)
    cluster = made.experiment.cluster
    return (
        row.name,
        segments or str(row.parallelism),
        str(row.world_size),
        *((_nodes(row.world_size, cluster.ranks_per_node),) if cluster else ()),
        str(row.steps),
        _batch(row),
        f"{row.tokens_per_step:,}",
    )


def _nodes(ranks: int, per_node: int) -> str:
    """Nodes x ranks on each: ``2x8``; a job of no more ranks than fit gets one node."""
    return f"{max(1, ranks // per_node)}x{min(ranks, per_node)}"


def _batch(row: PlanRow) -> str:
    """Global batch as dp ranks x local batch (x accumulation): ``32 = 8x4``.

    For a run in segments, one product per segment: ``8 = 2x4, 1x4x2``.
    """
    parts = [(each.parallelism.dp, each.local_batch_size) for each in row.segments]
    made = (
        _product(row.global_batch_size, dp, local)
        for dp, local in parts or [(row.parallelism.dp, row.local_batch_size)]
    )
    return f"{row.global_batch_size} = {', '.join(made)}"


def _product(samples: int, dp: int, local: int) -> str:
    accumulated = samples // (dp * local)
    return f"{dp}x{local}" + (f"x{accumulated}" if accumulated > 1 else "")


def _set_lines(row: PlanRow, command: str, where: str) -> Iterator[tuple[str | Text, str]]:
    """The lines on a set, each with its style."""
    yield "", ""
    yield Text.assemble((row.name, "bold"), "  ", row.serves), ""
    backend = f" by {row.spmd_backend}" if row.spmd_backend else ""
    kernels = "" if row.deterministic else ", not deterministic"
    on = f"{counted(row.world_size, 'rank')} ({where}), {row.toolchain}{backend}{kernels}"
    yield f"  {row.trainer or ', '.join(row.techniques) or 'no technique'}; {on}", ""
    for name, what in row.own_techniques.items():
        yield f"  {name}: {what}", ""
    for line in _kind_lines(row):
        yield f"  {line}", ""
    # `converge init` begins notes with the rule, which was printed above.
    if note := row.note.removeprefix(row.serves).lstrip(". "):
        yield f"  {note}", ""
    for rule in row.waives:
        yield f"  waives the rule {rule}", "yellow"
    yield f"  {command}", "dim"


def _where(made: Plan) -> str:
    """The device that a rank runs on."""
    cluster = made.experiment.cluster
    if cluster is None:
        return "one GPU each, if there are GPUs"
    return "one GPU each" if cluster.device == "cuda" else "on CPUs"


def _kind_lines(row: PlanRow) -> Iterator[str]:
    """Lines on an elastic set's segments, a fault set's faults, and checkpoints for requeues."""
    first = 1
    for segment in row.segments:
        degrees, schedule = segment.parallelism, segment.pipeline_schedule
        samples = degrees.dp * segment.local_batch_size
        yield (
            f"steps {first}-{segment.until}: {degrees}{f' {schedule}' if schedule else ''}, "
            f"{counted(degrees.world_size, 'rank')}, local batch {segment.local_batch_size}, "
            f"{row.global_batch_size // samples} x accumulated"
        )
        first = segment.until + 1
    recovery = row.recovery
    if recovery is not None and not recovery.restarts.follows_script:
        when = "requeued" if recovery.restarts is RestartOwner.CLUSTER else "it was interrupted"
        yield f"a checkpoint every {recovery.checkpoint_every} steps, to resume from when {when}"
    elif recovery is not None:
        faults = (_fault(each, held=row.probed) for each in recovery.faults)
        yield f"faults: {'; '.join(faults)}"
        fewest, most = recovery.nodes
        nodes = f", {fewest} to {most} nodes (first {recovery.first_nodes})" if most > 1 else ""
        yield (
            f"a checkpoint every {recovery.checkpoint_every} steps; restarts by "
            f"{recovery.restarts.value}, at most {recovery.max_restarts}, each within "
            f"{recovery.within_s:g} s{nodes}"
        )
    if row.passes > 1:
        yield f"{row.passes} passes"


def _fault(fault: Fault, *, held: bool) -> str:
    """``kill of rank 1 at step 6``; ``at or after`` where no rank is held at the step."""
    of = ""
    if fault.kind is FaultKind.CKPT_TORN:
        rank = f" of rank {fault.rank}" if fault.torn is Torn.TRUNCATED else ""
        of = f"{rank} ({fault.torn.value})"
    elif fault.kind is FaultKind.AGENT_LOSS:
        of = f" of node {fault.node}"
    elif fault.kind is FaultKind.PREEMPT:
        time = "" if fault.grace_s == GRACE_S else f" with {fault.grace_s:g} s to stop"
        of = time + (" (it has to save)" if fault.saves else "")
    elif fault.kind is not FaultKind.JOIN:
        of = f" of rank {fault.rank}"
    return f"{fault.kind.value}{of} {'at' if held else 'at or after'} step {fault.step}"
