"""Results over nights: every finished matrix goes into one SQLite file, and trends come out."""

from converge_harness.history.database import History
from converge_harness.history.query import (
    Changed,
    Entry,
    Filter,
    NightMark,
    Series,
    SetNight,
    changed_between,
)
from converge_harness.history.record import Measurement, Night, Result, night_of

__all__ = [
    "Changed",
    "Entry",
    "Filter",
    "History",
    "Measurement",
    "Night",
    "NightMark",
    "Result",
    "Series",
    "SetNight",
    "changed_between",
    "night_of",
]
