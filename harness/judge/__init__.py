"""Pure judging: evidence in, verdicts out. No files, clock, environment, torch or processes.

- ``verdict``: :func:`judge` of one test set; ``rcp``: of a submission to MLPerf; ``changes``: how
  a control's numbers changed between two of its runs
- ``comparison``: two runs compared, the inputs of every check, which :func:`judge` returns beside
  its verdict; ``compare/``: how
- ``calibration``: how much correct runs differ, from repeats of a control; limits come from it
- ``checks/``: the questions, a module for each subject, and which of them are asked
- ``resume/``: compares the passes of a resumed run with each other
- ``causes/``: the likely cause of a failure
- ``operations``: the operation to blame inside of a wrong module
- ``soundness``, ``degrees``: questions about a single run; ``probed_runs``: how runs were probed
- ``in_force``: how the configurations of two runs differ; whether what a set names is what ran is
  asked of its trainer's audit (``TrainerSpec.audit``)

Other packages import only from here, except benchmarks of a single part.
"""

from converge_harness.judge.calibration import calibrate
from converge_harness.judge.changes import RunChange, classify
from converge_harness.judge.checks.selection import CHECKS
from converge_harness.judge.compare.activations import ModuleComparison, ModuleDifference
from converge_harness.judge.compare.curves import (
    CurveDifference,
    SignalSeries,
    curve_difference,
    curve_differences,
    series,
    whole_series,
)
from converge_harness.judge.compare.envelopes import LearntLimit, unmeasured_noise
from converge_harness.judge.compare.limits import rounding_of_experts
from converge_harness.judge.compare.loss_only import LossOnlyGate
from converge_harness.judge.compare.precision_errors import PrecisionRuns
from converge_harness.judge.compare.tensors import Comparisons, TensorComparison, TensorDifferences
from converge_harness.judge.compare.tost import level_of_look
from converge_harness.judge.comparison import RunComparison, compare_runs
from converge_harness.judge.degrees import parallelism_of
from converge_harness.judge.in_force import ConfigDifference
from converge_harness.judge.operations import OperationFinding, unknown_operation, wrong_operation
from converge_harness.judge.probed_runs import probing
from converge_harness.judge.rcp import RcpInputs, judge_submission
from converge_harness.judge.resume.faults import pass_of, steps_after
from converge_harness.judge.resume.passes import (
    INTERRUPTED,
    never_interrupted,
    superseded,
    tokens_off,
)
from converge_harness.judge.verdict import judge

__all__ = [
    "CHECKS",
    "INTERRUPTED",
    "Comparisons",
    "ConfigDifference",
    "CurveDifference",
    "LearntLimit",
    "LossOnlyGate",
    "ModuleComparison",
    "ModuleDifference",
    "OperationFinding",
    "PrecisionRuns",
    "RcpInputs",
    "RunChange",
    "RunComparison",
    "SignalSeries",
    "TensorComparison",
    "TensorDifferences",
    "calibrate",
    "classify",
    "compare_runs",
    "curve_difference",
    "curve_differences",
    "judge",
    "judge_submission",
    "level_of_look",
    "never_interrupted",
    "parallelism_of",
    "pass_of",
    "probing",
    "rounding_of_experts",
    "series",
    "steps_after",
    "superseded",
    "tokens_off",
    "unknown_operation",
    "unmeasured_noise",
    "whole_series",
    "wrong_operation",
]
