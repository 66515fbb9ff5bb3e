"""A process that appends nights to a history, for the tests that start several or kill one.

Usage: appending.py FILE NAME COUNT. Prints a line for every night that is in the file; COUNT 0 goes
on until it is killed.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

from history_samples import deviation, night, result

from converge_harness.history import History

SETS, CHECKS = 10, 40


def big_night(name: str, day: int):
    measurements = tuple(deviation(f"check-{index}", 1e-7) for index in range(CHECKS))
    results = (result(f"set-{index}", measurements=measurements) for index in range(SETS))
    return replace(night(day, *results), experiment=name)


if __name__ == "__main__":
    path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for day in range(count) if count else itertools.count():
        History(path).append(big_night(name, day))
        sys.stdout.write(f"{day}\n")
        sys.stdout.flush()
