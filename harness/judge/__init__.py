"""Pure judging: evidence in, verdicts out. No files, clock, environment, torch or processes."""

from harness.judge.asked import CHECKS, SEED_CHECKS
from harness.judge.calibrate import calibrate
from harness.judge.changes import ChangeKind, RunChange, SignalChange, classify
from harness.judge.envelope import Envelope, limits
from harness.judge.floors import JUDGED_SIGNALS
from harness.judge.rcp import Submission, judge_submission
from harness.judge.rounding import Measure
from harness.judge.verdict import judge

__all__ = [
    "CHECKS",
    "JUDGED_SIGNALS",
    "SEED_CHECKS",
    "ChangeKind",
    "Envelope",
    "Measure",
    "RunChange",
    "SignalChange",
    "Submission",
    "calibrate",
    "classify",
    "judge",
    "judge_submission",
    "limits",
]
