"""Writes a failed test set as a folder that somebody else can run, with a draft of an issue."""

from __future__ import annotations

import getpass
import json
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converge_harness import __version__
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.matrix.conclude import conclude_again
from converge_harness.matrix.environment_files import Environment, environments_of
from converge_harness.matrix.failure import TAKEN, is_failure
from converge_harness.matrix.pair_files import (
    EXPERIMENT,
    SHRUNK,
    pair_files,
    require_free,
    why_not_for_others,
    write_files,
)
from converge_harness.matrix.save import SavedMatrix, code_of
from converge_harness.model import (
    Check,
    Experiment,
    Job,
    Kind,
    Plan,
    RestartOwner,
    SetSpec,
    Verdict,
)
from converge_harness.plan import select
from converge_harness.report import Reproduction, issue_draft
from converge_harness.store import as_bytes, read_json
from converge_harness.trainers import trainer_of
from converge_harness.wording import counted

ISSUE = "ISSUE.md"
EXPECTED = "expected.json"
BISECTED = "bisected.json"
"""In the folder of ``converge bisect``: what it has found."""
REQUIREMENTS = "requirements.txt"
SCRIPT = "run.sh"
_REQUIRED = f"""\
# Not on PyPI yet: install it from its repository before (`pip install .` in a checkout).
converge-harness=={__version__}
"""
_HERE = ("set -euo pipefail", 'cd "$(dirname "$0")"')
_PATH = re.compile(r"(?:(?<![\w.:/<>~-])|\bfile://)/(?:[\w.@+-]+/)+[\w.@+-]*")
"""An absolute path in a text, no part of a URL but of a file's."""
_VALUE = re.compile(r"""["'=]((?:\.\./|/)[^"']+)["']""")
"""A path out of the folder as a value of a TOML file, or of an option in one."""
_LITERAL = re.compile(r"""["'](/(?!bin/|dev/|etc/|proc/|sys/|usr/|v\d)[\w.@+-]+/[^"'\s]+)["']""")
"""An absolute path as a whole string of a Python file, but those that every machine has."""
_SECRET = re.compile(r'\b("?[\w-]*(?:TOKEN|KEY|SECRET|PASSWORD)"?) = "')
"""A variable of ``environment``, or a key in capitals, whose value nobody else should read."""


@dataclass(frozen=True, slots=True)
class Repro:
    """A written folder."""

    folder: Path
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    """Why others cannot use it as it is: where it names this machine, and packages that no index
    has; in clauses."""


def write_repro(report: Path, name: str, folder: Path, bisected: Path | None = None) -> Repro:
    """Write one failed test set of a report.

    Args:
        report: the ``--out`` folder of a run.
        name: of the test set.
        folder: which need not exist.
        bisected: folder of ``converge bisect`` of the set, whose result the draft then has.

    Raises:
        ConfigError: there is no such set, it does not fail, it cannot stand alone, or its code or
            environment has changed since; or the search did not find one revision.
        ToolchainError: the Python of its environment does not start.
        StoreError: the report cannot be judged again, or the folder cannot be written.
    """
    finished, _, judged = conclude_again(report)
    plan = finished.plan
    alone = select(plan.experiment, [name])
    verdict = next((each for each in judged.verdicts if each.name == name), None)
    place = str(plan.experiment.path)
    if verdict is None or not is_failure(verdict):
        said = "no test set" if verdict is None else f"{verdict.judgement.value}, not FAIL"
        allowed = f"only a set that {TAKEN} is reproduced"
        raise ConfigError(Problem(place, f"{name!r} is {said}", allowed))
    if problem := why_not_for_others(alone, alone.tests[0]):
        raise ConfigError(problem)
    job = plan.job(name)
    self_contained = _as_run(alone, plan)
    _require_same_code(finished, alone)
    environments = environments_of(finished, alone)
    hidden = _Hidden.of(alone, environments)
    pythons = {toolchain: each.python for toolchain, each in environments.items()}
    head = f"{name}: {hidden(verdict.cause)}"
    files = pair_files(self_contained, f"{name}-repro", head, pythons)
    commands = tuple(_commands(alone, environments))
    draft = issue_draft(
        judged.view,
        name,
        Reproduction(
            commands,
            _needs(plan.experiment.path),
            _sizes(job),
            _resumes(job.spec),
            tuple(_differing(alone)),
            "" if bisected is None else _found_in(bisected, name),
        ),
    )
    texts = {
        REQUIREMENTS: _REQUIRED,
        SCRIPT: "\n".join(("#!/usr/bin/env bash", *_HERE, *commands, "")),
        EXPECTED: hidden(as_bytes(_expected(verdict, finished.versions)).decode()),
        ISSUE: hidden(draft),
        **{each.requirements: each.text for each in environments.values()},
    }
    require_free((*texts, *(each.folder for each in environments.values())), files)
    written = write_files(
        {**files, **{path: text.encode() for path, text in texts.items()}}, folder
    )
    lacking = [
        f"{each.requirements} lacks a package: {sentence}"
        for each in environments.values()
        for sentence in each.pinned.lacking
    ]
    return Repro(folder, tuple(sorted(written)), (*_personal(written, folder), *lacking))


