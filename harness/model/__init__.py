"""The frozen values that pass between stages, and nothing else.

Every stage takes some of these and returns others; none changes one. Mappings and arrays inside
are treated as read-only. See ``docs/architecture.md`` for who makes what.
"""

from harness.model.calibration import Calibration, SignalScale, TensorScale
from harness.model.evidence import (
    Column,
    Disagreement,
    Evidence,
    Flags,
    Floats,
    Integers,
    ReplicaSample,
    TensorRows,
    TensorSample,
)
from harness.model.experiment import (
    CADENCE_OFF,
    DEFAULT_REPEATS,
    POWERS_OF_TWO,
    Cadence,
    Experiment,
    Parallelism,
    Precision,
    Repeat,
    RepeatKind,
    Role,
    SetSpec,
    Setting,
    SyntheticData,
    Technique,
    TrainConfig,
)
from harness.model.plan import Job, Plan, Surroundings, Toolchain
from harness.model.runs import RankError, RunRecord, RunStatus
from harness.model.verdict import (
    CauseClass,
    Check,
    Deviation,
    Judgement,
    Limit,
    Outcome,
    Tier,
    Verdict,
)

__all__ = [
    "CADENCE_OFF",
    "DEFAULT_REPEATS",
    "POWERS_OF_TWO",
    "Cadence",
    "Calibration",
    "CauseClass",
    "Check",
    "Column",
    "Deviation",
    "Disagreement",
    "Evidence",
    "Experiment",
    "Flags",
    "Floats",
    "Integers",
    "Job",
    "Judgement",
    "Limit",
    "Outcome",
    "Parallelism",
    "Plan",
    "Precision",
    "RankError",
    "Repeat",
    "RepeatKind",
    "ReplicaSample",
    "Role",
    "RunRecord",
    "RunStatus",
    "SetSpec",
    "Setting",
    "SignalScale",
    "Surroundings",
    "SyntheticData",
    "Technique",
    "TensorRows",
    "TensorSample",
    "TensorScale",
    "Tier",
    "Toolchain",
    "TrainConfig",
    "Verdict",
]
