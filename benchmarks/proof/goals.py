"""The goals of the benchmark in each regime, and whether they are met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converge_harness.report.text import digits
from proof.regimes import Regime
from proof.results import EARLY, Proof, ProvenBug

CERTAIN = ("C1", "C2", "C3", "C4", "C5", "C6")
"""Classes whose bugs should be caught; C7 is near the noise and has detection limits instead."""
SHARE = 0.9
"""Share of bugs in fp32 that should be caught by step 2."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The goals of a regime."""

    caught: float
    """Share of the bugs of C1 to C6 that exist in this regime."""
    named: float
    """Share of the caught bugs whose cause is correct."""
    limits: Mapping[str, float]
    """By ladder, the largest allowed detection limit."""


TARGETS: Mapping[Regime, Targets] = {
    Regime.FP32: Targets(
        1.0, 0.95, {"gradient_scale": 1e-5, "gradient_noise": 1e-4, "attention_scale": 1e-4}
    ),
    Regime.MIXED: Targets(
        0.97, 0.9, {"gradient_scale": 1e-3, "gradient_noise": 1e-2, "attention_scale": 3e-2}
    ),
    Regime.BF16: Targets(
        0.95, 0.85, {"gradient_scale": 1e-3, "gradient_noise": 1e-2, "attention_scale": 3e-2}
    ),
    Regime.FLOAT8: Targets(
        0.9, 0.8, {"gradient_scale": 3e-3, "gradient_noise": 5e-2, "attention_scale": 1e-1}
    ),
}
_LADDERS: Mapping[str, str] = {
    "gradient_scale": "scale of all gradients",
    "gradient_noise": "noise in one gradient (of its norm)",
    "attention_scale": "error of the attention scale",
}


@dataclass(frozen=True, slots=True)
class Goal:
    key: str
    """The same in every regime."""
    text: str
    measured: str
    met: bool


def goals(proof: Proof, *, part: bool, regime: Regime = Regime.FP32) -> tuple[Goal, ...]:
    """Every goal with its measurement. Without data (a part without bugs, say) a goal is met.

    In the whole benchmark, bugs without an effect by step 2 count against the goal of that step; a
    ``part`` may contain only such bugs, so there they do not.
    """
    targets = TARGETS[regime]
    certain = [each for each in proof.bugs if each.graded.bug.kind in CERTAIN]
    below = [each for each in certain if each.graded.below_rounding]
    exist = [each for each in certain if each not in below]
    missed = [each.graded.bug.id for each in exist if not each.graded.answer.caught]
    every = "every bug" if targets.caught == 1 else f"at least {targets.caught:.0%} of the bugs"
    there = " that exist here" if below else ""
    too_small = [each.graded.bug.id for each in below]
    not_counted = f"; below rounding{_which(too_small)}" if below else ""
    caught = [each.graded for each in proof.bugs if each.graded.answer.caught]
    right = sum(each.cause_right is True for each in caught)
    alarms = [each.answer.name for each in proof.correct if each.false_alarm]
    found = [
        Goal(
            "caught",
            f"{every} of C1 to C6{there} {'is' if targets.caught == 1 else 'are'} caught",
            f"{share(len(exist) - len(missed), len(exist))}{_which(missed)}{not_counted}",
            _reached(len(exist) - len(missed), len(exist), targets.caught),
        ),
        *([_early(proof, part=part)] if regime is Regime.FP32 else []),
        Goal(
            "named",
            f"the cause is right for at least {targets.named:.0%} of the caught bugs",
            share(right, len(caught)),
            _reached(right, len(caught), targets.named),
        ),
        *([_none_wrong(proof)] if regime is Regime.FP32 else []),
        Goal(
            "alarms",
            "no false alarm on correct set-ups",
            f"{len(alarms)} of {len(proof.correct)}{_which(alarms)}",
            not alarms,
        ),
    ]
    return (*found, *_limits(proof, targets))


def _early(proof: Proof, *, part: bool) -> Goal:
    asked = can_show_early(proof) if part else proof.bugs
    whose = "the bugs with an effect by then" if part else "all bugs"
    by_2 = sum(each.graded.caught_by(EARLY) for each in asked)
    return Goal(
        "early",
        f"at least {SHARE:.0%} of {whose} are caught by step {EARLY}",
        share(by_2, len(asked)),
        _reached(by_2, len(asked), SHARE),
    )


def _none_wrong(proof: Proof) -> Goal:
    wrong = [each.graded.bug.id for each in proof.bugs if each.graded.cause_right is False]
    return Goal("wrong", "and wrong for none", f"{len(wrong)} wrong{_which(wrong)}", not wrong)


def _limits(proof: Proof, targets: Targets) -> list[Goal]:
    """The goals of ladders that were run and reach down to their goal."""
    found = []
    for ladder in proof.ladders:
        target = targets.limits.get(ladder.name)
        if target is None or min(rung.graded.bug.magnitude or 0 for rung in ladder.rungs) > target:
            continue
        met = ladder.limit is not None and ladder.limit <= target
        measured = "not the largest rung" if ladder.limit is None else digits(ladder.limit)
        if not met:
            first = next(rung.graded for rung in ladder.rungs if not rung.graded.answer.caught)
            effect = f" ({first.answer.effect})" if first.answer.effect else ""
            measured += f"; {digits(first.bug.magnitude)} is not caught{effect}"
        found.append(
            Goal(
                ladder.name,
                f"the smallest {_LADDERS[ladder.name]} that is caught is at most {digits(target)}",
                measured,
                met,
            )
        )
    return found


def can_show_early(proof: Proof) -> tuple[ProvenBug, ...]:
    """The bugs with an effect by step 2; the others cannot be caught by then."""
    return tuple(each for each in proof.bugs if each.graded.bug.first_step <= EARLY)


def share(part: int, whole: int) -> str:
    """``33 of 36 (92%)``."""
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "0 of 0"


def _reached(part: int, whole: int, least: float) -> bool:
    return part >= least * whole


def _which(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
