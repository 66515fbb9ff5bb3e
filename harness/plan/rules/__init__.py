"""Rules that an experiment keeps before anything is launched, each a small named function.

A rule takes a ``PlannedJob`` (one job beside its control) and yields what is wrong. Its name is the
function's, with dashes; its title is the first line of its docstring: ``converge plan`` and reports
print it.

Guide rules come from torchtitan's converging guide (``docs/converging.md`` upstream): a comparison
that breaks one can still be right for a reason, so a set may waive it by name, and the report then
says so. Necessities are arithmetic or upstream requirements: the run would crash or be another run
than the one named, so nothing waives them.
"""

from converge_harness.plan.rules import guide, necessities
from converge_harness.plan.rules.rule import (
    RULES,
    Breach,
    PlannedJob,
    Rule,
    Ruling,
    apply_rules,
    count_microbatches,
    pipeline_stages,
)

__all__ = [
    "RULES",
    "Breach",
    "PlannedJob",
    "Rule",
    "Ruling",
    "apply_rules",
    "count_microbatches",
    "guide",
    "necessities",
    "pipeline_stages",
]
