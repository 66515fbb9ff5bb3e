"""What repeats of controls taught, kept in files that say which control that was."""

from harness.calibrations.files import FILE, Learnt, read_calibrations, write_calibrations
from harness.calibrations.staleness import find_calibration, what_changed

__all__ = [
    "FILE",
    "Learnt",
    "find_calibration",
    "read_calibrations",
    "what_changed",
    "write_calibrations",
]
