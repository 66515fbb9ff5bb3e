"""The smallest set-up that still fails as a test set did. Pure; ``matrix/shrink.py`` runs it.

::

    reductions.py   what can be taken from a control and a test set, one change at a time
    search.py       which of these changes keep the failure, within a budget
    tables.py       the result as the tables of an experiment file
"""

from converge_harness.shrink.reductions import (
    FEWEST_STEPS,
    Reduction,
    parts_of,
    reductions,
    smallest_pair,
    why_not,
    with_steps,
)
from converge_harness.shrink.search import SILENT, Effect, Shrunk, Trial, Tried, search
from converge_harness.shrink.tables import experiment_tables, train_config_tables

__all__ = [
    "FEWEST_STEPS",
    "SILENT",
    "Effect",
    "Reduction",
    "Shrunk",
    "Trial",
    "Tried",
    "experiment_tables",
    "parts_of",
    "reductions",
    "search",
    "smallest_pair",
    "train_config_tables",
    "why_not",
    "with_steps",
]
