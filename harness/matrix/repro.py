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
from converge_harness.matrix.pair_files import EXPERIMENT, SHRUNK, write_pair
from converge_harness.model import Check, Experiment, Job, Judgement, Outcome, Plan, Verdict
from converge_harness.plan import select
from converge_harness.report import Reproduction, issue_draft
from converge_harness.shrink import why_not
from converge_harness.store import atomic_write, read_json, write_json

ISSUE = "ISSUE.md"
_ABSOLUTE = re.compile(r'"(/[^"]+)"')
EXPECTED = "expected.json"
REQUIREMENTS = "requirements.txt"
SCRIPT = "run.sh"
_REQUIRED = f"""\
# Not on PyPI yet: install it from its repository before (`pip install .` in a checkout).
converge-harness=={__version__}
"""
_HERE = ("set -euo pipefail", 'cd "$(dirname "$0")"')


@dataclass(frozen=True, slots=True)
class Repro:
    """A written folder."""

    folder: Path
    files: tuple[Path, ...]
    personal: tuple[str, ...]
    """Where it names folders, the host or the user of this machine, in clauses."""


def write_repro(report: Path, name: str, folder: Path) -> Repro:
    """Write one failed test set of a report.

    Args:
        report: the ``--out`` folder of a run.
        name: of the test set.
        folder: which need not exist.

    Raises:
        ConfigError: there is no such set, it does not fail, or it cannot stand alone.
        StoreError: the report cannot be judged again, or the folder cannot be written.
    """
    finished, _, judged = conclude_again(report)
    plan = finished.plan
    alone = select(plan.experiment, [name])
    verdict = next((each for each in judged.verdicts if each.name == name), None)
    place = str(plan.experiment.path)
    if verdict is None or verdict.judgement is not Judgement.FAIL:
        said = "no test set" if verdict is None else f"{verdict.judgement.value}, not FAIL"
        raise ConfigError(Problem(place, f"{name!r} is {said}", "only a failure is reproduced"))
    why = why_not(alone.tests[0])
    if plan.experiment.baseline or plan.experiment.calibration:
        why = "is judged by a baseline or a calibration file, which stay here"
    if why:
        raise ConfigError(Problem(place, f"{name!r} {why}"))
    job = plan.job(name)
    self_contained = _as_run(alone, plan)
    pair = write_pair(
        self_contained, f"{name}-repro", folder, f"{name}: {_without_places(verdict.cause)}"
    )
    _write(folder / REQUIREMENTS, _REQUIRED)
    commands = tuple(_commands(alone))
    _write(folder / SCRIPT, "\n".join(("#!/usr/bin/env bash", *_HERE, *commands, "")))
    write_json(folder / EXPECTED, _expected(verdict, finished.versions))
    draft = issue_draft(
        judged.view,
        name,
        Reproduction(commands, _needs(plan.experiment.path), _sizes(job)),
    )
    _write(folder / ISSUE, _without_places(draft))
    own = (folder / each for each in (REQUIREMENTS, SCRIPT, EXPECTED, ISSUE))
    files = tuple(sorted((*pair, *own)))
    return Repro(folder, files, tuple(_personal(files, folder)))


def _as_run(alone: Experiment, plan: Plan) -> Experiment:
    """The experiment with what was chosen when it ran: another machine may choose otherwise."""
    chosen = {job.name: job.spec.spmd_backend for job in plan.jobs}
    return replace(
        alone,
        anchor=None,
        controls=tuple(replace(s, spmd_backend=chosen[s.name]) for s in alone.controls),
        tests=tuple(replace(s, spmd_backend=chosen[s.name]) for s in alone.tests),
    )


def _commands(alone: Experiment) -> Iterator[str]:
    yield f"python -c 'import converge_harness' || pip install -r {REQUIREMENTS}"
    names = dict.fromkeys(spec.toolchain for spec in (*alone.controls, *alone.tests))
    for name in names:
        if "/" not in name:  # an environment of one's own has to be there
            yield shlex.join(["converge", "toolchain", "build", name])
    yield f"converge run {EXPERIMENT}"


def _expected(verdict: Verdict, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "verdict": verdict.judgement.value,
        "cause_class": None if verdict.cause_class is None else verdict.cause_class.value,
        "cause": _without_places(verdict.cause),
        "onset_step": verdict.onset_step,
        "failed_checks": [_as_json(c) for c in verdict.checks if c.outcome is Outcome.FAIL],
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
        found = read_json(experiment.parent / SHRUNK)["needs"]
        return [str(each) for each in found]
    except (StoreError, KeyError, TypeError):
        return ()


def _sizes(job: Job) -> str:
    model = ", ".join(f"{key} {value}" for key, value in job.spec.train_config.model.items())
    data = f"{job.steps} steps of {job.global_batch_size} x {job.seq_len} tokens"
    computed = f"computed in {job.precision.value}"
    return ", ".join(part for part in (data, computed, model) if part)


def _write(path: Path, text: str) -> None:
    atomic_write(path, text.encode())


def _places() -> dict[str, str]:
    """Folders that tell of this machine, and what stands for them."""
    found = {str(Path.cwd()): "", str(Path.home()): "~"}
    return {place: instead for place, instead in found.items() if place != "/"}


def _without_places(text: str) -> str:
    """Without the working and the home folder."""
    for place, instead in _places().items():
        whole = rf"(?<![\w/.]){re.escape(place)}(?![\w.-])"
        text = re.sub(whole if instead else f"{whole}/", instead, text)
    return text


def _personal(files: Sequence[Path], folder: Path) -> Iterator[str]:
    """Files that name this machine's folders, its host or its user all the same."""
    words = {*_places(), socket.gethostname()}
    with suppress(KeyError, OSError, ImportError):  # a container's user may have no name
        words |= {f"/{getpass.getuser()}/", f"{getpass.getuser()}@"}
    for path in files:
        text = path.read_text(errors="replace")
        for word in sorted(word for word in words if len(word) > 1 and word in text):
            yield f"{path.relative_to(folder)} has {json.dumps(word)}"
        if path.suffix == ".toml":
            for found in sorted(set(_ABSOLUTE.findall(text))):
                yield f"{path.relative_to(folder)} names {found}, which nobody else has"
