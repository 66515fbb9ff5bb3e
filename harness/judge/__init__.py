"""Pure judging: evidence in, verdicts out. No files, clock, environment, torch or processes."""

from harness.judge.calibration import calibrate
from harness.judge.changes import ChangeKind, RunChange, SignalChange, classify
from harness.judge.checks.selection import CHECKS, SEED_CHECKS
from harness.judge.compare.envelopes import Envelope, limits
from harness.judge.compare.floors import JUDGED_SIGNALS
from harness.judge.compare.precision_errors import Measure
from harness.judge.rcp import Submission, judge_submission
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
