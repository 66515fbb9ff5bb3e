"""How converge itself scales: many sets, many queued jobs, many running jobs.

``nox -s bench -- scale`` prints a row per measurement, with its goal and whether it is met, and
fails if one is missed. Clusters are real Slurm daemons on loopback. The real code of ``converge
plan``, ``submit`` and ``run`` is timed; only the ranks are replaced, by programs that write what
ranks would.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from scaling.following import following
from scaling.planning import planning
from scaling.polling import polling
from scaling.row import HEADER, Row

ROOT = Path(__file__).parent.parent
MEASUREMENTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "planning": planning,
    "polling": polling,
    "following": following,
}


def main() -> int:
    arguments = _parser().parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    if arguments.measure:
        with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="scale-") as folder:
            for row in MEASUREMENTS[arguments.measure](Path(folder).absolute()):
                print(json.dumps(asdict(row)), flush=True)
        return 0
    missed = False
    print(HEADER)
    for name in arguments.only or MEASUREMENTS:
        for row in _measured(name, arguments.scratch):
            print(row, flush=True)
            missed = missed or row.missed
    return int(missed)


def _measured(name: str, scratch: Path) -> Iterator[Row]:
    """The rows of a measurement in its own process.

    Raises SystemExit if it fails.
    """
    command = [sys.executable, __file__, "--measure", name, "--scratch", str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield Row(**json.loads(line))
    if process.returncode != 0:
        raise SystemExit(process.returncode)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure how converge itself scales.")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, help="some measurements")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="one, in this process, as JSON")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".converge", help="where to work")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
