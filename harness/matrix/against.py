"""``converge run --against REV``: compares a matrix with itself run on an earlier revision's code.

The *fork* is the git checkout whose code is compared: the one from which the experiment's Python
imports torchtitan (an editable install), or else the one with the experiment's own code (programs,
injected functions …). The earlier revision, the *base*, is checked out in a separate folder, which
its ranks search first. The files that ranks really imported are compared with the revision
afterwards, because a run of other code shows nothing.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from converge_harness.checkout import (
    SHORT,
    beside,
    checkout_of,
    commit_of,
    described,
    is_dirty,
    require_git,
    unignored_files,
)
from converge_harness.errors import CheckoutError, ConfigError, Problem
from converge_harness.matrix.calibrate import calibrate_controls
from converge_harness.matrix.judge import Judged, read_evidence
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.run import Ran, gpu_ids
from converge_harness.model import (
    Experiment,
    Job,
    Judgement,
    Plan,
    Role,
    RunRecord,
    RunStatus,
    Sameness,
    SetSpec,
    Toolchain,
    TrainConfig,
    TrainerSpec,
)
from converge_harness.report import Against, ChangedSet, ReportView, TestView
from converge_harness.store import read_json, write_json
from converge_harness.toolchains.user_python import cache_folder
from converge_harness.trainers import trainer_of, trainer_of_kind

FILE = "against.json"
COMPARED = (Role.ANCHOR, Role.CONTROL, Role.TEST)
_NO_CODE = frozenset({"name", "note", "overrides", "toolchain", "tolerances", "train_config"})
"""Fields of a set whose paths are not the user's code."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A git checkout whose code is compared with one of its revisions."""

    checkout: Path
    revision: str
    """As the user wrote it."""
    commit: str

    @property
    def title(self) -> str:
        """``HEAD~1 (1a2b3c4d5e6f)``."""
        return f"{self.revision} ({self.commit[:SHORT]})"


@dataclass(frozen=True, slots=True)
class BaseRevision:
    """The matrix with the code of the base revision."""

    fork: Fork
    folder: Path
    """Where the revision is checked out."""
    plan: Plan
    missing: Mapping[str, str]
    """By name of a test set that it cannot run, the file that the revision does not have."""


def fork_of(plan: Plan, revision: str, option: str = "") -> Fork:
    """The checkout that a plan tests, and the commit that a revision means there.

    ``option`` is what messages begin with; empty: ``--against`` with the revision.

    Raises CheckoutError where there is no such checkout, several, or no such revision, or no git.
    """
    require_git(option or revision)
    imported = _checkouts(folder for job in plan.jobs for folder in _forked(job.toolchain))
    own = _checkouts(path for job in plan.jobs for path in _own_paths(job.spec))
    found = imported or own
    option = option or f"--against {revision}"
    if not found:
        raise CheckoutError(
            f"{option}: none of the code that {plan.experiment.path} trains with is in "
            "a git checkout; install your fork editable (python -m pip install -e FORK) and name "
            'that Python by toolchain = { python = "PATH" }, or commit the files of your own code'
        )
    if len(found) > 1:
        listed = " and ".join(map(str, found))
        raise CheckoutError(
            f"{option}: the experiment uses code of several checkouts ({listed}), and "
            "a revision belongs to one: choose other sets"
        )
    return Fork(found[0], revision, commit_of(found[0], revision))


@contextmanager
def base_of(plan: Plan, fork: Fork) -> Iterator[BaseRevision]:
    """The same matrix with the code of the revision, checked out until the block ends.

    Raises:
        CheckoutError: the revision cannot be checked out.
        ConfigError: a control of the matrix is not possible at that revision.
        ToolchainError: its torchtitan cannot be driven.
    """
    with beside(fork.checkout, fork.commit, cache_folder() / "worktrees") as folder:
        experiment, missing = _at(plan.experiment, fork, folder)
        toolchains = {job.toolchain.name: job.toolchain for job in plan.jobs}

        def find(name: str, *, trainer: TrainerSpec | None = None) -> Toolchain:
            found = toolchains[name]
            first = tuple(
                moved
                for each in found.sources
                if each.resolve().is_relative_to(fork.checkout)
                and (moved := folder / each.resolve().relative_to(fork.checkout)).is_dir()
            )
            if not first or trainer is None:
                return found
            return trainer_of_kind(trainer.kind).with_code(found, first, trainer)

        try:
            made = plan_experiment(experiment, on_gpu=bool(gpu_ids()), find=find)
        except ConfigError as error:
            raise ConfigError(
                [replace(each, where=f"at {fork.title}: {each.where}") for each in error.problems]
            ) from None
        yield BaseRevision(fork, folder, made, missing)


