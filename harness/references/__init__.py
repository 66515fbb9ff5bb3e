"""Stored results against which later runs are judged.

::

    calibrations.py   calibration files: limits learnt from the repeats of a control
    goldens.py        goldens: controls that somebody blessed, in folders that can be committed, and
                      whether one still matches the control of an experiment
"""

from converge_harness.references.calibrations import (
    CALIBRATION_FILE,
    StoredCalibration,
    find_calibration,
    read_calibrations,
    what_changed,
    write_calibrations,
)
from converge_harness.references.goldens import (
    GOLDEN_FILE,
    Change,
    Misfits,
    Replaced,
    StoredGolden,
    default_folder,
    find_goldens,
    misfits,
    not_there,
    read_golden,
    write_golden,
)

__all__ = [
    "CALIBRATION_FILE",
    "GOLDEN_FILE",
    "Change",
    "Misfits",
    "Replaced",
    "StoredCalibration",
    "StoredGolden",
    "default_folder",
    "find_calibration",
    "find_goldens",
    "misfits",
    "not_there",
    "read_calibrations",
    "read_golden",
    "what_changed",
    "write_calibrations",
    "write_golden",
]
