"""What the harness should reach on the benchmark, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass

from proof.results import EARLY, Proof, ProvenBug

CERTAIN = ("C1", "C2", "C3", "C4", "C5", "C6")
"""Classes of which every bug should be caught; C7 is near the noise and has limits instead."""
SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    measured: str
    met: bool


def goals(proof: Proof, *, part: bool) -> tuple[Goal, ...]:
    """Every goal, measured. Of nothing (part of the benchmark has no bugs, say) a goal is met.

    Of the whole benchmark, bugs that have no effect by step 2 count against the second goal; a
    ``part`` may hold nothing else, so there they do not.
    """
    certain = [each for each in proof.bugs if each.graded.bug.kind in CERTAIN]
    missed = [each.graded.bug.id for each in certain if not each.graded.answer.caught]
    asked = can_show_early(proof) if part else proof.bugs
    whose = "the bugs with an effect by then" if part else "all bugs"
    by_2 = sum(each.graded.caught_by(EARLY) for each in asked)
    caught = [each.graded for each in proof.bugs if each.graded.answer.caught]
    right = sum(each.cause_right is True for each in caught)
    wrong = [each.bug.id for each in caught if each.cause_right is False]
    alarms = [each.answer.name for each in proof.correct if each.false_alarm]
    return (
        Goal(
            "every bug of C1 to C6 is caught",
            f"{len(certain) - len(missed)} of {len(certain)}{_which(missed)}",
            not missed,
        ),
        Goal(
            f"at least {SHARE:.0%} of {whose} are caught by step {EARLY}",
            share(by_2, len(asked)),
            _reached(by_2, len(asked)),
        ),
        Goal(
            f"the cause is right for at least {SHARE:.0%} of the caught",
            share(right, len(caught)),
            _reached(right, len(caught)),
        ),
        Goal("and wrong for none", f"{len(wrong)} wrong{_which(wrong)}", not wrong),
        Goal(
            "no false alarm on correct configurations",
            f"{len(alarms)} of {len(proof.correct)}{_which(alarms)}",
            not alarms,
        ),
    )


def can_show_early(proof: Proof) -> tuple[ProvenBug, ...]:
    """The bugs that have an effect by step 2; no harness can catch the others by then."""
    return tuple(each for each in proof.bugs if each.graded.bug.first_step <= EARLY)


def share(part: int, whole: int) -> str:
    """``33 of 36 (92%)``."""
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "0 of 0"


def _reached(part: int, whole: int) -> bool:
    return part >= SHARE * whole


def _which(names: list[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
