"""What was really in force in a run, as its ranks observed it after the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Float8InForce:
    """Float8 layers that were found."""

    modules: int = 0
    """Number of Float8 layers; 0: none."""
    recipe: str | None = None
    emulated: bool = False
    """Whether the products were computed in high precision from Float8 operands."""
    tp_styles: int = 0
    """Number of modules that tensor parallelism feeds in Float8."""


@dataclass(frozen=True, slots=True)
class CompileInForce:
    """What ``torch.compile`` did."""

    regions: int = 0
    """Number of compiled modules."""
    graphs: int = 0
    """Number of graphs that were compiled."""


@dataclass(frozen=True, slots=True)
class OwnTechniqueInForce:
    """What was seen of a technique of the experiment file."""

    name: str
    called: bool
    """Whether its function ``apply`` was called; True if it has none."""
    changed: bool
    """Whether that, or its keys, changed anything."""
    count: int | None = None
    """What its function ``in_force`` counted, over all ranks; None without one."""
    modules: tuple[str, ...] = ()
    """Classes of the modules that it changed."""


@dataclass(frozen=True, slots=True)
class Probing:
    """How much of a program's loop its probe saw; the defaults are what our own ranks see."""

    wrapping: str = ""
    """How the model was found to be wrapped: ``DDP``, ``FSDP2``, …; empty in runs of our ranks."""
    late: str = ""
    """Where gradients were taken if not before clipping, for people to read."""
    recomputes_loss: bool = True
    """Whether the loop gave the probe its logits."""
    switched_off: tuple[str, ...] = ()
    """Arguments that the program was given and that it turned off by itself."""

    @property
    def gradients(self) -> str:
        """Where gradients were taken, for people to read."""
        return self.late or "before clipping"


@dataclass(frozen=True, slots=True)
class InForce:
    """The content of ``in_force.json``; None and empty values are unknown, or not in force."""

    world_size: int | None = None
    degrees: Mapping[str, int | None] = field(default_factory=dict)
    """By the field of ``Parallelism``; None: not visible from where the run was observed."""
    seq_len: int | None = None
    """Tokens of a sample."""
    local_batch_size: int | None = None
    """Samples of a rank's forward and backward pass."""
    global_batch_size: int | None = None
    """Samples of a step."""
    gradient_accumulation_steps: int | None = None
    pipeline_schedule: str | None = None
    pipeline_microbatches: int | None = None
    param_dtype: str | None = None
    """Data type of the parameters; joined by ``+`` where they have several."""
    param_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By data type the names of its parameters, where there are several types."""
    mixed_precision_param: str | None = None
    """Data type that FSDP casts parameters to for computation."""
    float8: Float8InForce = Float8InForce()
    compile: CompileInForce = CompileInForce()
    fused_nodes: Mapping[str, int] = field(default_factory=dict)
    """Nodes into which async TP fused a matmul and a collective, by their operator."""
    attention: str | None = None
    cp_rotation: str | None = None
    spmd_backend: str | None = None
    without_fixes: tuple[str, ...] = ()
    """Repairs of the release that were left out."""
    injected: str | None = None
    """``file.py:function`` that was injected."""
    own_techniques: tuple[OwnTechniqueInForce, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's whole config by dotted keys."""
    declared: tuple[str, ...] = ()
    """Keys of the config that the job set."""
    probing: Probing = Probing()

    @property
    def dp(self) -> int:
        """Data-parallel degree; degrees that are not known count as 1."""
        return (self.degrees.get("dp_replicate") or 1) * (self.degrees.get("dp_shard") or 1)

    @property
    def is_fused(self) -> bool:
        """Whether async TP fused anything."""
        return any(self.fused_nodes.values())
