"""How often the judge is wrong: measures it and rewrites docs/operating-characteristics.md.

``nox -s characteristics`` simulates experiments (``characteristics/simulation.py``), judges them
with the harness's own ``calibrate`` and ``judge``, and puts tables and figures in their places in
the page; ``--quick`` only prints smaller tables. With ``--runs FOLDER…`` it judges real runs of one
control, as ``converge calibrate benchmarks/aa.toml`` leaves them, against each other instead.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from characteristics.figures import draw_false_alarms, draw_power
from characteristics.long_runs import long_runs
from characteristics.rates import LENGTHS, SITUATIONS, false_alarms, power
from characteristics.real_runs import real_runs
from characteristics.simulation import LAWS
from characteristics.tables import (
    false_alarm_table,
    long_run_table,
    power_table,
    real_run_table,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operating-characteristics.md"
IMAGES = ROOT / "docs" / "images"


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()
    if arguments.runs:
        tables = {"real runs": real_run_table(real_runs(arguments.runs))}
    else:
        tables = simulate(quick=arguments.quick, workers=arguments.workers)
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    if not arguments.quick:
        PAGE.write_text(with_tables(PAGE.read_text(), tables))
        print(f"rewrote {PAGE.relative_to(ROOT)}")
    print(f"took {time.monotonic() - began:.0f} s")
    return 0


def simulate(*, quick: bool, workers: int) -> Mapping[str, str]:
    """Measure everything that needs no real runs; draws the figures unless quick."""
    situations = [one for one in SITUATIONS if one.steps == 100] if quick else SITUATIONS  # noqa: PLR2004
    alarms = false_alarms(situations, 25 if quick else 400, workers)
    lengths = LENGTHS[:3] if quick else LENGTHS
    powers = power(LAWS, lengths, 10 if quick else 100, workers)
    settled = long_runs(50 if quick else 2000)
    if not quick:
        draw_false_alarms(alarms, IMAGES / "characteristics_false_alarms.png")
        draw_power(powers, IMAGES / "characteristics_power.png")
    return {
        "false alarms": false_alarm_table(alarms),
        "power": power_table(powers),
        "equivalence": long_run_table(settled),
    }


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with tables in their places; raises ValueError when it has no such place."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: measured -->", f"<!-- {name}: end -->"
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        replaced, count = place.subn(lambda _, new=f"{begin}\n{table}\n{end}": new, page)
        if count != 1:
            raise ValueError(f"{PAGE} has {count} places for the table {name!r}: it needs one")
        page = replaced
    return page


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure how often the judge is wrong.")
    parser.add_argument("--quick", action="store_true", help="small samples, tables printed only")
    parser.add_argument("--runs", type=Path, nargs="+", help="run folders of repeats of a control")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
