"""Are ``converge shrink`` and ``converge bisect`` right about held-out bugs.

``nox -s bench -- shrink_and_bisect`` takes every bug of ``benchmarks/held_out_modules``. Shrink is
right if of the set's degrees those are left that the bug's name begins with (``tp_…``, ``cp_…``,
``pp_…``, ``dp_…``), or none if it begins with none of them. Bisect looks in a history of 9 commits:
before one of them, drawn by the bug's name, the injected function does nothing. It is right if it
names that commit. Finished bugs are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converge_harness.store import atomic_write

ROOT = Path(__file__).parent.parent
HELD_OUT = Path("benchmarks/held_out_modules")
COMMITS = 9
DEGREES = {"dp": "dp_shard", "tp": "tp", "cp": "cp", "pp": "pp"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the two commands said of one bug."""

    bug: str
    needs: list[str]
    """Degrees above 1 that the bug needs, by its author."""
    left: list[str]
    """Degrees above 1 of the smallest set."""
    trials: int
    shrink_s: float
    shrink_said: str
    first_bad: int
    """The commit that brought the bug, counted from 1."""
    candidates: list[int]
    """The commits that bisect names."""
    bisect_s: float
    bisect_said: str


def main() -> int:
    """0 if both are right for every bug."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these bugs alone")
    parser.add_argument("--out", type=Path, default=Path("reports/shrink_and_bisect"))
    parser.add_argument("--minutes", type=int, default=20, help="for each search")
    arguments = parser.parse_args()
    known = {name for _, name in _sets([])}
    if unknown := sorted(set(arguments.only) - known):
        parser.error(f"--only {' '.join(unknown)}: must be of {', '.join(sorted(known))}")
    answers = []
    for experiment, name in _sets(arguments.only):
        folder = arguments.out / name
        path = folder / "answer.json"
        if path.is_file():
            answer = Answer(**json.loads(path.read_text()))
        else:
            answer = _answer(experiment, name, folder.absolute(), arguments.minutes)
            if answer.trials and answer.candidates:  # else it is tried again
                atomic_write(path, json.dumps(asdict(answer), indent=1).encode())
        answers.append(answer)
        print("\n".join(_rows(answers[-1:])), flush=True)
    rows = "\n".join((*_HEAD, *_rows(answers), "", _summary(answers)))
    if not arguments.only:
        (arguments.out / "shrink_and_bisect.md").write_text(rows + "\n")
    print(rows)
    return int(not all(_shrunk_right(each) and _bisected_right(each) for each in answers))


def _sets(only: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Experiment and name of every held-out bug, or of those that are asked for."""
    for experiment in sorted((ROOT / HELD_OUT).glob("*.toml")):
        for test in tomllib.loads(experiment.read_text())["test"]:
            if not only or test["name"] in only:
                yield experiment, test["name"]


def _answer(experiment: Path, name: str, folder: Path, minutes: int) -> Answer:
    folder.mkdir(parents=True, exist_ok=True)
    budget = ("--minutes", str(minutes))
    start = time.monotonic()
    out = folder / "shrunk"
    said = _converge(ROOT, "shrink", str(experiment), "--set", name, *budget, "--out", str(out))
    shrunk_at = time.monotonic()
    first_bad = 2 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % (COMMITS - 1)
    repository, commits = _history(experiment, name, first_bad, folder / "repository")
    ends = ("--good", commits[0], "--bad", commits[-1], "--of", "code")
    copy, found = str(HELD_OUT / experiment.name), folder / "bisected"
    search = ("bisect", copy, "--set", name, *ends, *budget, "--out", str(found))
    answer = _converge(repository, *search)
    candidates = _read(found / "bisected.json").get("candidates", [])
    left = _read(out / "experiment.toml").get("test", [{}])[0].get("parallelism", {})
    return Answer(
        bug=name,
        needs=[DEGREES[word] for word in (name.partition("_")[0],) if word in DEGREES],
        left=[degree for degree, value in left.items() if value > 1],
        trials=_read(out / "shrunk.json").get("trials", 0),
        shrink_s=shrunk_at - start,
        shrink_said=said,
        first_bad=first_bad,
        candidates=[commits.index(each) + 1 for each in candidates],
        bisect_s=time.monotonic() - shrunk_at,
        bisect_said=answer,
    )


def _converge(folder: Path, *arguments: str) -> str:
    """Run a command in a folder; return the last line that it printed."""
    command = [sys.executable, "-m", "converge_harness", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, file=sys.stderr, flush=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return f"{lines[-1] if lines else ''} (exit code {done.returncode})"


def _read(path: Path) -> Any:
    """A JSON or TOML file; empty if it is not there."""
    if not path.is_file():
        return {}
    read = json.loads if path.suffix == ".json" else tomllib.loads
    return read(path.read_text())


def _history(experiment: Path, name: str, first_bad: int, folder: Path) -> tuple[Path, list[str]]:
    """A repository with the experiment, in which a bug appears at one commit; its commits."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / HELD_OUT, folder / HELD_OUT)
    shutil.copytree(ROOT / "train_configs", folder / "train_configs")
    _git(folder, "init", "--quiet")
    bugs = folder / HELD_OUT / f"{experiment.stem}.py"
    wrong = bugs.read_text()
    commits = []
    for number in range(1, COMMITS + 1):
        right = f"\n\ndef {name}(trainer):  # noqa: F811\n    pass\n" if number < first_bad else ""
        bugs.write_text(f"{wrong}{right}\n# change {number}\n")
        _git(folder, "add", "--all")
        _git(folder, "commit", "--quiet", "--message", f"Change {number}")
        commits.append(_git(folder, "rev-parse", "HEAD"))
    return folder, commits


def _git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost")
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _shrunk_right(answer: Answer) -> bool:
    return bool(answer.trials) and answer.left == answer.needs


def _bisected_right(answer: Answer) -> bool:
    return answer.candidates == [answer.first_bad]


_TITLES = (
    *("bug", "degrees that it needs", "degrees that shrink leaves", "trials, time", "shrink"),
    *("commit", "bisect names", "time", "bisect"),
)
_HEAD = (f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|")


_GRADES = {True: "right", False: "**wrong**"}


def _rows(answers: Sequence[Answer]) -> Iterator[str]:
    for each in answers:
        yield (
            f"| {each.bug} | {', '.join(each.needs) or 'none'} | {', '.join(each.left) or 'none'} "
            f"| {each.trials}, {each.shrink_s / 60:.0f} min | {_GRADES[_shrunk_right(each)]} "
            f"| {each.first_bad} | {', '.join(map(str, each.candidates)) or each.bisect_said} "
            f"| {each.bisect_s / 60:.0f} min | {_GRADES[_bisected_right(each)]} |"
        )


def _summary(answers: Sequence[Answer]) -> str:
    shrunk = sum(map(_shrunk_right, answers))
    bisected = sum(map(_bisected_right, answers))
    return f"Of {len(answers)} bugs: shrink right {shrunk}, bisect right {bisected}."


if __name__ == "__main__":
    sys.exit(main())
