"""The benchmark of injected bugs: runs every matrix; reports what is caught, when, and as what.

``nox -s prove`` runs and judges every bug, detection-limit ladder and correct set-up of
``benchmarks/bugs`` with ``converge run``, and writes ``benchmark.md``, ``.json``, ``.png`` and
``.svg``. ``--regime`` runs all of them in another precision; ``--megatron`` runs the bugs and
correct set-ups of Megatron-Core instead. After an interruption the same command continues, because
finished runs are in the store. ``docs/bugs.md`` says what is measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from proof.catalogue import Catalogue, Matrix, read_catalogue
from proof.document import document
from proof.goals import goals
from proof.page import headline, miss, page
from proof.parts import Extent, Part, folder_of, part_of
from proof.picture import draw
from proof.regimes import Regime
from proof.results import WORST, Proof, Result, collect

from converge_harness.errors import ConfigError, ConvergeError, Problem
from converge_harness.store import atomic_write, require_writable
from converge_harness.wording import counted

ROOT = Path(__file__).parent.parent
ALL = "all"


class Benchmark(NamedTuple):
    """What is run if no option says otherwise."""

    bugs: Path
    """A folder of bugs and matrices, or a matrix of bugs."""
    correct: tuple[Path, ...]
    """Matrices of correct set-ups in another place."""
    regimes: tuple[Regime, ...]
    out: Path
    command: str


OF_TORCHTITAN = Benchmark(
    Path("benchmarks/bugs"), (), (Regime.FP32,), Path("reports"), "nox -s prove"
)
OF_MEGATRON = Benchmark(
    Path("experiments/megatron_injected.toml"),
    (Path("experiments/megatron.toml"),),
    (Regime.FP32, Regime.BF16),
    Path("reports/megatron"),
    "nox -s prove -- --megatron",
)


class Exit(IntEnum):
    """The exit codes."""

    MET = 0
    """Every goal is met."""
    MISSED = 1
    USAGE = 2
    """Nothing was launched, or nothing after a mistake."""
    TROUBLE = 3
    """A set crashed or could not be judged: the benchmark itself must be repaired."""
    INTERRUPTED = 130


class Stopped(Exception):  # noqa: N818 - an interruption or a mistake, depending on the code
    """``converge run`` ended without verdicts."""

    def __init__(self, code: Exit) -> None:
        super().__init__(code.name)
        self.code = code


def main(argv: Sequence[str] | None = None) -> Exit:
    """Run, collect, write, and say whether the goals are met."""
    arguments = _parser().parse_args(argv)
    benchmark = OF_MEGATRON if arguments.megatron else OF_TORCHTITAN
    arguments.out = arguments.out or benchmark.out
    only = [name for names in arguments.only for name in names]
    command = command_of(benchmark, arguments.regime, arguments.seed, only)
    part = bool(only) or arguments.nightly
    extent = Extent(arguments.steps, arguments.nightly, arguments.seed)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        catalogue = _catalogue(benchmark, arguments.bugs).select(only)
        hidden = read_catalogue(*arguments.held_out) if arguments.held_out else None
        require_writable(arguments.out)
        regimes = regimes_of(arguments.regime, benchmark)
        parts = [part_of(catalogue, regime, arguments.out, extent) for regime in regimes]
        others = [
            part_of(hidden, regime, arguments.out, extent) if hidden else None for regime in regimes
        ]
        _require_some(parts)
        for each in parts:
            _announce(each)
        if arguments.dry_run:
            return Exit.MET
        results = []
        for each, other in zip(parts, others, strict=True):
            results.append(_result(each, other, arguments))
            # Written after each regime, so that an interruption loses none of the earlier ones.
            _write(results, arguments.out, part=part, command=command)
    except ConfigError as error:
        found = counted(len(error.problems), "problem")
        print(f"{found}, nothing was launched:", file=sys.stderr)
        print(*(f"  {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        return Exit.USAGE
    except ConvergeError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.USAGE
    except (KeyboardInterrupt, Stopped) as stop:
        code = stop.code if isinstance(stop, Stopped) else Exit.INTERRUPTED
        print("stopped; finished runs are kept: the same command continues from here")
        return code
    return _summary(results, arguments.out, part=part)


def _catalogue(benchmark: Benchmark, bugs: Path | None) -> Catalogue:
    """The benchmark's bugs and correct set-ups, or those of another folder."""
    return (
        read_catalogue(bugs) if bugs else read_catalogue(benchmark.bugs, correct=benchmark.correct)
    )


