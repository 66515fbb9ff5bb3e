"""``[trainer]`` of a command trainer: its table, its checks, and the resulting ``Command``.

As TOML (docs/any-trainer.md)::

    [trainer]
    kind = "command"                # default: "torchtitan"
    command = ["train.py", "--steps", "{steps}", "--stage", "{config.zero.stage}"]
    launcher = "torchrun"           # the default; composer, deepspeed, mpirun, srun, none
    toolchain = "deepspeed-0.19.8"  # or python = "env/bin/python"; default: `python` on PATH
    probe = true                    # the default: the program calls converge_harness.probe
    curves = "{output}/loss.csv"    # if probe = false
    columns = { loss = "train/loss", step = "iteration" }
    mean_over = "since the last row"  # or 10: over how many steps a loss in it is the mean
    files = ["src/model.py"]        # further files whose content is part of the identity
    environment = { FLAG = "{config.flag}" }
    weights = "to_mine.toml"        # under [trainers.NAME] only: names in the control's checkpoint
    [trainer.checkpoints]           # for elastic and fault sets, and checkpoint_every
    name = "step-{step}.pt"         # in {checkpoint_dir}; "last.pt": one file, overwritten
    last_file = ".metadata"         # if it is a folder: what is written last
    [trainer.config]                # or train_config = "x.toml"
    training = { steps = 20, local_batch_size = 2, global_batch_size = 8 }
    zero = { stage = 0 }
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from converge_harness.errors import Problem, suggest
from converge_harness.model import (
    GLOBAL_BATCH,
    LOCAL_BATCH,
    RESHARD,
    FaultKind,
    Kind,
    Parallelism,
    RestartOwner,
    SetSpec,
    Torn,
    TrainConfig,
)
from converge_harness.run_folder.checkpoints import STEP, CheckpointForm
from converge_harness.run_folder.launcher_variables import is_of_launcher
from converge_harness.run_folder.weight_mapping import WeightMapping
from converge_harness.toml import FilePath, Table, Where, flatten, one_of
from converge_harness.trainers.command.program import is_list, program_files
from converge_harness.trainers.command.settings import (
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    CONFIG,
    OF_CHECKPOINTS,
    PLACEHOLDERS,
    RESUME_FROM,
    STOP_AT,
    Command,
    RankLauncher,
    TemplateError,
    listed_key,
    passed,
    placeholders,
)
from converge_harness.trainers.mapping import of_program, read_mapping
from converge_harness.trainers.table import InlineTable

CURVE_COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens")
"""What can be named in a program's curve."""
MAX_TEXT = 4096
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _is_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise PydanticCustomError("variable", "must be the name of an environment variable")
    of_converge = name.startswith("CONVERGE_") or name == "CUDA_VISIBLE_DEVICES"
    if of_converge or is_of_launcher(name):
        raise PydanticCustomError("variable", "is set by converge or the launcher")
    return name


def _is_argument(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("argument", "must not contain NUL")
    return text


def _is_name_of_step(name: str) -> str:
    rest = name.replace(STEP, "", 1)
    if name in ("", ".", "..") or set(rest) & {"{", "}", "/", "\0"}:
        raise PydanticCustomError(
            "checkpoint",
            "must be the name of a file or folder with {example} for the step, once, such as "
            '"step-{example}.pt", or the name of one file that every save overwrites, such as '
            '"checkpoint.pt"',
            {"example": STEP},
        )
    return name


def _is_inside(path: str) -> str:
    parts = PurePath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise PydanticCustomError("inside", 'must be a path in the checkpoint, such as ".metadata"')
    return path


Template = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_is_argument)]
ColumnName = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class CheckpointsTable(Table):
    """``[trainer.checkpoints]``: how converge finds a program's checkpoints."""

    name: Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_is_name_of_step)]
    last_file: Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_is_inside)] | None = None


