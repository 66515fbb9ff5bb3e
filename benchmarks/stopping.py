"""What stopping early saves: how much of their planned steps real matrices trained.

``nox -s bench -- stopping`` runs ``experiments/stop_early*.toml`` (what is in the store is used
again) and prints a row for each: the share of the planned tokens that its test sets trained, its
control with the repeats, and all together, and what the last would have been if the control and
its repeats had trained to their last step. ``nox -s bench -- stopping FOLDER…`` prints the same of
finished matrices, by their report folders, without training anything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from converge_harness.launch.stopping import reached_by
from converge_harness.matrix.conclude import conclude_again
from converge_harness.matrix.cost import tokens_of
from converge_harness.matrix.save import SavedMatrix
from converge_harness.model import Job, Role, RunRecord, RunStatus

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ("stop_early", "stop_early_mixed", "stop_early_bug")
READ_BY_SETS = (Role.CONTROL, Role.REPEAT)


@dataclass(frozen=True, slots=True)
class Trained:
    """Tokens that some runs of a matrix were planned to train, and those that they did."""

    planned: int
    trained: int

    @property
    def share(self) -> float:
        return self.trained / self.planned

    def __add__(self, other: Trained) -> Trained:
        return Trained(self.planned + other.planned, self.trained + other.trained)


def trained_by(job: Job, record: RunRecord) -> Trained:
    """Of one run, with its frozen steps."""
    stopped = record.status is RunStatus.STOPPED
    until = reached_by(job, record.folder) if stopped else None
    return Trained(tokens_of(job), tokens_of(job, until))


def by_role(matrix: SavedMatrix) -> tuple[Trained, Trained]:
    """Of a matrix: its control with the repeats, and everything else; a shared run counts once."""
    runs = zip(matrix.plan.jobs, matrix.records, strict=True)
    once = {job.identity: (job, trained_by(job, record)) for job, record in runs}.values()
    read = [each for job, each in once if job.role in READ_BY_SETS]
    rest = [each for job, each in once if job.role not in READ_BY_SETS]
    return _sum(read), _sum(rest)


def _sum(each: Iterable[Trained]) -> Trained:
    return sum(each, Trained(0, 0))


def row_of(folder: Path) -> str:
    """A row of the table, from a report folder."""
    matrix, _, judged = conclude_again(folder)
    read, rest = by_role(matrix)
    whole = read + rest
    before = Trained(read.planned, read.planned) + rest
    verdicts = Counter(verdict.judgement.value for verdict in judged.verdicts)
    cells = (
        matrix.plan.experiment.name,
        ", ".join(f"{count} {word}" for word, count in verdicts.items()),
        f"{whole.planned:,}",
        f"{rest.share:.1%}",
        f"{read.share:.1%}",
        f"{whole.share:.1%}",
        f"{before.share:.1%}",
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| matrix | verdicts | planned tokens | trained by the sets | by the control and its repeats "
    "| by all | with whole repeats |\n| --- | --- | --- | --- | --- | --- | --- |"
)


def run(name: str, root: Path) -> Path:
    """Run one of the experiments; its report folder."""
    folder = root / name
    command = ("-m", "converge_harness", "run", f"experiments/{name}.toml")
    ended = subprocess.run(
        [sys.executable, *command, "--out", str(folder)], cwd=ROOT, check=False
    ).returncode
    if ended not in (0, 1, 3):  # what they mean is in the table
        raise SystemExit(f"converge run experiments/{name}.toml ended with {ended}")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help="report folders")
    chosen = parser.parse_args(arguments).folders
    root = ROOT / ".converge" / "stopping"
    folders = chosen or [run(name, root) for name in EXPERIMENTS]
    rows = map(row_of, folders)
    print("\n".join((HEAD, *rows)))


if __name__ == "__main__":
    main()
