"""Pure judging: evidence in, verdicts out. No files, clock, environment, torch or processes.

- ``verdict``: :func:`judge` of one test set; ``rcp``: of a submission to MLPerf; ``changes``: what
  kind of change lies between two runs of one control
- ``comparison``: two runs compared, the inputs of every check; ``compare/``: how
- ``calibration``: repeats of a control to what limits are learnt from
- ``checks/``: the questions, a module for each tier, and which of them are asked
- ``resume/``: what the passes of a resumed run say about each other
- ``causes/``: the likely cause of a failure
- ``soundness``, ``in_force``, ``degrees``, ``programs``: questions about a single run
- ``wording``: numbers in sentences
"""

from harness.judge.calibration import calibrate
from harness.judge.changes import ChangeKind, RunChange, SignalChange, classify
from harness.judge.checks.selection import CHECKS, SEED_CHECKS
from harness.judge.compare.envelopes import Envelope, limits
from harness.judge.compare.floors import JUDGED_SIGNALS
from harness.judge.compare.precision_errors import PrecisionRuns
from harness.judge.rcp import Submission, judge_submission
from harness.judge.verdict import judge

__all__ = [
    "CHECKS",
    "JUDGED_SIGNALS",
    "SEED_CHECKS",
    "ChangeKind",
    "Envelope",
    "PrecisionRuns",
    "RunChange",
    "SignalChange",
    "Submission",
    "calibrate",
    "classify",
    "judge",
    "judge_submission",
    "limits",
]