def regimes_of(asked: Sequence[str], benchmark: Benchmark) -> list[Regime]:
    """The regimes to run, in their own order."""
    return [each for each in Regime if ALL in asked or each.value in (asked or benchmark.regimes)]


def command_of(
    benchmark: Benchmark, asked: Sequence[str], seed: int | None = None, only: Sequence[str] = ()
) -> str:
    """What a person calls to get the same bugs, regimes and seed."""
    options = [f"--only {' '.join(only)}"] if only else []
    options += [f"--regime {each}" for each in asked]
    options += [f"--seed {seed}"] if seed is not None else []
    if not options:
        return benchmark.command
    between = "" if " -- " in benchmark.command else " --"
    return " ".join([f"{benchmark.command}{between}", *options])


def _require_some(parts: Sequence[Part]) -> None:
    """Raise ConfigError with the reasons if there is nothing to run."""
    if any(part.catalogue.matrices for part in parts):
        return
    left_out = dict.fromkeys(
        (f"{each.name} in {part.regime.value}", each.why)
        for part in parts
        for each in part.left_out
    )
    raise ConfigError([Problem(where, f"is not run: {why}") for where, why in left_out])


def _announce(part: Part) -> None:
    """Print what a regime runs, and what it does not and why."""
    catalogue = part.catalogue
    right = sum(len(matrix.sets) for matrix in catalogue.matrices if matrix.correct)
    rungs = sum(bug.magnitude is not None for bug in catalogue.bugs)
    print(
        f"{part.regime.title}: {len(catalogue.bugs) - rungs} bugs, {rungs} rungs of ladders, "
        f"{right} correct set-ups; not run: {len(part.left_out)}"
    )
    for why, count in Counter(each.why for each in part.left_out).items():
        names = [each.name for each in part.left_out if each.why == why]
        print(f"  {count:3} {why}: {', '.join(names)}")


def _result(part: Part, hidden: Part | None, arguments: argparse.Namespace) -> Result:
    """Run one regime and print its wall time."""
    began = time.monotonic()
    title = part.regime.title
    print(f"\n===== {title} =====", flush=True)
    proof = _prove(part.catalogue, part.regime, arguments)
    held_out = _prove(hidden.catalogue, part.regime, arguments) if hidden else None
    seconds = time.monotonic() - began
    print(f"===== {title}: {seconds / 60:.1f} minutes =====", flush=True)
    left_out = (*part.left_out, *(hidden.left_out if hidden else ()))
    return Result(part.regime, proof, held_out, left_out, seconds)


def _prove(catalogue: Catalogue, regime: Regime, arguments: argparse.Namespace) -> Proof:
    reports = {}
    for at, matrix in enumerate(catalogue.matrices, 1):
        kind = "correct set-ups" if matrix.correct else "bugs"
        place = f"[{at}/{len(catalogue.matrices)}]"
        print(f"\n{place} {matrix.name}: {len(matrix.sets)} {kind}", flush=True)
        began = time.monotonic()
        reports[matrix.name] = _run(matrix, folder_of(arguments.out, regime), arguments)
        verdicts = [
            test["verdict"] for test in reports[matrix.name]["tests"] if test["name"] in matrix.sets
        ]
        words = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
        print(f"{place} {matrix.name}: {words}, {time.monotonic() - began:.0f} s", flush=True)
    return collect(catalogue, reports)