def compare_with_base(
    base: BaseRevision, before: tuple[Ran, Judged], plan: Plan, after: tuple[Ran, Judged]
) -> Against:
    """Compare every control and test set of a matrix with the same one with the base's code."""
    from converge_harness.judge import classify  # noqa: PLC0415 - needs scipy

    theirs, ours = (
        read_evidence(made, ran.records, ran.kept)
        for made, ran in ((base.plan, before[0]), (plan, after[0]))
    )
    calibrations = calibrate_controls(base.plan, theirs)
    jobs = {job.name: job for job in base.plan.jobs}
    records = {
        job.name: record for job, record in zip(base.plan.jobs, before[0].records, strict=True)
    }
    verdicts = [
        {verdict.name: verdict.judgement for verdict in judged.verdicts}
        for _, judged in (before, after)
    ]
    sets = []
    for job in plan.jobs:
        if job.role not in COMPARED or job.baseline is not None:
            continue
        judged = [each.get(job.name) for each in verdicts]
        row = ChangedSet(job.name, Sameness.UNKNOWN, "", *judged)
        if job.name in base.missing:
            lacks = f"{base.fork.title} has no {base.missing[job.name]}: the set is new"
            sets.append(replace(row, sentence=lacks))
            continue
        earlier = jobs[job.name]
        why = _of_other_code(base, records, earlier) or next(
            (
                f"{when}: {each.error.text if each.error else each.problems[0]}"
                if each.error or each.problems
                else f"{when}: the run is not complete"
                for when, each in (("before", theirs[job.name]), ("after", ours[job.name]))
                if not each.complete or each.status is not RunStatus.FINISHED
            ),
            "",
        )
        if why:
            sets.append(replace(row, sentence=why))
            continue
        found = classify(
            ours[job.name],
            theirs[job.name],
            calibrations.get(_control_of(base.plan, earlier)),
            spec=job.spec,
            before_spec=earlier.spec,
        )
        sets.append(replace(row, sameness=found.sameness, sentence=found.sentence))
    return Against(
        revision=base.fork.revision,
        commit=base.fork.commit[:SHORT],
        fork=str(base.fork.checkout),
        tree=described(base.fork.checkout),
        head="" if is_dirty(base.fork.checkout) else commit_of(base.fork.checkout, "HEAD")[:SHORT],
        sets=tuple(sets),
    )


def shown_with(view: ReportView, plan: Plan, against: Against | None) -> ReportView:
    """The view with the comparison; the next command of a set that it broke finds the commit."""
    if against is None:
        return view
    broken = {
        each.name
        for each in against.sets
        if (each.before, each.after) == (Judgement.PASS, Judgement.FAIL) and against.head
    }

    def bisected(test: TestView) -> TestView:
        if test.verdict.name not in broken:
            return test
        asked = ("--set", test.verdict.name, "--good", against.commit, "--bad", against.head)
        command = shlex.join(("converge", "bisect", str(plan.experiment.path), *asked))
        said = f"{command} --of code  # which commit made it fail"
        return replace(test, verdict=replace(test.verdict, next_command=said))

    return replace(view, tests=tuple(map(bisected, view.tests)), against=against)


def write_against(folder: Path, against: Against | None) -> None:
    """Store the comparison for ``converge report``; None: there is none."""
    path = folder / FILE
    if against is None:
        path.unlink(missing_ok=True)
        return
    write_json(path, {"against": _STORED.dump_python(against, mode="json")})


def read_against(folder: Path) -> Against | None:
    """What ``write_against`` stored; None if that is nothing, or was written by another version."""
    path = folder / FILE
    try:
        return _STORED.validate_python(read_json(path)["against"]) if path.is_file() else None
    except (KeyError, ValidationError):
        return None


_STORED = TypeAdapter(Against)


def of_other_code(fork: Fork, folder: Path, record: RunRecord) -> str:
    """A clause on a file that a run of the base imported and that is not the base's; empty if none.

    ``folder`` is where the revision is checked out.
    """
    known = unignored_files(fork.checkout)
    for path, digest in record.sources.items():
        if not Path(path).is_relative_to(fork.checkout):
            continue
        name = Path(path).relative_to(fork.checkout).as_posix()
        if name in known and digest != _digest(folder / name):
            return (
                f"its ranks imported {path}, which differs from {fork.title}, so the run of "
                "the base did not use the base's code"
            )
    return ""


def _of_other_code(base: BaseRevision, records: Mapping[str, RunRecord], job: Job) -> str:
    """The same for a job and for the seed-checkpoint job of its initial weights."""
    seeds = {each.identity: each.name for each in base.plan.jobs if each.role is Role.SEED}
    names = [job.name, *filter(None, [seeds.get(job.needs or "")])]
    found = (of_other_code(base.fork, base.folder, records[name]) for name in names)
    return next(filter(None, found), "")


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _control_of(plan: Plan, job: Job) -> str:
    if job.role is Role.ANCHOR:
        return plan.experiment.controls[0].name
    return job.spec.control or job.name