class CommandTable(InlineTable):
    """``kind = "command"``."""

    kind: str = "command"
    command: list[Template] = Field(default=[])
    launcher: Annotated[str, one_of(RankLauncher)] = RankLauncher.TORCHRUN
    python: FilePath | None = None
    probe: bool = True
    curves: Template | None = None
    columns: dict[Annotated[str, one_of(CURVE_COLUMNS)], ColumnName] = Field(default={})
    mean_over: Annotated[int, Field(ge=1)] | Literal["since the last row"] = 1
    files: list[FilePath] = Field(default=[])
    deterministic: bool | None = None
    """Always refused: only the program itself can choose its kernels."""
    environment: dict[Annotated[str, AfterValidator(_is_variable)], Template] = Field(default={})
    checkpoints: CheckpointsTable | None = None
    weights: FilePath | None = None
    """The file with the names of another trainer's checkpoint (``trainers/mapping.py``)."""


EXAMPLE = 'such as ["train.py", "--steps", "{steps}", "--output", "{output}"]'
NAME_EXAMPLE = 'name = "step-{step}.pt"'
ONE_TEXT = f"write {{{CONFIG}KEY}} without the *: a list is passed as JSON"
OUTPUT = "{output}/"
PROBE = "set probe = true, and call the probe in the program (docs/probe.md)"
TRAINER_STATE = "trainer_state.json"
"""Hugging Face's Trainer loads it with a checkpoint, and writes it whole again."""
_REFUSED_CHECKPOINTS = CheckpointForm(STEP)
"""In place of a ``[trainer.checkpoints]`` with a mistake, so that what needs such a table is not
reported as well. The file does not load, so no run has it."""
OURS = frozenset(
    f"training.{key}"
    for key in (
        *("steps", "local_batch_size", "global_batch_size", "seq_len"),
        *("dtype", "mixed_precision_param"),
    )
)
"""Keys of any train config that converge itself reads."""


def read_command(
    table: CommandTable, where: Where, folders: Sequence[Path], problems: list[Problem]
) -> Command:
    """The command that ``[trainer]`` describes; problems are added to ``problems``.

    Args:
        table: as written. where: maps a key of ``[trainer]`` to its place. folders: where relative
        paths are resolved; the first match wins. The first one has the experiment file. problems:
        list to which problems are added.
    """

    def is_refused(key: str) -> bool:
        return any(problem.where.startswith(where(key)) for problem in problems)

    checkpoints = checkpoint_form(table)
    if is_refused("checkpoints"):  # the reader of the table left it out
        checkpoints = _REFUSED_CHECKPOINTS
    else:
        problems += _checkpoint_problems(table, where)
    if table.command or not is_refused("command"):
        problems += _template_problems(table, where)
    problems += _curve_problems(table, where)
    if table.deterministic is not None:
        problems.append(
            Problem(
                where("deterministic"),
                "is for torchtitan only: converge does not choose the kernels of your program",
                "call torch.use_deterministic_algorithms in it, or not; give it a key of "
                "trainer.config that says which",
            )
        )
    launcher = RankLauncher(table.launcher)
    found = program_files(table.command, launcher, table.files, where, folders, problems)
    return Command(
        argv=tuple(table.command),
        folder=found.folder,
        launcher=launcher,
        probed=table.probe,
        curves=table.curves,
        columns=dict(table.columns),
        mean_over=table.mean_over if isinstance(table.mean_over, int) else 0,
        environment=dict(table.environment),
        checkpoints=checkpoints,
        weights=_mapping(table, where, folders, problems),
        sources=found.sources,
    )


def _mapping(
    table: CommandTable, where: Where, folders: Sequence[Path], problems: list[Problem]
) -> WeightMapping | None:
    if table.weights is None:
        return None
    if not table.probe:
        problems.append(
            Problem(
                where("weights"),
                "has no effect without the probe, which loads the weights by it",
                PROBE,
            )
        )
    return read_mapping(table.weights, folders, where, problems, of_program)


# ------------------------------------------------------------------ templates


def _templates(table: CommandTable) -> Iterator[tuple[str, str]]:
    """Key and text of everything in ``[trainer]`` that may have placeholders."""
    yield from ((f"command[{index}]", text) for index, text in enumerate(table.command))
    if table.curves is not None:
        yield "curves", table.curves
    yield from ((f"environment.{name}", text) for name, text in table.environment.items())


def _names(table: CommandTable) -> Iterator[str]:
    """All placeholders of the valid templates."""
    for _, text in _templates(table):
        try:
            yield from placeholders(text)
        except TemplateError:  # reported once, for the file
            continue


def _is_readable(table: CommandTable) -> bool:
    """Whether there is a command, and all templates are valid."""
    try:
        for _, text in _templates(table):
            placeholders(text)
    except TemplateError:
        return False
    return bool(table.command)


