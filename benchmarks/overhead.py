"""What converge costs and saves, compared with the same jobs without it.

``nox -s bench`` prints, from one run:

* one FSDP 2 job: ``converge run`` with a fresh store (plan, corpus, seed checkpoint, training,
  judging, reports) against bare torchrun of the same torchtitan config without our probe, seed
  checkpoint included. Then the job alone, both from a cold start: the cost of probe and
  supervision. Runs with and without converge alternate, so that slow phases of the machine affect
  both.
* the whole matrix with converge, against its jobs run by torchrun one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
ONE_JOB = ROOT / "benchmarks" / "one_job.toml"
CONTROL = "fsdp2"
BARE_RANK = ROOT / "benchmarks" / "bare_titan.py"
MATRIX = ROOT / "experiments" / "smoke.toml"
ONE_JOB_GOAL = 1.03
MATRIX_GOAL = 0.7
JUDGED = (0, 1, 3)
"""Exit codes of a matrix that ran, whatever its verdicts."""


@dataclass(frozen=True, slots=True)
class BareJob:
    """A job's torchrun call, in its own folder."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    harness_wall_s: float
    """Time of the same job under converge, from torchrun's start to its end."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: paired measurements, and the largest allowed ratio."""

    what: str
    harness_s: tuple[float, ...]
    bare_s: tuple[float, ...]
    goal: float | None = None

    def __str__(self) -> str:
        ratios = [h / b for h, b in zip(self.harness_s, self.bare_s, strict=True)]
        ratio = median(ratios)
        goal = ""
        if self.goal is not None:
            met = "met" if ratio <= self.goal else "MISSED"
            goal = f"at most {self.goal:g}: {met}"
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        return (
            f"{self.what:<44}{median(self.harness_s):>10.1f} s{median(self.bare_s):>10.1f} s"
            f"{ratio:>9.3f}   {spread:<18}{goal}"
        )


def main() -> int:
    arguments = _parser().parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="bench-") as name:
        scratch = Path(name)
        rows: list[Row] = []
        if arguments.pairs:
            rows += one_job(arguments.one_job, arguments.pairs, scratch)
        if not arguments.no_matrix:
            rows.append(whole_matrix(arguments.matrix, scratch))
    print(f"\n{'median of pairs':<44}{'harness':>12}{'bare':>12}{'ratio':>9}   {'range':<18}goal")
    for row in rows:
        print(row)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure what converge costs and saves.")
    parser.add_argument("--pairs", type=int, default=3, help="repetitions of the one job")
    parser.add_argument("--one-job", type=Path, default=ONE_JOB, help="experiment with one control")
    parser.add_argument("--matrix", type=Path, default=MATRIX, help="experiment to run as a whole")
    parser.add_argument("--no-matrix", action="store_true", help="measure the one job only")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".converge", help="where to work")
    return parser


# -------------------------------------------------------------- measurements


def one_job(experiment: Path, pairs: int, scratch: Path) -> Iterator[Row]:
    """The control of an experiment: the whole command, and the training job alone."""
    control = ("--only", CONTROL)
    whole: list[tuple[float, float]] = []
    alone: list[tuple[float, float]] = []
    for pair in range(pairs):
        folder = scratch / f"pair-{pair}"
        harness_s = harness_run(experiment, folder / "warm", *control)
        harness_run(experiment, folder / "cold", *control, "--cold")
        jobs = bare_jobs(folder / "cold", folder / "bare", BARE_RANK)
        bare_s = {job.name: bare_run(job) for job in jobs}
        whole.append((harness_s, sum(bare_s.values())))
        alone.append((jobs[-1].harness_wall_s, bare_s[jobs[-1].name]))
    yield Row("one FSDP 2 job, the whole command", *_columns(whole), goal=ONE_JOB_GOAL)
    yield Row("one FSDP 2 job, training alone, cold start", *_columns(alone))


def whole_matrix(experiment: Path, scratch: Path) -> Row:
    """All jobs of an experiment: in parallel with converge, one after the other without it."""
    harness_s = harness_run(experiment, scratch / "matrix")
    jobs = bare_jobs(scratch / "matrix", scratch / "matrix-bare")
    bare_s = sum(bare_run(job) for job in jobs)
    return Row(f"{experiment.name}, {len(jobs)} jobs", (harness_s,), (bare_s,), goal=MATRIX_GOAL)


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(harness for harness, _ in pairs), tuple(bare for _, bare in pairs)


# ------------------------------------------------------------------- running


def converge(*arguments: str | Path) -> None:
    """Run the converge command.

    Raises SystemExit with its output if nothing could be run.
    """
    argv = [sys.executable, "-m", "converge_harness", *map(str, arguments)]
    done = subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode not in JUDGED:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")


def harness_run(experiment: Path, store: Path, *options: str) -> float:
    """Wall time of ``converge run`` with a fresh store, seconds."""
    print(f"harness: {experiment.name} {' '.join(options)}", flush=True)
    started = time.monotonic()
    converge("run", experiment, "--store", store, "--out", store / "reports", *options)
    return time.monotonic() - started


def bare_run(job: BareJob) -> float:
    """Wall time of a job's torchrun call, seconds."""
    print(f"bare: {job.name}", flush=True)
    started = time.monotonic()
    done = subprocess.run(
        job.argv, cwd=ROOT, env=job.environment, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(job.argv)} failed:\n{done.stdout}{done.stderr}")
    return time.monotonic() - started


def bare_jobs(store: Path, target: Path, script: Path | None = None) -> tuple[BareJob, ...]:
    """The jobs of a store, seed checkpoints first, to be run again without converge.

    Each gets a copy of its ``job.json`` in which every path into the store's runs is replaced by
    one into ``target``, also for seed checkpoints. With ``script``, ranks run that instead of our
    program.
    """
    folders = [path.parent for path in (store / "runs").glob("*/record.json")]
    records = {folder: json.loads((folder / "record.json").read_text()) for folder in folders}
    unfinished = [record["name"] for record in records.values() if record["status"] != "finished"]
    if unfinished:
        raise SystemExit(f"{', '.join(unfinished)}: did not finish, so there is nothing to compare")
    return tuple(
        _bare_job(folder, records[folder], target, script)
        for folder in sorted(
            folders, key=lambda folder: (not _is_seed(records[folder]), records[folder]["started"])
        )
    )


def _is_seed(record: Mapping[str, Any]) -> bool:
    return bool(record["job"]["role"] == "seed checkpoint")


def _bare_job(
    folder: Path, record: Mapping[str, Any], target: Path, script: Path | None
) -> BareJob:
    moved = target / folder.name
    moved.mkdir(parents=True)

    def elsewhere(text: str) -> str:
        return text.replace(str(folder.parent), str(target))

    (moved / "job.json").write_text(elsewhere((folder / "job.json").read_text()))
    argv = [elsewhere(argument) for argument in record["argv"]]
    if script is not None:
        rank_module = argv.index("-m", argv.index("-m") + 1)  # the first is torchrun's own
        argv[rank_module : rank_module + 2] = [str(script)]
    pinned = {name: elsewhere(value) for name, value in record["environment"].items()}
    return BareJob(record["name"], tuple(argv), {**os.environ, **pinned}, record["wall_s"])


if __name__ == "__main__":
    sys.exit(main())