def _forked(toolchain: Toolchain) -> tuple[Path, ...]:
    """Folders from which a toolchain imports a torchtitan that is not in its packages."""
    name = next(iter(toolchain.code), "")
    return tuple(each for each in toolchain.sources if name and (each / name).is_file())


def _checkouts(paths: Iterator[Path]) -> tuple[Path, ...]:
    found = (checkout_of(path) for path in dict.fromkeys(paths) if path.exists())
    return tuple(dict.fromkeys(each for each in found if each is not None))


# ------------------------------------------------------------------ own files of an experiment


def _at(experiment: Experiment, fork: Fork, folder: Path) -> tuple[Experiment, dict[str, str]]:
    """The experiment with its own code of a revision, and the test sets that it lacks.

    Its control is repeated, because a calibration or baseline belongs to the working tree's code.
    """
    known = unignored_files(fork.checkout)

    def moved(path: Path) -> Path:
        real = path.resolve()
        inside = real.is_relative_to(fork.checkout)
        name = real.relative_to(fork.checkout) if inside else None
        in_git = name is not None and (name.as_posix() in known or real.is_dir())
        return folder / name if name is not None and in_git else path

    def of_set(spec: SetSpec) -> SetSpec:
        changed = {name: changed_paths(value, moved) for name, value in _code(spec)}
        return replace(spec, **changed, train_config=_config(spec, moved))

    missing = {
        spec.name: lost[0].resolve().relative_to(fork.checkout).as_posix()
        for spec in experiment.tests
        if (lost := [each for each in _own_paths(spec) if not moved(each).exists()])
    }
    for spec in experiment.controls:
        for path in _own_paths(spec):
            if not moved(path).exists():
                raise ConfigError(
                    Problem(
                        f"at {fork.title}",
                        f"the control {spec.name!r} uses {path}, which is not in {fork.revision}",
                        "choose a later revision, or another control",
                    )
                )
    return (
        replace(
            experiment,
            name=f"{experiment.name} at {fork.title}",
            calibration=None,
            baseline=None,
            anchor=of_set(experiment.anchor) if experiment.anchor else None,
            controls=tuple(map(of_set, experiment.controls)),
            tests=tuple(of_set(each) for each in experiment.tests if each.name not in missing),
        ),
        missing,
    )


def _code(spec: SetSpec) -> Iterator[tuple[str, Any]]:
    for each in fields(spec):
        if each.name not in _NO_CODE:
            yield each.name, getattr(spec, each.name)


def _config(spec: SetSpec, change: Callable[[Path], Path]) -> TrainConfig:
    """A set's train config with the paths of its code changed; strings in it are settings."""
    config = spec.train_config
    parts = ((each.name, getattr(config, each.name)) for each in fields(config))
    changed: dict[str, Any] = {name: change(part) for name, part in parts if isinstance(part, Path)}
    return replace(config, **changed)


def _own_paths(spec: SetSpec) -> tuple[Path, ...]:
    """Files and folders of the user's own code that a set names."""
    found: list[Path] = [source.path for source in trainer_of(spec).sources(spec)]

    def note(path: Path) -> Path:
        found.append(path)
        return path

    for _, value in _code(spec):
        changed_paths(value, note)
    _config(spec, note)
    return tuple(dict.fromkeys(found))


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a text that is too long for a path
        return False


def changed_paths(value: Any, change: Callable[[Path], Path]) -> Any:
    """A value with every absolute path in it changed, also that of ``/path/to/file.py:function``.

    What holds none is returned as it is: some fields do not count when values are compared.
    """
    made = value
    if isinstance(value, Path) and value.is_absolute():
        made = change(value)
    elif isinstance(value, str) and value.startswith("/"):
        path, colon, function = value.partition(":")
        made = f"{change(Path(path))}{colon}{function}" if _exists(path) else value
    elif isinstance(value, tuple):
        parts = dict(enumerate(value))
        made = tuple(_changed_parts(parts, change).values()) or value
    elif isinstance(value, Mapping):
        made = _changed_parts(value, change) or value
    elif is_dataclass(value) and not isinstance(value, type):
        made_of = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        changed = _changed_parts(made_of, change)
        made = replace(value, **changed) if changed else value
    return made


def _changed_parts(parts: Mapping[Any, Any], change: Callable[[Path], Path]) -> dict[Any, Any]:
    """Parts of a value with paths in them changed; empty where none has one."""
    made = {key: changed_paths(each, change) for key, each in parts.items()}
    return made if any(made[key] is not parts[key] for key in made) else {}