def _template_problems(table: CommandTable, where: Where) -> Iterator[Problem]:
    """Problems with placeholders that do not depend on the train config."""
    if not table.command:
        said = "is empty" if "command" in table.model_fields_set else "is missing"
        yield Problem(where("command"), said, EXAMPLE)
    elif not table.command[0].strip():
        yield Problem(where("command[0]"), "is empty", EXAMPLE)
    for key, text in _templates(table):
        try:
            names = placeholders(text)
        except TemplateError as error:
            yield Problem(where(key), f"{error} in {text!r}", error.hint)
            continue
        if listed_key(text) is not None and not key.startswith("command["):
            yield Problem(
                where(key), f"{text!r} is a list of arguments, and here is one text", ONE_TEXT
            )
        for name in dict.fromkeys(names):
            if name not in PLACEHOLDERS and not name.startswith(CONFIG):
                valid = (*PLACEHOLDERS, "config.KEY")
                yield Problem(where(key), f"{{{name}}} is not a placeholder", suggest(name, valid))


def _curve_problems(table: CommandTable, where: Where) -> Iterator[Problem]:
    if table.probe:
        for key in ("curves", "columns", "mean_over"):
            if key in table.model_fields_set:
                yield Problem(
                    where(key),
                    "has no effect on a probed program: the probe records its curves",
                    "leave it out, or add probe = false",
                )
        return
    for name in dict.fromkeys(table.columns.values()):
        signals = [signal for signal, column in table.columns.items() if column == name]
        if len(signals) > 1:
            yield Problem(
                where("columns"),
                f"uses column {name!r} for {' and for '.join(signals)}: a column can be only one "
                "signal, else it would be compared with itself",
                "name the column of each",
            )
    if table.curves is None:
        yield Problem(
            where("curves"),
            "is missing: without the probe it is the only evidence of a run",
            f'such as curves = "{OUTPUT}loss.csv"',
        )
    elif not _is_of_the_run(table.curves):
        yield Problem(
            where("curves"),
            f"{table.curves!r} is not in the run's own folder, so it could be the curve "
            "of another run",
            f'start it with "{OUTPUT}", and pass {{output}} to the program',
        )


def checkpoint_form(table: CommandTable) -> CheckpointForm | None:
    """What the program's checkpoints look like, if the table says so."""
    written = table.checkpoints
    return None if written is None else CheckpointForm(written.name, written.last_file)


def _checkpoint_problems(table: CommandTable, where: Where) -> Iterator[Problem]:
    """Placeholders by which a program is resumed, and what ``[trainer.checkpoints]`` needs."""
    if table.checkpoints is None:
        for key, text in _templates(table):
            with suppress(TemplateError):  # reported once, for the file
                for name in dict.fromkeys(placeholders(text)):
                    if name in OF_CHECKPOINTS:
                        yield Problem(
                            where(key),
                            f"{{{name}}} has no value without the table trainer.checkpoints",
                            f"add [trainer.checkpoints] with {NAME_EXAMPLE}",
                        )
        return
    form = table.checkpoints
    if form.last_file is not None and STEP not in form.name:
        yield Problem(
            where("checkpoints.last_file"),
            f"is in a folder, and {form.name!r} is one file, which every save overwrites",
            f"leave it out, or put {STEP} into name if every step has a folder",
        )
    if _is_readable(table) and CHECKPOINT_DIR not in _names(table):
        yield Problem(
            where("checkpoints"),
            f"is where converge looks, but nothing tells the program: no argument and no variable "
            f"of it has {{{CHECKPOINT_DIR}}}",
            f'such as "--checkpoints", "{{{CHECKPOINT_DIR}}}" in trainer.command',
        )


WRITES_CHECKPOINTS = "a program that writes checkpoints while it trains"