def _require_same_code(finished: SavedMatrix, alone: Experiment) -> None:
    """Raise ConfigError if a file that would be copied is not the one that failed."""
    (test,) = alone.tests
    again = f"run it again: converge run {alone.path} --only {test.name}"
    now = code_of(finished.plan)
    for name in _code(alone):
        then = (finished.code or {}).get(name)
        if then != now[name]:
            what = f"has changed since {test.name!r} failed, or a file that it imports has"
            if then is None:
                what = (
                    f"is code of {test.name!r}, and the report is older than digests of such code"
                )
            raise ConfigError(Problem(name, what, again))


def _code(alone: Experiment) -> Iterator[str]:
    """The user's own code of two sets, as ``code_of`` names it."""
    for spec in (*alone.controls, *alone.tests):
        yield from (str(each.path) for each in trainer_of(spec).sources(spec))
        if spec.inject:
            yield spec.inject
        for own in spec.own_techniques:
            yield from own.functions


def _as_run(alone: Experiment, plan: Plan) -> Experiment:
    """The experiment with what was chosen when it ran: another machine may choose otherwise."""
    chosen = {job.name: job.spec.spmd_backend for job in plan.jobs}
    return replace(
        alone,
        anchor=None,
        controls=tuple(replace(s, spmd_backend=chosen[s.name]) for s in alone.controls),
        tests=tuple(replace(s, spmd_backend=chosen[s.name]) for s in alone.tests),
    )


def _commands(alone: Experiment, environments: Mapping[str, Environment]) -> Iterator[str]:
    yield f"python -c 'import converge_harness' || pip install -r {REQUIREMENTS}"
    for name in dict.fromkeys(spec.toolchain for spec in (*alone.controls, *alone.tests)):
        if name in environments:
            yield from environments[name].commands()
        else:
            yield shlex.join(["converge", "toolchain", "build", name])
    yield f"converge run {EXPERIMENT}"


def _expected(verdict: Verdict, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "verdict": verdict.judgement.value,
        "cause_class": None if verdict.cause_class is None else verdict.cause_class.value,
        "cause": verdict.cause,
        "onset_step": verdict.onset_step,
        "failed_checks": [_as_json(check) for check in verdict.decided_by],
        "versions": dict(versions),
    }


def _as_json(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "measured": check.measured,
        "limit": None if check.limit is None else check.limit.value,
        "onset_step": check.onset,
        "tensors": [each.tensor for each in check.deviations],
    }


def _needs(experiment: Path) -> Sequence[str]:
    """What ``converge shrink`` has found out, if it made the experiment."""
    try:
        found = read_json(experiment.parent / SHRUNK)
        flaky = found.get("fails_again") is False
        return () if flaky else [str(each) for each in found["needs"]]
    except (StoreError, KeyError, TypeError):
        return ()


def _found_in(bisected: Path, name: str) -> str:
    """What a search among revisions has found of a set; raises ConfigError if that is not one."""
    path = bisected / BISECTED
    found = read_json(path)
    if (other := found.get("set")) != name:
        raise ConfigError(Problem(str(path), f"is of the set {other!r}, and not of {name!r}"))
    if not (result := str(found.get("result") or "")):
        what = "names no revision that a second run confirmed"
        hint = "run converge bisect again; if only skipped revisions are left, between other ends"
        raise ConfigError(Problem(str(path), what, hint))
    return result


