"""Helps with planning: which sets to run for given techniques. Pure.

::

    recommend.py        the sets that torchtitan's converging guide asks for
    experiment_file.py  those sets as the text of an experiment file
    cover.py            the fewest jobs in which every pair of techniques meets
    fit.py              which techniques can run in one job
    factor.py           a technique under test, as in ``--technique``
    base.py             the control of the proposed sets, and its batch sizes

Which techniques may run together follows from ``harness/plan/rules`` and from the trainer's list
of its release's limitations, each with its source.
"""

from converge_harness.guide.base import Base, control_of, nominal_base, sized_base
from converge_harness.guide.cover import Cover, cover_pairs
from converge_harness.guide.experiment_file import write_experiment, write_tests
from converge_harness.guide.factor import Factor, factors_of, parse_factors
from converge_harness.guide.fit import completed
from converge_harness.guide.recommend import Recommended, proposed, recommend, with_own_names

__all__ = [
    "Base",
    "Cover",
    "Factor",
    "Recommended",
    "completed",
    "control_of",
    "cover_pairs",
    "factors_of",
    "nominal_base",
    "parse_factors",
    "proposed",
    "recommend",
    "sized_base",
    "with_own_names",
    "write_experiment",
    "write_tests",
]
