"""Results over nights, in one SQLite file.

::

    record.py     a finished matrix as a night: results, measurements, circumstances
    database.py   history.sqlite: nights go in, listings and series come out
    query.py      what is asked of it, and what it answers
    trend.py      a test set's deviations over the nights, and their step changes
    overview.py   the latest nights of every experiment
    page.py       all of it as one HTML page; templates/: its template, script and styles
"""

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