def _sizes(job: Job) -> str:
    model = ", ".join(f"{key} {value}" for key, value in job.spec.train_config.model.items())
    each = counted(job.global_batch_size, "sample")
    if job.spec.trainer.can.counts_tokens:
        each = f"{job.global_batch_size} x {job.seq_len} tokens"
    computed = f"computed in {job.precision.value}"
    return ", ".join(part for part in (f"{job.steps} steps of {each}", computed, model) if part)


def _resumes(spec: SetSpec) -> str:
    """When it is resized or interrupted, and where it saves; empty if it has one pass."""
    if spec.segments:
        until = (f"{each.parallelism} until step {each.until}" for each in spec.segments)
        return f"the failing run is resized: {', '.join(until)}"
    if spec.kind is not Kind.FAULT or spec.recovery is None:
        return ""
    recovery = spec.recovery
    faults = ", ".join(f"{each.kind.value} at step {each.step}" for each in recovery.faults)
    by = "torchrun" if recovery.restarts is RestartOwner.TORCHRUN else "converge"
    saves = f"saves every {counted(recovery.checkpoint_every, 'step')}"
    return f"the failing run {saves} and is interrupted: {faults}; {by} starts it again"


def _differing(alone: Experiment) -> Iterator[str]:
    (control,), (test,) = alone.controls, alone.tests
    for key, value in test.overrides.items():
        if control.setting(key) != value:
            yield f"{key} = {json.dumps(value)}"


class _Hidden:
    """Replaces what identifies this machine: folders, the Python of an environment."""

    def __init__(self, instead: Mapping[str, str]) -> None:
        self._instead = instead

    @classmethod
    def of(cls, alone: Experiment, environments: Mapping[str, Environment]) -> _Hidden:
        """For texts about two sets."""
        specs = (*alone.controls, *alone.tests)
        folders = {
            str(each.folder): "" for spec in specs for each in trainer_of(spec).sources(spec)
        }
        pythons = {
            toolchain: each.python for toolchain, each in environments.items() if "/" in toolchain
        }
        instead = {**pythons, **folders, **_places()}
        return cls({place: each for place, each in instead.items() if place != "/"})

    def __call__(self, text: str) -> str:
        for place, instead in self._instead.items():
            whole = rf"(?<![\w/.]){re.escape(place)}(?![\w.-])"
            text = re.sub(whole if instead else f"{whole}/", instead, text)
        return text


def _places() -> dict[str, str]:
    """Folders that tell of this machine, and what stands for them."""
    return {str(Path.cwd()): "", str(Path.home()): "~"}


def _has(text: str, word: str) -> bool:
    """Whether a text has a word as a whole: the host ``node1`` is not in ``node12``."""
    before = r"(?<![\w-])" if word[0].isalnum() else ""
    after = r"(?![\w-])" if word[-1] != "@" else ""
    return re.search(f"{before}{re.escape(word)}{after}", text) is not None


def _personal(files: Sequence[Path], folder: Path) -> Iterator[str]:
    """Files that name this machine's folders, its host or its user all the same, or a secret."""
    host = socket.gethostname()
    words = {*_places(), host, host.partition(".")[0]} - {"/", "localhost"}
    with suppress(KeyError, OSError, ImportError):  # a container's user may have no name
        words |= {f"/{getpass.getuser()}", f"{getpass.getuser()}@"}
    for path in sorted(files):
        text, name = path.read_text(errors="replace"), path.relative_to(folder)
        for word in sorted(word for word in words if len(word) > 1 and _has(text, word)):
            yield f"{name} has {json.dumps(word)}"
        named: set[str] = set()
        if path.suffix in (".toml", ".txt") or str(name) in (ISSUE, EXPECTED):
            named.update(_PATH.findall(text))
        if path.suffix == ".py":
            named.update(_LITERAL.findall(text))
        if path.suffix == ".toml":
            named.update(_VALUE.findall(text))
            for secret in sorted(set(_SECRET.findall(text))):
                yield f"{name} sets {secret}, which may be a secret"
        for found in sorted(named):
            yield f"{name} names {found}, which nobody else has"
