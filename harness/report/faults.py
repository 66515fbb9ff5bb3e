"""Faults of a script, as reports show them: what each is, where it struck, how long it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.judge import pass_of, steps_after
from harness.model import Evidence, Fault, FaultKind, SetSpec, Struck, Torn
from harness.report.sanitize import plain
from harness.report.text import ABSENT, duration

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
    """How a torn checkpoint was to be torn; None for other faults, and where nothing names it."""
    rank: int | None = None
    """The rank that it aims at; None when unknown, or at no single one."""
    node: int | None = None
    """The same."""

    @property
    def words(self) -> str:
        """The kind, for people."""
        return fault_words(self.kind)

    @property
    def details(self) -> str:
        """The kind and what it aims at: ``ckpt torn (truncated), rank 1``."""
        how = f" ({self.how_torn.value})" if self.how_torn else ""
        rank = "" if self.rank is None else f", rank {self.rank}"
        node = "" if self.node is None else f", node {self.node}"
        return f"{self.words}{how}{rank}{node}"

    def numbered(self, text: str) -> str:
        """A text about it that says which of several it is: ``2: ckpt torn``."""
        return text if self.position is None else f"{self.position}: {text}"

    @property
    def fate(self) -> str:
        """Where it struck, for a table cell."""
        if not self.struck:
            return "did not strike"
        where = ABSENT if self.at_pass is None else f"pass {self.at_pass}"
        return f"{where}, tore the checkpoint" if self.torn else where


def faults_view(
    evidence: Evidence,
    spec: SetSpec | None,
    recoveries: Mapping[int, tuple[int, float] | None],
) -> tuple[FaultView, ...]:
    """Every fault of a run, in the order of its script.

    ``recoveries`` are by a fault's place in it, as :func:`recovery` tells them.
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
                recovery_s=found[1] if found else None,
            )
        else:
            view = replace(_aim(script[index], named), struck=False)
        views.append(view if len(every) == 1 else replace(view, position=index + 1))
    return tuple(views)


def _aim(fault: Struck | Fault, named: Fault | None) -> FaultView:
    """What a fault is and where it strikes: as it happened, else as the script names it."""
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
    """What stands under :data:`FAULT_TITLES`; plain text, no markup."""
    return fault.numbered(fault.details), str(fault.step), fault.fate, duration(fault.recovery_s)


def fault_words(kind: str) -> str:
    """A kind as people write it: ``nan batch``."""
    return plain(kind).replace("_", " ")
