"""``benchmark.json``: the result for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from proof.goals import can_show_early, goals
from proof.grading import Effect
from proof.results import EARLY, WORST, Ladder, Proof, ProvenBug, ProvenCorrect, Result

SCHEMA = 2
"""2: one entry per regime."""


def document(results: Sequence[Result], *, part: bool, generated: str) -> dict[str, Any]:
    """The document: what was run in each regime."""
    return {
        "schema": SCHEMA,
        "generated": generated,
        "part": part,
        "regimes": [_regime(result, part=part) for result in results],
    }


def _regime(result: Result, *, part: bool) -> dict[str, Any]:
    proof, held_out = result.proof, result.held_out
    return {
        "regime": result.regime.value,
        "versions": dict(proof.versions),
        "goals": [
            {"goal": goal.text, "measured": goal.measured, "met": goal.met}
            for goal in goals(proof, part=part, regime=result.regime)
        ],
        "totals": _totals(proof),
        "bugs": [_bug(each) for each in proof.bugs],
        "correct": [_correct(each) for each in proof.correct],
        "rules": [
            {
                "name": score.name,
                "source": score.source,
                "bugs_caught": score.bugs_caught,
                "false_alarms": score.false_alarms,
            }
            for score in proof.scores
        ],
        "limits": [_ladder(ladder) for ladder in proof.ladders],
        "cost": {
            "runs": proof.cost.runs,
            "rank_seconds": round(proof.cost.rank_seconds, 1),
            "of_controls_and_repeats": round(proof.cost.shared_rank_seconds, 1),
            "wall_s": round(result.seconds, 1),
        },
        "worst_misses": [each.graded.bug.id for each in proof.misses[:WORST]],
        "left_out": [{"name": each.name, "why": each.why} for each in result.left_out],
        "troubles": list(proof.troubles),
        "held_out": _held_out(held_out) if held_out else None,
    }


def _held_out(proof: Proof) -> dict[str, Any]:
    return {
        "totals": _totals(proof),
        "bugs": [_bug(each) for each in proof.bugs],
        "correct": [_correct(each) for each in proof.correct],
        "troubles": list(proof.troubles),
    }


def _totals(proof: Proof) -> dict[str, Any]:
    early = can_show_early(proof)
    return {
        **_counts(proof.bugs),
        "show_by_step_2": len(early),
        "of_these_caught_by_step_2": sum(each.graded.caught_by(EARLY) for each in early),
        "correct": len(proof.correct),
        "false_alarms": sum(each.false_alarm for each in proof.correct),
        "classes": {kind: _counts(proof.of(kind)) for kind in proof.classes},
    }


def _counts(bugs: Iterable[ProvenBug]) -> dict[str, int]:
    graded = [each.graded for each in bugs]
    return {
        "bugs": len(graded),
        "caught": sum(each.answer.caught for each in graded),
        "caught_by_step_2": sum(each.caught_by(EARLY) for each in graded),
        "cause_right": sum(each.cause_right is True for each in graded),
        "cause_wrong": sum(each.cause_right is False for each in graded),
        "below_rounding": sum(each.below_rounding for each in graded),
    }


def _bug(proven: ProvenBug) -> dict[str, Any]:
    graded, run = proven.graded, proven.run
    bug, answer = graded.bug, graded.answer
    return {
        "id": bug.id,
        "class": bug.kind,
        "caught": answer.caught,
        "tier": answer.tier.value if answer.tier else None,
        "first_step": answer.first_step,
        "cause": answer.cause_class.value if answer.cause_class else None,
        "cause_right": graded.cause_right,
        "steps": run.steps,
        "rank_seconds": round(run.rank_seconds, 1),
        "verdict": answer.judgement.value,
        "sentence": answer.cause,
        "delay": graded.delay,
        "effect": _effect(answer.effect),
        "below_rounding": graded.below_rounding,
        "flagged_by": list(run.flagged_by),
        "loss_off": _number(run.loss_off),
        "module": answer.module,
        "matrix": run.matrix,
        "what": run.what,
        "summary": bug.summary,
        "reference": bug.reference,
        "place": bug.place,
        "technique": bug.technique,
        "needs": bug.needs,
        "shows_from_step": bug.first_step,
        "signature": bug.signature,
        "expected": [cause.value for cause in bug.causes],
        "magnitude": bug.magnitude,
    }


def _effect(effect: Effect | None) -> dict[str, Any] | None:
    if effect is None:
        return None
    return {"error": effect.error, "scale": effect.scale, "loss": effect.loss}


def _number(value: float | None) -> float | str | None:
    """As report.json has it: what is not finite as text."""
    return value if value is None or math.isfinite(value) else str(value)


def _correct(proven: ProvenCorrect) -> dict[str, Any]:
    return {
        "name": proven.answer.name,
        "verdict": proven.answer.judgement.value,
        "cause": proven.answer.cause,
        "what": proven.run.what,
        "matrix": proven.run.matrix,
        "steps": proven.run.steps,
        "rank_seconds": round(proven.run.rank_seconds, 1),
        "flagged_by": list(proven.run.flagged_by),
        "loss_off": _number(proven.run.loss_off),
        "effect": _effect(proven.answer.effect),
    }


def _ladder(ladder: Ladder) -> dict[str, Any]:
    return {"name": ladder.name, "limit": ladder.limit, "rungs": [_bug(r) for r in ladder.rungs]}
