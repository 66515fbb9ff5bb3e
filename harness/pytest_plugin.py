"""A pytest plugin: ``pytest --converge experiments/*.toml``, a test per test set.

The first test of a file runs ``converge run`` for all chosen test sets of that file, so that their
control runs once; a test fails unless its verdict is PASS, and its message is the cause. ``-k`` and
``--deselect`` choose test sets. With pytest-xdist use ``--dist loadfile``.

pytest loads this module wherever converge is installed: without ``--converge`` it does nothing, and
it imports nothing but pytest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib  # not tomli: pytest loads this plugin in the Python of ranks, too, which lacks it
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

NOT_LAUNCHED = 2
"""Exit code of ``converge run`` for a mistake in the file: there is no report of this run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("converge", "convergence of distributed training (converge)")
    group.addoption(
        "--converge",
        action="store_true",
        help="collect experiment files (TOML with a [control]): each test set is a test",
    )
    group.addoption(
        "--converge-out",
        default="reports",
        metavar="FOLDER",
        help="where reports go, a folder for each experiment file (default: %(default)s)",
    )
    group.addoption(
        "--converge-arg",
        action="append",
        default=[],
        metavar="ARGUMENT",
        help="one more argument for `converge run`, such as --converge-arg=--fresh",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ExperimentFile | None:
    """Collect experiment files; another TOML file only if it is named, to say what is wrong."""
    if file_path.suffix != ".toml" or not parent.config.getoption("--converge"):
        return None
    if parent.session.isinitpath(file_path) or _is_experiment(file_path):
        return ExperimentFile.from_parent(parent, path=file_path)
    return None


def _is_experiment(path: Path) -> bool:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "control" in found or "extends" in found


class ExperimentError(Exception):
    """The experiment did not run; the message says why."""


class ExperimentFile(pytest.File):
    """An experiment file: its tests are its test sets, and its control if there is an anchor."""

    _sets: tuple[str, ...] = ()
    """Names of all that is run and judged; known once it is collected."""
    _left_out: Mapping[str, str] = MappingProxyType({})
    """By name, why a set that the file asks for is not run."""
    _verdicts: Mapping[str, Mapping[str, Any]] | None = None
    _said = ""
    """Why there are no verdicts."""

    def collect(self) -> Iterator[TestSetItem]:
        """Yield a test per test set.

        Raises:
            CollectError: the file is not a valid experiment.
        """
        from converge_harness.errors import ConvergeError
        from converge_harness.experiment import load_experiment

        try:
            experiment = load_experiment(self.path)
        except ConvergeError as error:
            raise self.CollectError(str(error)) from None
        judged = (*(experiment.controls if experiment.anchor else ()), *experiment.tests)
        self._sets = tuple(spec.name for spec in judged)
        self._left_out = {
            name: each.why for name, each in experiment.left_out.items() if each.was_asked_for
        }
        for name in (*self._sets, *self._left_out):
            yield TestSetItem.from_parent(self, name=name)

    def verdict(self, name: str) -> Mapping[str, Any]:
        """The verdict of a test set as in report.json; runs the experiment at the first call.

        Raises:
            ExperimentError: it did not run, or left no verdict of that set.
        """
        if name in self._left_out:
            raise ExperimentError(f"{name} is left out: {self._left_out[name]}")
        if self._verdicts is None:
            self._verdicts = self._run()
        if name not in self._verdicts:
            raise ExperimentError(self._said or f"{self.out}/report.json has no verdict of {name}")
        return self._verdicts[name]

    @property
    def out(self) -> Path:
        """The folder of the report."""
        place = self.path.with_suffix("")
        if place.is_relative_to(self.config.rootpath):
            place = place.relative_to(self.config.rootpath)
        else:
            place = Path(place.name)
        return Path(self.config.getoption("--converge-out")) / place

    def _run(self) -> Mapping[str, Mapping[str, Any]]:
        items = [item.name for item in self.session.items if item.parent is self]
        chosen = [name for name in items if name not in self._left_out]
        only = () if set(chosen) == set(self._sets) else ("--only", *chosen)
        more = self.config.getoption("--converge-arg")
        command = (sys.executable, "-m", "converge_harness", "run", str(self.path))
        report = self.out / "report.json"
        before = _written(report)
        done = subprocess.run(
            [*command, "--out", str(self.out), *only, *more],
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stdout.write(done.stdout)  # pytest shows it with the first test that fails
        sys.stderr.write(done.stderr)
        try:
            if done.returncode == NOT_LAUNCHED or _written(report) == before:
                raise FileNotFoundError(report)  # what is there is of an earlier run
            found = json.loads(report.read_text(encoding="utf-8"))["tests"]
        except (OSError, ValueError, KeyError):
            last = done.stderr.strip() or done.stdout.strip() or "it said nothing"
            self._said = f"converge run ended with {done.returncode}: {last}"
            return {}
        return {verdict["name"]: verdict for verdict in found}


class TestSetItem(pytest.Item):
    """A test set: its test passes if the verdict is PASS."""

    def runtest(self) -> None:
        """Fail with the cause unless the verdict is PASS."""
        experiment = self.parent
        assert isinstance(experiment, ExperimentFile)  # noqa: S101 - collect() makes no others
        verdict = experiment.verdict(self.name)
        self.user_properties.append(("verdict", verdict["verdict"]))
        if verdict["verdict"] != "PASS":
            pytest.fail(_message(verdict, experiment.out / "report.html"), pytrace=False)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show an experiment that did not run in a sentence, without a traceback."""
        if isinstance(excinfo.value, ExperimentError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Name the test by its test set."""
        return self.path, None, f"test set {self.name}"


def _written(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino


def _message(verdict: Mapping[str, Any], report: Path) -> str:
    onset = verdict["onset_step"]
    lines = (
        f"{verdict['verdict']}: {verdict['cause'] or verdict['error'] or 'no cause was found'}",
        "" if onset is None else f"first seen at step {onset}",
        verdict.get("first_wrong") and f"first wrong: {verdict['first_wrong']}",
        verdict["look_at"] and f"look at: {verdict['look_at']}",
        verdict["next_command"] and f"next: {verdict['next_command']}",
        f"report: {report}",
    )
    return "\n".join(line for line in lines if line)
