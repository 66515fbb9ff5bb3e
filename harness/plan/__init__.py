"""``Experiment`` to ``Plan``. Pure: files and hardware come in as values (``Surroundings``)."""

from converge_harness.plan.describe import PlanRow, describe
from converge_harness.plan.golden import judged_by, measured_by
from converge_harness.plan.identity import broken_by, identity_facts
from converge_harness.plan.make import make_plan
from converge_harness.plan.references import in_float32
from converge_harness.plan.select import select, select_controls
from converge_harness.plan.sizes import precision_of

__all__ = [
    "PlanRow",
    "broken_by",
    "describe",
    "identity_facts",
    "in_float32",
    "judged_by",
    "make_plan",
    "measured_by",
    "precision_of",
    "select",
    "select_controls",
]