def lacks(kind: Kind, command: Command) -> tuple[str, str]:
    """What a program would have to offer for sets of an elastic or fault kind, and how.

    Both empty if it can be stopped and resumed as they need.
    """
    needed, purpose = {
        Kind.ELASTIC: (STOP_AT, "a program that stops where a segment ends"),
        Kind.FAULT: (CHECKPOINT_EVERY, WRITES_CHECKPOINTS),
    }[kind]
    if kind is Kind.FAULT and command.launcher is RankLauncher.SRUN:
        why = (
            "needs ranks that converge or torchrun can start again: launcher = 'srun' starts them "
            "on a cluster only, where converge does not run"
        )
        return why, f"trainer.launcher = {RankLauncher.TORCHRUN.value!r}"
    why, hint = _checkpoints_lack(command, needed, purpose)
    return (why, hint) if why else _curve_lacks(kind, command)


def lacks_to_continue(command: Command) -> tuple[str, str]:
    """The same for a run of any kind that continues once it was interrupted, by any launcher."""
    if not command.probed:
        return "needs the probe, which records what it resumes from", PROBE
    return _checkpoints_lack(command, CHECKPOINT_EVERY, WRITES_CHECKPOINTS)


def _checkpoints_lack(command: Command, needed: str, purpose: str) -> tuple[str, str]:
    """The same of its checkpoints, and of the placeholder ``needed``, which is for ``purpose``."""
    if command.checkpoints is None:
        return (
            "needs checkpoints, and nothing says where the program writes them",
            f"add [trainer.checkpoints] with {NAME_EXAMPLE} (docs/resumes.md)",
        )
    if needed not in passed(command):
        option = f'"--{needed.replace("_", "-")}", "{{{needed}}}"'
        why = f"needs {purpose}, and nothing passes {{{needed}}} to it"
        return why, f"such as {option} in trainer.command"
    return "", ""


def _curve_lacks(kind: Kind, command: Command) -> tuple[str, str]:
    """The same of the curve that a program without the probe leaves of each of its starts."""
    form = command.checkpoints
    if not command.probed and form is not None and form.is_overwritten:
        why = f"needs {STEP} in the name of checkpoints: a curve does not show of which step "
        return f"{why}{form.name!r} is, which every save overwrites", f"such as {NAME_EXAMPLE}"
    if command.mean_over != 1:
        return (
            "needs the loss of every step, and mean_over says that a row is a mean over several",
            "let the program log every step",
        )
    curve = PurePath(command.curves or "")
    if curve.name == TRAINER_STATE:
        why = f"needs a curve of each start alone: {TRAINER_STATE} has the rows of all starts"
        return why, "name a file to which the program writes the steps of this start"
    if kind is Kind.FAULT and curve.suffix == ".json":
        why = "needs a curve that grows by rows: of one JSON value, a kill may leave half"
        return why, "write each step as a line of its own, to a .jsonl or .csv file"
    return "", ""


SIZES = ("local_batch_size", "global_batch_size")


def not_passed(spec: SetSpec, control: SetSpec, accumulated: int) -> str:
    """Why a program cannot learn what a ``space_time`` set wants of it, as a clause; or empty.

    What a program is not told, it does as for its control: ranks that get neither
    ``{dp_replicate}`` nor ``{dp_shard}`` hold the parameters as the control's do, and accumulate as
    many microbatches. ``accumulated``: microbatches of a rank in a step.
    """
    given = set(passed(spec.trainer.settings))
    given |= {size for size in SIZES if f"{CONFIG}training.{size}" in given}
    needed = _of_degrees(spec.parallelism, control.parallelism, given)
    if RESHARD in spec.overrides:
        needed = (*needed, CONFIG + RESHARD)
    knows_accumulation = "gradient_accumulation_steps" in given
    as_control = accumulated == _accumulated_by(control)
    if not (as_control or knows_accumulation):
        needed = (*needed, *SIZES)
    elif spec.setting(LOCAL_BATCH) != control.setting(LOCAL_BATCH):
        needed = needed if "global_batch_size" in given else (*needed, "local_batch_size")
    if spec.trainer.settings.launcher is RankLauncher.NONE:
        needed = (*needed, *_of_ranks(spec.parallelism, control.parallelism, given))
    missing = [f"{{{name}}}" for name in dict.fromkeys(needed) if name not in given]
    return f"nothing passes {' and '.join(missing)} to the program" if missing else ""


def _accumulated_by(control: SetSpec) -> int:
    """Microbatches of a rank in a step; 1 for wrong sizes, which are reported elsewhere."""
    local, samples = control.setting(LOCAL_BATCH), control.setting(GLOBAL_BATCH, -1)
    if not (isinstance(local, int) and isinstance(samples, int)) or min(local, samples) < 1:
        return 1
    return samples // (local * control.parallelism.dp)


