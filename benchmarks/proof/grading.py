"""What converge said about one set, and whether that is correct.

A bug is caught if evidence shows it: FAIL, or INVALID for a reason that is an effect of the bug
(other samples, another learning rate, a technique that never ran). A crashed run does not count as
caught: a bug that stops training is not silent, and an injection that crashes is a mistake of the
benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from converge_harness.model import CauseClass, Judgement, Outcome, Tier
from proof.docstrings import Bug

OWN_EVIDENCE = (
    "same-data",
    "ranks-see-same-batch",
    "same-tokens",
    "same-lr",
    "steps-increase",
    "same-parameters",
    "named-in-force",
    "nothing-unnamed",
)
"""Checks whose INVALID is about what the test set did: its inputs, its parameters, what ran. The
others are about incomplete evidence, or about the control.
"""
KNOWN_AFTER_STEP = 1
"""``in_force.json`` is written once, after the first step."""
OF_THE_FIRST_STEP = ("C1", "C2", "C4", "C7")
"""Classes whose whole effect is in the forward and backward passes, which frozen steps measure."""
ROUNDING = 1.2
"""A gradient whose error against float32 is at most this multiple of the matched control's may
differ by rounding alone: correct set-ups reach this.
"""
_MULTIPLE = re.compile(r"([-+.\de]+) x the error of ")
NAMES_NOTHING = (CauseClass.UNKNOWN, CauseClass.LATER)
"""Classes that say where a difference is but not what it is: neither right nor wrong."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Size of a set's effect, relative to the rounding error of its regime."""

    error: float
    """Error of the gradient nearest to its limit, as a multiple of the matched control's; 1:
    rounding alone. Both errors are against float32.
    """
    scale: float
    """Change of the gradients' length, as a share of what rounding may do."""
    loss: float | None
    """The same for the loss at frozen weights; None without frozen steps."""

    @property
    def is_rounding(self) -> bool:
        return self.error < ROUNDING and self.scale < 1 and (self.loss is None or self.loss < 1)

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.2f}"
        return (
            f"error of gradients {self.error:.2f} x the matched control's; of what rounding may "
            f"do, length {self.scale:.2f}{loss}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """converge's result for one test set, from ``report.json``."""

    name: str
    judgement: Judgement
    caught: bool
    tier: Tier | None
    """Tier of the check that found it first."""
    first_step: int | None
    """The first step at which a check found something."""
    cause: str
    """The sentence on the cause."""
    cause_class: CauseClass | None
    error: str
    """Why the run crashed; empty if it did not."""
    module: str = ""
    """The module that is named as wrong first; empty if none is."""
    effect: Effect | None = None
    """None if nothing was measured against a reference in float32."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A bug with converge's answer, and its grade."""

    bug: Bug
    answer: Answer

    @property
    def cause_right(self) -> bool | None:
        """Whether the named cause is right; None if it does not say what is wrong.

        Right: a class that the bug accepts, and a sentence that says what it should. Wrong: any
        other class that says what is wrong.
        """
        named = self.answer.cause_class
        if not self.answer.caught or named is None:
            return None
        if named not in self.bug.causes:
            return None if named in NAMES_NOTHING else False
        sentence = self.answer.cause.lower()
        says = not self.bug.says or any(words.lower() in sentence for words in self.bug.says)
        return True if says else None

    @property
    def below_rounding(self) -> bool:
        """Whether it was missed, and its effect is below the rounding of its regime.

        Only if its whole effect was measured: passes at frozen weights do not show an effect that
        begins later, or that is in updates, replicas or reported numbers.
        """
        effect = self.answer.effect
        return (
            self.answer.judgement is Judgement.PASS
            and effect is not None
            and effect.is_rounding
            and self.bug.kind in OF_THE_FIRST_STEP
            and self.bug.first_step <= 1
        )

    @property
    def delay(self) -> int | None:
        """Steps from the first effect to its detection."""
        first = self.answer.first_step
        return first - self.bug.first_step if self.answer.caught and first is not None else None

    def caught_by(self, step: int) -> bool:
        first = self.answer.first_step
        return self.answer.caught and first is not None and first <= step


def read_answer(test: Mapping[str, Any]) -> Answer:
    """The answer in one entry of ``tests`` of a ``report.json``.

    Raises KeyError or ValueError if it is not such an entry.
    """
    judgement = Judgement(test["verdict"])
    signs = _signs(judgement, test["checks"])
    first = min(signs, key=_order, default=None)
    cause_class = test["cause_class"]
    error = test["error"]
    return Answer(
        name=test["name"],
        judgement=judgement,
        caught=bool(signs),
        tier=Tier(first["tier"]) if first else None,
        first_step=_onset(first) if first else None,
        cause=test["cause"],
        cause_class=CauseClass(cause_class) if cause_class else None,
        error=f"rank {error['rank']}: {error['message']}" if error else "",
        module=test["module"],
        effect=_effect(test["checks"]),
    )


def _effect(checks: Sequence[Mapping[str, Any]]) -> Effect | None:
    measured = {
        check["name"]: check
        for check in checks
        if check.get("measured") is not None and check.get("limit")
    }
    errors = measured.get("gradient-errors")
    origin = _MULTIPLE.match(errors["limit_origin"]) if errors else None
    if errors is None or origin is None:
        return None
    shares = {
        name: abs(check["measured"] / check["limit"])
        for name, check in measured.items()
        if all(isinstance(check[key], float | int) for key in ("measured", "limit"))
    }
    if errors["name"] not in shares:
        return None
    return Effect(
        error=shares["gradient-errors"] * float(origin[1]),
        scale=shares.get("gradient-scale", 0.0),
        loss=shares.get("frozen-loss"),
    )


def _signs(judgement: Judgement, checks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The checks that caught it; empty if it was not caught."""
    if judgement not in (Judgement.FAIL, Judgement.INVALID):
        return []
    return [
        check
        for check in checks
        if check["outcome"] == Outcome.FAIL
        or (check["outcome"] == Outcome.INVALID and check["name"] in OWN_EVIDENCE)
    ]


def _onset(check: Mapping[str, Any]) -> int | None:
    if check["onset_step"] is None and check["name"].endswith(("in-force", "unnamed")):
        return KNOWN_AFTER_STEP
    onset: int | None = check["onset_step"]
    return onset


def _order(check: Mapping[str, Any]) -> tuple[float, int]:
    """Sort key: earliest step first, then the earlier tier."""
    onset = _onset(check)
    return (float("inf") if onset is None else onset, list(Tier).index(Tier(check["tier"])))
