"""Results over nights: every finished matrix goes into one SQLite file, and trends come out."""

from harness.history.database import History
from harness.history.query import Entry, Filter, NightMark, Series, SetNight
from harness.history.record import Measurement, Night, Result, night_of

__all__ = [
    "Entry",
    "Filter",
    "History",
    "Measurement",
    "Night",
    "NightMark",
    "Result",
    "Series",
    "SetNight",
    "night_of",
]