def _run(matrix: Matrix, reports: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run ``converge run`` on one matrix; return its parsed ``report.json``.

    Raises Stopped if it was interrupted or refused the matrix.
    """
    folder = reports / matrix.name
    command = [
        sys.executable,
        "-m",
        "converge_harness",
        "run",
        str(matrix.path),
        "--out",
        str(folder),
    ]
    command += ["--store", str(arguments.store)] if arguments.store else []
    command += ["--only", *matrix.sets]
    code = _call(command)
    if code in (Exit.USAGE, Exit.INTERRUPTED) or code < 0:
        raise Stopped(Exit.USAGE if code == Exit.USAGE else Exit.INTERRUPTED)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def _call(command: Sequence[str]) -> int:
    """Run a command that writes directly to this process's output, so that its bars are live.

    After an interruption, wait for the command, which first cleans up its runs.
    """
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait()
        except KeyboardInterrupt as interruption:
            if interruption.args:  # by SIGTERM; a Ctrl-C has also reached the command
                process.terminate()
            process.wait()
            raise


def _terminated(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _write(results: Sequence[Result], folder: Path, *, part: bool, command: str) -> None:
    generated = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    files: Mapping[str, bytes] = {
        "md": page(results, part=part, generated=generated, command=command).encode(),
        "json": json.dumps(
            document(results, part=part, generated=generated), indent=1, ensure_ascii=False
        ).encode()
        + b"\n",
        **draw(results),
    }
    for kind, content in files.items():
        atomic_write(folder / f"benchmark.{kind}", content)


def _summary(results: Sequence[Result], folder: Path, *, part: bool) -> Exit:
    met = True
    for result in results:
        proof = result.proof
        minutes = f"{result.seconds / 60:.1f} minutes, {proof.cost.rank_seconds:,.0f} rank-seconds"
        print(f"\n{result.regime.title} ({minutes})")
        print(f"{headline(proof, part=part).strip('*')}\n")
        for goal in goals(proof, part=part, regime=result.regime):
            print(f"  {'met   ' if goal.met else 'MISSED'}  {goal.text}: {goal.measured}")
            met &= goal.met
        for at, each in enumerate(proof.misses[:WORST], 1):
            print(f"  miss {at}: {miss(each, short=True)}")
        for trouble in proof.troubles:
            print(f"  TROUBLE {trouble}")
    seconds = sum(result.seconds for result in results)
    print(
        f"\n{seconds / 60:.1f} minutes. Written: {folder / 'benchmark.md'} (and .json, .png, .svg)"
    )
    if any(result.proof.troubles for result in results):
        return Exit.TROUBLE
    return Exit.MET if met else Exit.MISSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nox -s prove --",
        description="Break real training on purpose, and see what converge says.",
        epilog="exit codes: 0 every goal met; 1 a goal missed; 2 usage; 3 a set crashed or could "
        "not be judged; 130 interrupted, the same command continues.",
    )
    parser.add_argument(
        "--only",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only these bugs or correct set-ups; also a matrix, or a class such as C3",
    )
    parser.add_argument(
        "--megatron",
        action="store_true",
        help="the benchmark of Megatron-Core: megatron_injected.toml and megatron.toml of "
        "experiments/, in fp32 and bf16, written to reports/megatron",
    )
    parser.add_argument(
        "--regime",
        action="append",
        default=[],
        choices=[*(regime.value for regime in Regime), ALL],
        help="the precision: fp32 (the default), mixed (bf16 mixed precision), bf16 (bf16 "
        "parameters), float8, or all; may be given several times",
    )
    parser.add_argument(
        "--nightly",
        action="store_true",
        help="every second bug and correct set-up, with one seed; complete ladders",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run in each regime, and what would not and why",
    )
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="where runs are kept (default: as converge run)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: reports, or reports/megatron"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="train N steps instead of the matrices' own: quicker, but late bugs do not show",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="another seed than the matrices' own (42 where they name none)",
    )
    parser.add_argument(
        "--bugs",
        type=Path,
        metavar="FOLDER",
        help="other bugs and correct set-ups than the benchmark's",
    )
    parser.add_argument(
        "--held-out",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="further bugs, which converge was not developed with; reported separately, no goals",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
