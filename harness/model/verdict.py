"""What was decided about a test set, and on which grounds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from converge_harness.model.experiment import Ask


class Outcome(StrEnum):
    """Result of one check."""

    PASS = "PASS"
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"
    """There is evidence, and not enough of it."""
    SKIPPED = "SKIPPED"
    """The evidence for it is not there by nature (say, a CSV has no batch digest)."""


class Tier(StrEnum):
    INTEGRITY = "integrity"
    FIRST_STEP = "first step"
    ENVELOPE = "envelope"
    EQUIVALENCE = "equivalence"
    RESUME = "resume"
    """Of runs made in several passes."""


class Judgement(StrEnum):
    """Verdict words, from best to worst."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    ERROR = "ERROR"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Limit:
    """A tolerance that prints itself: a number and where it comes from."""

    value: float
    origin: str
    """``floor of fp32 arithmetic``, ``3 x the spread of 2 repeats``, ``set in the file`` …"""

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.origin})"


@dataclass(frozen=True, slots=True)
class Deviation:
    """One tensor (or group of tensors) of a check that looks at many."""

    tensor: str
    step: int
    measured: float
    limit: float


@dataclass(frozen=True, slots=True)
class Check:
    """One named question with its answer."""

    name: str
    """Slug, stable across releases: ``loss-envelope``."""
    title: str
    """The first line of the check's docstring: the sentence a report prints."""
    tier: Tier
    outcome: Outcome
    measured: float | None = None
    limit: Limit | None = None
    unit: str = ""
    steps: tuple[int, int] | None = None
    """First and last step looked at."""
    onset: int | None = None
    """First step outside the limit."""
    detail: str = ""
    """One sentence for a person: what was seen."""
    deviations: tuple[Deviation, ...] = ()
    """Tensors outside the limit, furthest (measured / limit) first, at most 20 of them."""


class CauseClass(StrEnum):
    """What kind of bug leaves such evidence."""

    NOT_FINITE = "not finite"
    DATA = "data"
    LEARNING_RATE = "learning rate"
    NO_GRADIENT = "no gradient"
    METRIC_ONLY = "metric only"
    GRADIENT_SCALE = "gradient scale"
    GROUP_SCALE = "gradient scale of a group"
    GRADIENT_DIRECTION = "gradient direction"
    CLIPPING = "clipping"
    REPLICAS = "replicas differ"
    OBJECTIVE = "forward or objective"
    UPDATE = "update"
    FROZEN = "parameters do not move"
    STATE = "state lost"
    REPLAY = "replay differs"
    RECOVERY = "no recovery in time"
    GLITCH = "one step"
    ROUNDING_GROWTH = "rounding grows"
    LATER = "parts later"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one test set."""

    name: str
    control: str
    judgement: Judgement
    cause: str = ""
    """One sentence: the likely cause, with its evidence; empty on PASS."""
    cause_class: CauseClass | None = None
    """None unless the judgement is FAIL."""
    look_at: str = ""
    """What a person should look at first: a place in code or config; empty when unknown."""
    onset_step: int | None = None
    checks: tuple[Check, ...] = ()
    next_command: str = ""
    ask: Ask = Ask.SAME
    """What the test set had to show."""
    not_asked: tuple[str, ...] = ()
    """Names of the checks that an ordinary judgement asks and this one did not."""