def _of_degrees(
    degrees: Parallelism, control: Parallelism, given: Collection[str]
) -> tuple[str, ...]:
    """The placeholders that say how the ranks of a set hold the parameters."""
    pipeline = ("pp",) if degrees.pp > 1 else ()
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        return (*pipeline, "dp_replicate", "dp_shard")
    if degrees.dp == 1:
        return pipeline
    shards = degrees.dp_shard > 1
    if "dp_shard" in given or ("dp_replicate" in given and not shards):
        return pipeline
    one_way = (control.dp_shard > 1) != (control.dp_replicate > 1)
    as_control = "dp_replicate" not in given and one_way and shards is (control.dp_shard > 1)
    return pipeline if as_control else (*pipeline, "dp_shard")


def _of_ranks(
    degrees: Parallelism, control: Parallelism, given: Collection[str]
) -> tuple[str, ...]:
    """The placeholder by which a program without a launcher learns how many ranks it has."""
    said = {"ranks", "dp", *asdict(degrees)}
    told = degrees.world_size == control.world_size or said & set(given)
    return () if told else ("ranks",)


def restart_problems(spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Restarts in place, which repeat one command, of a program that needs another each time."""
    recovery, command = spec.recovery, spec.trainer.settings
    in_place = recovery is not None and recovery.restarts is RestartOwner.TORCHRUN
    if in_place and RESUME_FROM in passed(command):
        yield Problem(
            where("restarts"),
            f"torchrun starts the same command again, in which {{{RESUME_FROM}}} is still empty: "
            "the program would start over",
            f"restarts = {RestartOwner.HARNESS.value!r}, or let the program look for its newest "
            f"checkpoint in {{{CHECKPOINT_DIR}}} and leave {{{RESUME_FROM}}} out",
        )


FIXED_RANKS = ("ranks", "dp", "dp_replicate", "dp_shard", "gradient_accumulation_steps")
"""Placeholders whose value is that of all nodes, however many are there."""


def node_problems(spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Numbers of ranks in the command of a program whose nodes come and go."""
    recovery, command = spec.recovery, spec.trainer.settings
    if recovery is None or recovery.nodes[0] == recovery.nodes[1]:
        return
    for name in (name for name in FIXED_RANKS if name in passed(command)):
        yield Problem(
            where("nodes"),
            f"{{{name}}} is put into the command once, and changes as nodes leave or join",
            "let it ask torch.distributed.get_world_size() instead",
        )
    joins = any(fault.kind is FaultKind.JOIN for fault in recovery.faults)
    if joins and recovery.restarts is RestartOwner.HARNESS and RESUME_FROM in passed(command):
        yield Problem(
            where("faults"),
            "when a node joins, torchrun starts the same command again, in which "
            f"{{{RESUME_FROM}}} is still that of the start before: the program would go on from an "
            "older step",
            f"let the program look for its newest checkpoint in {{{CHECKPOINT_DIR}}} and leave "
            f"{{{RESUME_FROM}}} out",
        )


def torn_problems(spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Truncated checkpoints of a program: which rank wrote what is not known.

    And if there is only one file, cutting it leaves nothing from which training could go on.
    """
    faults = spec.recovery.faults if spec.recovery else ()
    form = spec.trainer.settings.checkpoints
    truncated = [each for each in faults if each.torn is Torn.TRUNCATED]
    if truncated and form is not None and form.is_overwritten:
        yield Problem(
            where("faults"),
            f"ckpt_torn with torn = {Torn.TRUNCATED.value!r} cuts {form.name!r}, the only "
            "checkpoint, so nothing would be left to go on from",
            "leave torn out: then the rank dies while it writes the next one",
        )
    if any(each.rank for each in truncated):
        yield Problem(
            where("faults"),
            "ckpt_torn has a rank, but of a program's checkpoint the largest file is cut, "
            "whichever rank wrote it",
            "leave rank out",
        )


def _is_of_the_run(curves: str) -> bool:
    rest = curves.removeprefix(OUTPUT)
    return rest not in (curves, "") and ".." not in PurePath(rest).parts and "{data}" not in rest


def set_problems(
    table: CommandTable, spec: SetSpec, own: Mapping[str, object], where: Where, whole: Where
) -> Iterator[Problem]:
    """Problems of one set: placeholders without a value, settings that nothing reads.

    Args:
        table: ``[trainer]``.
        spec: the set.
        own: its own ``set``, dotted.
        where: maps a key of the set to its place.
        whole: maps a key of ``[trainer]`` to its place.
    """
    keys = {key for key, _ in flatten(dict(spec.train_config.settings))}
    yield from _misspelt(table, spec, keys)
    for key in sorted(spec.overrides.keys() - keys - OURS):
        place = where if key in own else whole
        yield Problem(
            place(f"set.{key}"),
            f"is not a key of the train config {spec.train_config.path}, so nothing would read it",
            suggest(key, sorted(keys | OURS)),
        )
    for key, text in _templates(table):
        try:
            names = placeholders(text)
        except TemplateError:  # reported once, for the file
            continue
        listed = listed_key(text)
        if listed is not None and _missing(CONFIG + listed, spec) is None:
            yield from _not_listed(text, spec.setting(listed), where=whole(key))
        for name in dict.fromkeys(names):
            if (message := _missing(name, spec)) is not None:
                valid = [f"{CONFIG}{each}" for each in sorted(keys)]
                hint = suggest(name, valid) if name.startswith(CONFIG) else ""
                yield Problem(whole(key), f"{{{name}}} {message}", hint)
    read = set(_names(table))
    if not _is_readable(table) or any(_missing(name, spec) for name in read):
        return  # a placeholder refused above may be this key, misspelt
    for key in sorted((own.keys() & keys) - OURS):
        if CONFIG + key not in read:
            yield Problem(
                where(f"set.{key}"),
                "has no effect: no argument and no variable of the program has "
                f"{{{CONFIG}{key}}}, so this set would run as if it were not set",
                f'such as "--{key.rpartition(".")[2]}", "{{{CONFIG}{key}}}" in trainer.command',
            )


def _not_listed(text: str, value: object, where: str) -> Iterator[Problem]:
    """The value of ``{*config.KEY}``, if it is not a list of arguments."""
    if not is_list(value):
        given = json.dumps(value)
        yield Problem(
            where,
            f"{text!r} is a list of arguments, and the train config has {given}",
            'write a list of texts, such as ["--fused"], or [] for none',
        )


def _misspelt(table: CommandTable, spec: SetSpec, keys: set[str]) -> Iterator[Problem]:
    """Keys of the train config that are nearly one that converge reads, and that nothing reads."""
    ours = sorted({*OURS, spec.trainer.keys.warmup_steps} - {""})
    theirs = {name.removeprefix(CONFIG) for name in _names(table)}
    for key in sorted(keys - theirs - {*ours}):
        if any(_is_slip(_letters(key), _letters(each)) for each in ours):
            yield Problem(
                f"{spec.train_config.path}: {key}",
                "is not a key that converge reads, and no placeholder passes it to the program",
                f"{suggest(key, ours)}; if it is the program's own, pass it: "
                f'"--{key.rpartition(".")[2]}", "{{{CONFIG}{key}}}" in trainer.command',
            )


def _letters(key: str) -> str:
    return key.casefold().replace("-", "").replace("_", "")


def _is_slip(written: str, meant: str) -> bool:
    """Whether two words differ by at most one letter, or by two that have changed places."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(written, meant, strict=False))))
    ours, theirs = written[same:], meant[same:]
    while ours and theirs and ours[-1] == theirs[-1]:
        ours, theirs = ours[:-1], theirs[:-1]
    return max(len(ours), len(theirs)) <= 1 or (len(ours) == 2 and ours == theirs[::-1])  # noqa: PLR2004


def _missing(name: str, spec: SetSpec) -> str | None:
    """Why a placeholder has no value in a set; None if it has one, or was already refused."""
    config: TrainConfig = spec.train_config
    if name == "data" and config.data is None:
        return f"needs a corpus, but there is no [converge.data] in {config.path}"
    if not name.startswith(CONFIG):
        return None
    value: object = spec.setting(name.removeprefix(CONFIG))
    if value is None:
        return f"is not a key of the train config {config.path}"
    if isinstance(value, Mapping):
        return f"is a table, not a value, in the train config {config.path}"
    return None
