"""Measures how often the judge is wrong, and rewrites docs/operating-characteristics.md.

``nox -s characteristics`` simulates experiments (``characteristics/simulation.py``), judges them
with converge's own ``calibrate`` and ``judge``, and inserts tables and figures into the page;
``--quick`` only prints smaller tables. With ``--runs FOLDER…`` it judges real runs of one control,
made by ``converge calibrate benchmarks/aa.toml``, against each other instead; with ``--matrix
FOLDER…`` it compares the test sets of a passing matrix with the scale of its repeats; with
``--settled FOLDER…`` it asks when real runs of the control of ``experiments/guide.toml`` are
settled to be equivalent.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from characteristics.deviations import deviations
from characteristics.figures import draw_false_alarms, draw_power
from characteristics.long_runs import long_runs
from characteristics.rates import LENGTHS, SITUATIONS, Situation, false_alarms, power
from characteristics.real_runs import real_runs
from characteristics.settled_early import settled_early, settled_really
from characteristics.several_seeds import SETTINGS, several_seeds
from characteristics.short_runs import short_runs
from characteristics.simulation import LAWS
from characteristics.tables import (
    deviation_table,
    false_alarm_table,
    long_run_table,
    power_table,
    real_run_table,
    settled_early_table,
    settled_really_table,
    several_seeds_table,
    short_run_table,
)

from converge_harness.readers import read_run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operating-characteristics.md"
IMAGES = ROOT / "docs" / "images"
SIMULATED = ("equivalence", "settled early", "short runs", "several seeds", "power", "false alarms")


@dataclass(frozen=True, slots=True)
class Size:
    """How much to simulate."""

    workers: int
    quick: bool = False
    series: int = 2000
    """Repetitions for each window and autocorrelation of the equivalence tier."""
    short: int = 400
    """Experiments for each law and length of short runs."""
    groups: int = 1000
    """Pairs of groups for each setting and difference over several seeds."""
    biased: int = 60
    """Experiments for each law and length."""
    lengths: tuple[int, ...] = LENGTHS
    right: int = 400
    """Experiments for each situation: enough to show a rate below 1% if there is no alarm."""
    situations: tuple[Situation, ...] = SITUATIONS


def quick_size(workers: int) -> Size:
    """A smoke test of half a minute."""
    short = tuple(one for one in SITUATIONS if one.steps <= LENGTHS[2])
    return Size(
        workers,
        quick=True,
        series=50,
        short=20,
        groups=20,
        biased=10,
        lengths=LENGTHS[:3],
        right=25,
        situations=short,
    )


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()
    if arguments.runs or arguments.matrix or arguments.settled:
        measured = real_tables(arguments.runs, arguments.matrix, arguments.settled)
    else:
        size = quick_size(arguments.workers) if arguments.quick else Size(arguments.workers)
        measured = simulated_tables(arguments.only or SIMULATED, size)
    for name, table in measured:
        print(f"{name} ({time.monotonic() - began:.0f} s)\n\n{table}\n", flush=True)
        if not arguments.quick:
            PAGE.write_text(with_table(PAGE.read_text(), name, table))
    return 0


def real_tables(
    repeats: Sequence[Path], matrix: Sequence[Path], settled: Sequence[Path]
) -> Iterator[tuple[str, str]]:
    """Name and Markdown of the tables that need real runs."""
    if repeats:
        yield "real runs", real_run_table(real_runs([read_run(folder) for folder in repeats]))
    if matrix:
        yield "deviations", deviation_table(deviations([read_run(folder) for folder in matrix]))
    if settled:
        found = settled_really([read_run(folder) for folder in settled])
        yield "settled early, real runs", settled_really_table(found)


def simulated_tables(only: Collection[str], size: Size) -> Iterator[tuple[str, str]]:
    """Name and Markdown of all other tables; draws the figures unless quick."""
    if "equivalence" in only:
        yield "equivalence", long_run_table(long_runs(size.series))
    if "settled early" in only:
        yield "settled early", settled_early_table(settled_early(size.series // 2))
    if "short runs" in only:
        yield "short runs", short_run_table(short_runs(size.short, size.workers))
    if "several seeds" in only:
        yield (
            "several seeds",
            several_seeds_table(several_seeds(SETTINGS, size.groups, size.workers)),
        )
    if "power" in only:
        powers = power(LAWS, size.lengths, size.biased, size.workers)
        yield "power", power_table(powers)
        if not size.quick:
            draw_power(powers, IMAGES / "characteristics_power.png")
    if "false alarms" in only:
        alarms = false_alarms(size.situations, size.right, size.workers)
        yield "false alarms", false_alarm_table(alarms)
        if not size.quick:
            draw_false_alarms(alarms, IMAGES / "characteristics_false_alarms.png")


def with_table(page: str, name: str, table: str) -> str:
    """The page with a table inserted; raises ValueError if it has no place for it."""
    begin, end = f"<!-- {name}: measured -->", f"<!-- {name}: end -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    replaced, count = place.subn(lambda _: f"{begin}\n{table}\n{end}", page)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} places for the table {name!r}: it needs one")
    return replaced


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure how often the judge is wrong.")
    parser.add_argument("--quick", action="store_true", help="small samples, tables printed only")
    parser.add_argument("--only", choices=SIMULATED, nargs="+", help="of the simulated tables")
    folders: dict[str, Any] = {"type": Path, "nargs": "+", "default": (), "metavar": "FOLDER"}
    parser.add_argument("--runs", **folders, help="run folders of repeats of a control")
    parser.add_argument("--matrix", **folders, help="run folders of a matrix that passes")
    parser.add_argument("--settled", **folders, help="run folders of the guide's control")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
