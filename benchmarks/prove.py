"""The benchmark of injected bugs: runs every matrix, and says what is caught, when, and named how.

``nox -s prove`` brings every bug, detection-limit ladder and correct configuration of
``benchmarks/bugs`` to a verdict with ``converge run``, and writes ``benchmark.md``, ``.json``,
``.png`` and ``.svg``. It goes on where it was when it is interrupted: finished runs are in the
store. ``docs/bugs.md`` says what is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from proof.catalogue import Catalogue, Matrix, read_catalogue
from proof.document import document
from proof.goals import goals
from proof.page import headline, page
from proof.picture import draw
from proof.results import Proof, collect

from harness.errors import ConfigError, ConvergeError
from harness.store import atomic_write, require_writable

ROOT = Path(__file__).parent.parent
BUGS = Path("benchmarks/bugs")
_STEPS = re.compile(r'("?training\.steps"?\s*=\s*)\d+')


class Exit(IntEnum):
    """What the process ends with."""

    MET = 0
    """Every goal is met."""
    MISSED = 1
    USAGE = 2
    """Nothing was launched, or the part after a mistake was not."""
    TROUBLE = 3
    """A set crashed or could not be judged: the benchmark itself has to be repaired."""
    INTERRUPTED = 130


class Stopped(Exception):  # noqa: N818 - an interruption or a mistake, as the code says
    """``converge run`` ended without verdicts."""

    def __init__(self, code: Exit) -> None:
        super().__init__(code.name)
        self.code = code


def main(argv: Sequence[str] | None = None) -> Exit:
    """Run, collect, write, and say whether the goals are met."""
    arguments = _parser().parse_args(argv)
    only = [name for names in arguments.only for name in names]
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        catalogue = read_catalogue(arguments.bugs).select(only)
        hidden = read_catalogue(*arguments.held_out) if arguments.held_out else None
        require_writable(arguments.out)
        proof = _prove(catalogue, arguments)
        held_out = _prove(hidden, arguments) if hidden else None
        _write(proof, held_out, arguments.out, part=bool(only))
    except ConfigError as error:
        count = len(error.problems)
        print(f"{count} problem{'s' * (count > 1)}, nothing was launched:", file=sys.stderr)
        print(*(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return Exit.USAGE
    except ConvergeError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.USAGE
    except (KeyboardInterrupt, Stopped) as stop:
        code = stop.code if isinstance(stop, Stopped) else Exit.INTERRUPTED
        print("stopped; finished runs are kept: the same command goes on from here")
        return code
    return _summary(proof, arguments.out, time.monotonic() - began, part=bool(only))


def _prove(catalogue: Catalogue, arguments: argparse.Namespace) -> Proof:
    reports = {}
    for at, matrix in enumerate(catalogue.matrices, 1):
        kind = "correct configurations" if matrix.correct else "bugs"
        place = f"[{at}/{len(catalogue.matrices)}]"
        print(f"\n{place} {matrix.name}: {len(matrix.sets)} {kind}", flush=True)
        began = time.monotonic()
        reports[matrix.name] = _run(matrix, arguments)
        verdicts = [
            test["verdict"] for test in reports[matrix.name]["tests"] if test["name"] in matrix.sets
        ]
        words = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
        print(f"{place} {matrix.name}: {words}, {time.monotonic() - began:.0f} s", flush=True)
    return collect(catalogue, reports)


def _run(matrix: Matrix, arguments: argparse.Namespace) -> dict[str, Any]:
    """``converge run`` on one matrix; its parsed ``report.json``.

    Raises Stopped when it was interrupted or refused the matrix.
    """
    folder = arguments.out / "bugs" / matrix.name
    path = matrix.path
    if arguments.steps is not None:
        path = _shortened(matrix.path, folder / matrix.path.name, arguments.steps)
    command = [sys.executable, "-m", "harness", "run", str(path), "--out", str(folder)]
    command += ["--store", str(arguments.store)] if arguments.store else []
    command += ["--only", *matrix.sets]
    code = _call(command)
    if code in (Exit.USAGE, Exit.INTERRUPTED) or code < 0:
        raise Stopped(Exit.USAGE if code == Exit.USAGE else Exit.INTERRUPTED)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def _call(command: Sequence[str]) -> int:
    """Run a command whose output is this process's (on a terminal its bars stay alive).

    An interruption is passed on, and waited for: the command puts its runs in order first.
    """
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt as interruption:
            if interruption.args:  # by SIGTERM; a Ctrl-C has reached the command by itself
                process.terminate()
            process.wait()
            raise


def _terminated(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _shortened(matrix: Path, copy: Path, steps: int) -> Path:
    """A copy of a matrix that trains fewer steps.

    Raises ConfigError when the matrix does not set ``training.steps``.
    """
    text, count = _STEPS.subn(rf"\g<1>{steps}", matrix.read_text(encoding="utf-8"))
    if not count:
        raise ConvergeError(f"{matrix} sets no training.steps, so --steps cannot shorten it")
    atomic_write(copy, text.encode())
    return copy


def _write(proof: Proof, held_out: Proof | None, folder: Path, *, part: bool) -> None:
    generated = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    files: Mapping[str, bytes] = {
        "md": page(proof, held_out, part=part, generated=generated).encode(),
        "json": json.dumps(
            document(proof, held_out, part=part, generated=generated), indent=1, ensure_ascii=False
        ).encode()
        + b"\n",
        **draw(proof),
    }
    for kind, content in files.items():
        atomic_write(folder / f"benchmark.{kind}", content)


def _summary(proof: Proof, folder: Path, seconds: float, *, part: bool) -> Exit:
    print(f"\n{headline(proof, part=part).strip('*')}\n")
    found = goals(proof, part=part)
    for goal in found:
        print(f"  {'met   ' if goal.met else 'MISSED'}  {goal.text}: {goal.measured}")
    for trouble in proof.troubles:
        print(f"  TROUBLE {trouble}")
    print(
        f"\n{seconds / 60:.1f} minutes. Written: {folder / 'benchmark.md'} (and .json, .png, .svg)"
    )
    if proof.troubles:
        return Exit.TROUBLE
    return Exit.MET if all(goal.met for goal in found) else Exit.MISSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nox -s prove --",
        description="Break real training on purpose, and see what the harness says.",
        epilog="exit codes: 0 every goal met; 1 a goal missed; 2 usage; 3 a set crashed or could "
        "not be judged; 130 interrupted, the same command goes on.",
    )
    parser.add_argument(
        "--only",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only these bugs or correct configurations; also a matrix, or a class as C3",
    )
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="where runs are kept (default: as converge run)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("reports"), metavar="DIR", help="default: reports"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="train N steps instead of what the matrices say: quicker, and late bugs do not show",
    )
    parser.add_argument(
        "--bugs", type=Path, default=BUGS, metavar="FOLDER", help="default: benchmarks/bugs"
    )
    parser.add_argument(
        "--held-out",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="further bugs, which the harness was not made with; reported apart, no goal has them",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
