"""Runs made in several passes: what each pass did, what ended it, and where their curves join.

Faults too: what each is, where it struck, how much time it cost. For display only: whether a resume
or a recovery is correct is judged by ``converge_harness.judge``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from converge_harness.judge import (
    INTERRUPTED,
    CurveDifference,
    never_interrupted,
    parallelism_of,
    pass_of,
    steps_after,
    superseded,
)
from converge_harness.model import (
    RESHARD,
    ZERO_2,
    ZERO_3,
    Evidence,
    Fault,
    FaultKind,
    Floats,
    InForce,
    Job,
    Kind,
    Pass,
    SetSpec,
    Struck,
    Torn,
)
from converge_harness.report.sanitize import plain
from converge_harness.report.text import ABSENT, duration, step_range
from converge_harness.report.view.curves import Comparison, Curve, curve_of
from converge_harness.wording import counted

PASS_TITLES = (
    "Pass",
    "Degrees",
    "Ranks",
    "Steps",
    "Started from",
    "How it ended",
    "Wall",
    "Recovered in",
    "Steps replayed",
)

_NAMED_FAULTS = 3
"""Faults that a table cell names; the rest is counted."""
_ZERO = {ZERO_3: " (ZeRO-3)", ZERO_2: " (ZeRO-2)"}
"""How FSDP's resharding is labelled."""


@dataclass(frozen=True, slots=True)
class PassView:
    """One pass of a run: its ranks from start to end."""

    number: int
    degrees: str
    """Parallelism for people to read; only a number of ranks where no more is known."""
    world_size: int
    steps: tuple[int, int] | None
    """First and last step that it left; None when it died before the end of its first."""
    loaded_step: int | None
    """None when it died before it had loaded a checkpoint."""
    ended: str
    """``ended``, ``died``, ``struck by kill``, ``ended: a node joined``, or ``interrupted``."""
    wall_s: float | None = None
    """From the end of the load to the end of the last step, seconds."""
    recovery_s: float | None = None
    """From the fault that this pass recovered from to its first step, seconds."""
    replayed: int = 0
    """How many of its steps an earlier pass had trained before."""
    superseded: Mapping[str, Curve] = field(default_factory=dict)
    """Signal to its values at steps that a later pass trained again."""
    superseded_against: Mapping[str, Comparison] = field(default_factory=dict)
    """The same beside the control's, of the judged signals."""

    @property
    def started_from(self) -> str:
        if self.loaded_step is None:
            return ABSENT
        return f"step {self.loaded_step}" if self.loaded_step else "initial weights"


@dataclass(frozen=True, slots=True)
class PassesView:
    """All passes of a run, and its faults."""

    passes: tuple[PassView, ...]
    faults: tuple[FaultView, ...] = ()
    interrupted: bool = False
    """``Evidence.interrupted``."""

    @property
    def summary(self) -> str:
        """One sentence above the table."""
        replayed = sum(each.replayed for each in self.passes)
        amount = len(self.passes)
        joined = f"One curve of {amount} pass{'es' * (amount != 1)}"
        joined += f", {INTERRUPTED}" if self.interrupted else ""
        if not replayed:
            return f"{joined}; no step was trained twice."
        verb = "was" if replayed == 1 else "were"
        again = f"{counted(replayed, 'step')} {verb} trained again"
        return f"{joined}; {again}, and what the last pass left is judged."


def degrees_of(job: Job) -> str:
    """A set's degrees, segment by segment, and its faults; for one table cell."""
    spec = job.spec
    if spec.segments:
        return joined(str(segment.parallelism) for segment in spec.segments)
    if spec.recovery and spec.recovery.restarts.follows_script:
        return _with_faults(str(spec.parallelism), spec.recovery.faults)
    if spec.kind is Kind.SPACE_TIME:
        sharding = _ZERO.get(str(spec.overrides.get(RESHARD)), "")
        return f"{spec.parallelism}{sharding}, accumulation {job.gradient_accumulation_steps}"
    return str(spec.parallelism)


def degrees_seen(evidence: Evidence) -> str:
    """The same for a run without a known set, from its evidence; empty when that shows none."""
    if not evidence.passes:
        return degrees_in_force(evidence.in_force)
    # A pass that died before it had loaded shows at most its number of ranks.
    alive = [each for each in evidence.passes if each.steps.size or each.in_force]
    return _with_faults(joined(_degrees(each, None) for each in alive), evidence.struck)


