"""``Experiment`` to ``Plan``. Pure: what is outside of the file is handed in.

::

    make.py        sets become jobs: sizes, identities, seed checkpoints, sampled steps
    identity.py    what a job's identity is made of
    references.py  the runs in float32 from which errors of low precision are measured
    baseline.py      a plan whose control is a baseline
    select.py      a part of an experiment (``--only``)
    sizes.py       batch sizes, sequence lengths and steps of a set
    describe.py    a plan as text and as JSON
    rules/         what an experiment keeps before anything is launched
"""

from converge_harness.plan.baseline import judged_by, measured_by
from converge_harness.plan.describe import PlanRow, describe
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
