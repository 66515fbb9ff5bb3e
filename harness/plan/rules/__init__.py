"""Rules that are checked before anything is launched, each a small named function.

A rule takes a ``PlannedJob`` (a job with its control) and yields what is wrong. Its name is the
function's, with dashes. Its title, the first line of its docstring, is printed by ``converge plan``
and in reports.

Guide rules come from torchtitan's converging guide (``docs/converging.md`` upstream): there may be
a good reason to break one, so a set may waive it by name, and the report then says so. Necessities
are arithmetic or upstream requirements: without them the run would crash or not be what the file
says, so they cannot be waived.

::

    rule.py         Rule, the registry, and how rules are applied
    guide.py        rules of the converging guide
    necessities.py  necessities
"""

from converge_harness.plan.rules import guide, necessities
from converge_harness.plan.rules.rule import (
    RULES,
    PlannedJob,
    apply_rules,
    count_microbatches,
)

__all__ = [
    "RULES",
    "PlannedJob",
    "apply_rules",
    "count_microbatches",
    "guide",
    "necessities",
]
