"""Goldens: controls that somebody blessed, kept in folders that can be committed.

::

    files.py      baseline.json and its folder, written and read
    misfits.py    what a golden and a control differ in, and whether that is allowed
    places.py     where goldens lie
"""

from harness.baselines.files import (
    FILE,
    Change,
    Replaced,
    Stored,
    read_stored,
    write_golden,
)
from harness.baselines.misfits import Misfits, misfits
from harness.baselines.places import default_folder, find_goldens, not_there

__all__ = [
    "FILE",
    "Change",
    "Misfits",
    "Replaced",
    "Stored",
    "default_folder",
    "find_goldens",
    "misfits",
    "not_there",
    "read_stored",
    "write_golden",
]