def kind_seen(evidence: Evidence | None) -> Kind:
    """The kind of a run without a known set, as far as its passes show."""
    if evidence and evidence.may_continue:
        return Kind.PARALLEL
    passes = evidence.passes if evidence else ()
    if any(each.segment is not None for each in passes):
        return Kind.ELASTIC
    return Kind.FAULT if passes else Kind.PARALLEL


def _with_faults(degrees: str, faults: Sequence[Fault | Struck]) -> str:
    named = [f"{fault_name(fault.kind)} at {fault.step}" for fault in faults]
    more = len(named) - _NAMED_FAULTS
    rest = [f"and {more} more"] if more > 0 else []
    return ", ".join([degrees, *named[:_NAMED_FAULTS], *rest])


def joined(parts: Iterable[str]) -> str:
    """A sequence without repetitions: ``FSDP 2 -> one rank``."""
    kept: list[str] = []
    for part in parts:
        if part and (not kept or kept[-1] != part):
            kept.append(part)
    return " -> ".join(kept)


def passes_view(
    evidence: Evidence | None,
    spec: SetSpec | None,
    against: Mapping[int, Mapping[str, CurveDifference]] | None = None,
) -> PassesView | None:
    """The passes of a run, in order; None when it was made in one.

    ``against`` is ``RunComparison.superseded_curves``.
    """
    if evidence is None or not evidence.passes or never_interrupted(evidence):
        return None
    recoveries = {struck.index: recovery(struck, evidence) for struck in evidence.struck}
    left = superseded(evidence)
    views = []
    for index, each in enumerate(evidence.passes):
        earlier = _steps(evidence.passes[:index])
        seconds = [found[1] for found in recoveries.values() if found and found[0] == each.number]
        views.append(
            PassView(
                number=each.number,
                degrees=_degrees(each, spec),
                world_size=each.world_size,
                steps=(int(each.steps.min()), int(each.steps.max())) if each.steps.size else None,
                loaded_step=each.loaded_step,
                ended=_ended(each, evidence),
                wall_s=_wall(each),
                recovery_s=max(seconds, default=None),
                replayed=int(np.isin(each.steps, earlier).sum()),
                superseded={
                    name: curve_of(series) for name, series in left.get(each.number, {}).items()
                },
                superseded_against={
                    name: Comparison.of(found)
                    for name, found in (against or {}).get(each.number, {}).items()
                },
            )
        )
    return PassesView(tuple(views), faults_view(evidence, spec, recoveries), evidence.interrupted)


def degrees_in_force(seen: InForce | None) -> str:
    """The degrees in force; empty when none is known."""
    return str(parallelism_of(seen) or "")


def _degrees(each: Pass, spec: SetSpec | None) -> str:
    if seen := degrees_in_force(each.in_force):
        return seen
    named = None if spec is None else spec.parallelism
    if spec and each.segment is not None and each.segment < len(spec.segments):
        named = spec.segments[each.segment].parallelism
    # An elastic job may have shrunk: then the named degrees are not those of this pass.
    if named and named.world_size == each.world_size:
        return str(named)
    return counted(each.world_size, "rank")


def _ended(each: Pass, evidence: Evidence) -> str:
    if each.ended:
        return "ended"
    if evidence.interrupted and each is not evidence.passes[-1]:
        return "interrupted"
    kinds = [f.kind for f in evidence.struck if pass_of(evidence, f) == each.number]
    struck = ", ".join(fault_name(kind) for kind in kinds if kind != FaultKind.JOIN)
    ended = [f"struck by {struck}"] if struck else []
    if FaultKind.JOIN in kinds:
        ended.append("a node joined" if struck else "ended: a node joined")
    return ", ".join(ended) or "died"


def _ends(each: Pass) -> Floats:
    """When its steps ended, shape (steps,); NaN where unknown."""
    column = each.signals.get("at")
    known = column is not None and len(column) == each.steps.size
    return column.values if column is not None and known else np.full(each.steps.size, np.nan)


def _wall(each: Pass) -> float | None:
    ends = _ends(each)
    ends = ends[np.isfinite(ends)]
    return float(ends.max()) - each.started if ends.size and each.started is not None else None


def _steps(passes: Iterable[Pass]) -> list[int]:
    return [step for each in passes for step in each.steps.tolist()]


def pass_cells(each: PassView) -> tuple[str, ...]:
    """The cells under :data:`PASS_TITLES`; plain text, no markup."""
    return (
        str(each.number),
        each.degrees,
        str(each.world_size),
        step_range(each.steps),
        each.started_from,
        each.ended,
        duration(each.wall_s),
        duration(each.recovery_s),
        str(each.replayed),
    )


