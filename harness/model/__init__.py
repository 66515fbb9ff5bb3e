"""The frozen values that pass between stages, and nothing else.

Every stage takes some of these and returns others; none modifies one. Mappings and arrays inside
are treated as read-only. See ``docs/architecture.md`` for who makes what.

::

    experiment.py   what an experiment file means
    trainer.py      which trainer a set has, and what it can do
    kinds.py        degrees, kinds of test sets, segments and faults
    plan.py         jobs, toolchains, surroundings, baselines
    runs.py         how a run ended
    in_force.py     what was really in force in a run
    evidence.py     all that a run left
    operations.py   what one module computed, operation by operation
    calibration.py  how much repeats of a control differ
    verdict.py      checks, outcomes, causes, verdicts

``calibration`` and ``evidence`` hold arrays. They are imported at the first use of one of their
names, so that ``converge --help`` need not wait for numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from converge_harness.model.experiment import (
    CADENCE_OFF,
    DATA_TYPES,
    DEFAULT_REPEATS,
    ENOUGH_RERUNS,
    FEWEST_DRAWN,
    FROZEN_STEPS,
    JUDGED_SIGNALS,
    LONG,
    POWERS_OF_TWO,
    RESHARD,
    SPMD_BACKEND,
    SPMD_BACKENDS,
    STOP_AFTER,
    ZERO_2,
    ZERO_3,
    Across,
    Ask,
    Cadence,
    Cluster,
    Experiment,
    Kubernetes,
    Launcher,
    LeftOut,
    Loader,
    OwnTechnique,
    Precision,
    Repeat,
    RepeatKind,
    Role,
    SetSpec,
    Setting,
    Stop,
    SyntheticData,
    Technique,
    TrainConfig,
    flattened,
    settling_steps,
)
from converge_harness.model.in_force import (
    CompileInForce,
    Float8InForce,
    InForce,
    OwnTechniqueInForce,
    Probing,
)
from converge_harness.model.kinds import (
    GRACE_S,
    Fault,
    FaultKind,
    Kind,
    Parallelism,
    Recovery,
    RestartOwner,
    Segment,
    Torn,
    ranks,
)
from converge_harness.model.operations import (
    GIVEN,
    UNSEEN,
    ModuleCall,
    Operation,
    TensorSums,
)
from converge_harness.model.plan import (
    BASELINES,
    CHECKOUT,
    Baseline,
    Blessing,
    Job,
    Plan,
    Surroundings,
    Toolchain,
)
from converge_harness.model.runs import ENDED_WITH_0, RankError, RunRecord, RunStatus
from converge_harness.model.trainer import (
    DATA_TYPE_KEYS,
    GLOBAL_BATCH,
    LOCAL_BATCH,
    SEQ_LEN,
    TRAINING_STEPS,
    Audit,
    Capabilities,
    ConfigKeys,
    ResumeAdvice,
    TrainerSpec,
)
from converge_harness.model.verdict import (
    CauseClass,
    Check,
    Deviation,
    Judgement,
    Limit,
    Outcome,
    Sameness,
    Tier,
    Verdict,
)

if TYPE_CHECKING:
    from converge_harness.model.calibration import Calibration, SignalScale, TensorScale
    from converge_harness.model.evidence import (
        Activations,
        BufferRows,
        Column,
        Convergence,
        Disagreement,
        DropoutMasks,
        Evidence,
        Flags,
        Floats,
        FrozenSamples,
        Integers,
        ModuleTensor,
        ObjectiveTerm,
        ObjectiveTerms,
        Pass,
        PostStepState,
        Rcp,
        ReplayConflict,
        ReplicaSample,
        SeedRuns,
        StateSample,
        Struck,
        TensorRows,
        TensorSample,
    )

__all__ = [
    "BASELINES",
    "CADENCE_OFF",
    "CHECKOUT",
    "DATA_TYPES",
    "DATA_TYPE_KEYS",
    "DEFAULT_REPEATS",
    "ENDED_WITH_0",
    "ENOUGH_RERUNS",
    "FEWEST_DRAWN",
    "FROZEN_STEPS",
    "GIVEN",
    "GLOBAL_BATCH",
    "GRACE_S",
    "JUDGED_SIGNALS",
    "LOCAL_BATCH",
    "LONG",
    "POWERS_OF_TWO",
    "RESHARD",
    "SEQ_LEN",
    "SPMD_BACKEND",
    "SPMD_BACKENDS",
    "STOP_AFTER",
    "TRAINING_STEPS",
    "UNSEEN",
    "ZERO_2",
    "ZERO_3",
    "Across",
    "Activations",
    "Ask",
    "Audit",
    "Baseline",
    "Blessing",
    "BufferRows",
    "Cadence",
    "Calibration",
    "Capabilities",
    "CauseClass",
    "Check",
    "Cluster",
    "Column",
    "CompileInForce",
    "ConfigKeys",
    "Convergence",
    "Deviation",
    "Disagreement",
    "DropoutMasks",
    "Evidence",
    "Experiment",
    "Fault",
    "FaultKind",
    "Flags",
    "Float8InForce",
    "Floats",
    "FrozenSamples",
    "InForce",
    "Integers",
    "Job",
    "Judgement",
    "Kind",
    "Kubernetes",
    "Launcher",
    "LeftOut",
    "Limit",
    "Loader",
    "ModuleCall",
    "ModuleTensor",
    "ObjectiveTerm",
    "ObjectiveTerms",
    "Operation",
    "Outcome",
    "OwnTechnique",
    "OwnTechniqueInForce",
    "Parallelism",
    "Pass",
    "Plan",
    "PostStepState",
    "Precision",
    "Probing",
    "RankError",
    "Rcp",
    "Recovery",
    "Repeat",
    "RepeatKind",
    "ReplayConflict",
    "ReplicaSample",
    "RestartOwner",
    "ResumeAdvice",
    "Role",
    "RunRecord",
    "RunStatus",
    "Sameness",
    "SeedRuns",
    "Segment",
    "SetSpec",
    "Setting",
    "SignalScale",
    "StateSample",
    "Stop",
    "Struck",
    "Surroundings",
    "SyntheticData",
    "Technique",
    "TensorRows",
    "TensorSample",
    "TensorScale",
    "TensorSums",
    "Tier",
    "Toolchain",
    "Torn",
    "TrainConfig",
    "TrainerSpec",
    "Verdict",
    "flattened",
    "ranks",
    "settling_steps",
]

_OF_ARRAYS = ("converge_harness.model.calibration", "converge_harness.model.evidence")

if not TYPE_CHECKING:  # where a module has this function, mypy accepts any name

    def __getattr__(name: str) -> object:
        """Import a name from the modules that need numpy on first use (PEP 562)."""
        if name in __all__:
            for module in map(import_module, _OF_ARRAYS):
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