FAULT_TITLES = ("Fault", "Step", "Struck", "Recovered in")
_OF_ONE_RANK = (FaultKind.KILL, FaultKind.HANG, FaultKind.NAN_BATCH, FaultKind.DISK_FULL)


@dataclass(frozen=True, slots=True)
class FaultView:
    """One fault of the script."""

    kind: str
    """As experiment files write it: ``nan_batch``."""
    step: int
    struck: bool = True
    """False when it never happened."""
    at_pass: int | None = None
    torn: bool = False
    """Whether it left a torn checkpoint."""
    recovery_s: float | None = None
    """To the end of the first step after it, seconds; None when there is none."""
    position: int | None = None
    """In the script, from 1; None where it is the only fault."""
    how_torn: Torn | None = None
    """How a torn checkpoint was to be torn; None for other faults, and where it is not known."""
    rank: int | None = None
    """The rank that it hits; None when unknown, or not a single one."""
    node: int | None = None
    """The same."""
    curve_step: int | None = None
    """As in ``Struck``."""

    @property
    def text(self) -> str:
        """The kind, for people."""
        return fault_name(self.kind)

    @property
    def details(self) -> str:
        """The kind and its target: ``ckpt torn (truncated), rank 1``."""
        how = f" ({self.how_torn.value})" if self.how_torn else ""
        rank = "" if self.rank is None else f", rank {self.rank}"
        node = "" if self.node is None else f", node {self.node}"
        return f"{self.text}{how}{rank}{node}"

    def numbered(self, text: str) -> str:
        """A text with its number, if there are several faults: ``2: ckpt torn``."""
        return text if self.position is None else f"{self.position}: {text}"

    @property
    def fate(self) -> str:
        """Where it struck, for a table cell."""
        if not self.struck:
            return "did not strike"
        where = ABSENT if self.at_pass is None else f"pass {self.at_pass}"
        if self.curve_step is not None:  # nothing holds a program at the step of the script
            where += f", when step {self.curve_step} of its curve had been read"
        return f"{where}, tore the checkpoint" if self.torn else where


def faults_view(
    evidence: Evidence,
    spec: SetSpec | None,
    recoveries: Mapping[int, tuple[int, float] | None],
) -> tuple[FaultView, ...]:
    """Every fault of a run, in the order of its script.

    ``recoveries`` are by a fault's place in it, as :func:`recovery` returns them.
    """
    happened = {fault.index: fault for fault in evidence.struck}
    script = spec.recovery.faults if spec and spec.recovery else ()
    every = sorted({*happened, *range(len(script))})
    views = []
    for index in every:
        named = script[index] if index < len(script) else None
        struck = happened.get(index)
        if struck is not None:
            found = recoveries[index]
            view = replace(
                _aim(struck, named),
                at_pass=pass_of(evidence, struck),
                torn=struck.torn,
                curve_step=struck.curve_step,
                recovery_s=found[1] if found else None,
            )
        else:
            view = replace(_aim(script[index], named), struck=False)
        views.append(view if len(every) == 1 else replace(view, position=index + 1))
    return tuple(views)


def _aim(fault: Struck | Fault, named: Fault | None) -> FaultView:
    """What a fault is and where it strikes: as it happened, else as in the script."""
    kind = plain(fault.kind)
    script = named if named and named.kind == kind else None
    how = script.torn if script and kind == FaultKind.CKPT_TORN else None
    rank = script.rank if script and fault.rank is None else fault.rank
    node = script.node if script and fault.node is None else fault.node
    return FaultView(
        kind=kind,
        step=fault.step,
        how_torn=how,
        rank=rank if kind in _OF_ONE_RANK or how is Torn.TRUNCATED else None,
        node=node if kind == FaultKind.AGENT_LOSS else None,
    )


def recovery(fault: Struck, evidence: Evidence) -> tuple[int, float] | None:
    """The pass with the first step that is trained after a fault, and the seconds until its end."""
    after = steps_after(evidence, fault)
    if not after:
        return None
    at, recovered = after[0]
    return recovered, at - fault.at


def fault_cells(fault: FaultView) -> tuple[str, ...]:
    """The cells under :data:`FAULT_TITLES`; plain text, no markup."""
    return fault.numbered(fault.details), str(fault.step), fault.fate, duration(fault.recovery_s)


def fault_name(kind: str) -> str:
    """A kind for people to read: ``nan batch``."""
    return plain(kind).replace("_", " ")
