"""Whether an answer of converge counts as caught, and its cause as right."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from proof.docstrings import Bug
from proof.grading import Graded, read_answer

from converge_harness.judge.checks.precision import frozen_loss, gradient_errors, gradient_scale
from converge_harness.judge.compare.precision_errors import Errors, PrecisionRuns
from converge_harness.model import CauseClass, Judgement, Tier

BUG = Bug(
    id="doubled",
    kind="C1",
    summary="Gradients are summed.",
    reference="torchtune issue 2172",
    technique="FSDP 2",
    first_step=3,
    signature="twice",
    causes=(CauseClass.GRADIENT_SCALE, CauseClass.GROUP_SCALE),
    says=("valid tokens", "World Size"),
)


def check(name="loss-envelope", tier="envelope", outcome="FAIL", onset=4):
    return {"name": name, "tier": tier, "outcome": outcome, "onset_step": onset}


def answer(verdict, *checks, cause="why", cause_class=None, error=None):
    test = {"name": "doubled", "verdict": verdict, "cause": cause, "cause_class": cause_class}
    checks = [check(outcome="PASS"), *checks]
    return read_answer({**test, "error": error, "module": "layers.1", "checks": checks})


FIRST = check("grad-norm-first-step", "first step", onset=1)
OTHER_DATA = check("same-data", "integrity", "INVALID", onset=2)
NOT_IN_FORCE = check("named-in-force", "integrity", "INVALID", onset=None)


@pytest.mark.parametrize(
    ("given", "caught", "tier", "first_step"),
    [
        (answer("PASS"), False, None, None),
        (answer("INCONCLUSIVE", check(outcome="INCONCLUSIVE")), False, None, None),
        (answer("FAIL", check()), True, Tier.ENVELOPE, 4),
        (answer("FAIL", check(), FIRST, check(onset=1)), True, Tier.FIRST_STEP, 1),
        (answer("FAIL", check(onset=None), check(onset=9)), True, Tier.ENVELOPE, 9),
        (answer("FAIL", check(), OTHER_DATA), True, Tier.INTEGRITY, 2),
        (answer("INVALID", OTHER_DATA), True, Tier.INTEGRITY, 2),
        (answer("INVALID", NOT_IN_FORCE), True, Tier.INTEGRITY, 1),
        (answer("INVALID", check("complete", "integrity", "INVALID")), False, None, None),
        (answer("INVALID", check("samples-whole", "integrity", "INVALID")), False, None, None),
        (answer("ERROR", check("complete", "integrity", "INVALID"), OTHER_DATA), False, None, None),
    ],
)
def test_caught_is_what_evidence_shows(given, caught, tier, first_step):
    assert (given.caught, given.tier, given.first_step) == (caught, tier, first_step)


@pytest.mark.parametrize(
    ("cause_class", "sentence", "right"),
    [
        ("gradient scale", "scaled by 2, the world size", True),
        ("gradient scale of a group", "the VALID TOKENS of the step", True),
        ("gradient scale", "scaled by 2", None),
        ("gradient direction", "the world size", False),
        ("rounding grows", "the world size", False),
        ("unknown", "the world size", None),
        ("parts later", "the world size", None),
        (None, "the world size", None),
    ],
)
def test_a_cause_is_right_wrong_or_not_named(cause_class, sentence, right):
    given = answer("FAIL", check(), cause=sentence, cause_class=cause_class)
    assert Graded(BUG, given).cause_right is right


def test_parts_later_is_right_where_a_bug_expects_it():
    later = replace(BUG, causes=(CauseClass.LATER,), says=())
    given = answer("FAIL", check(), cause_class="parts later")
    assert Graded(later, given).cause_right is True


def test_the_delay_counts_from_the_first_effect():
    assert Graded(BUG, answer("FAIL", check())).delay == 1
    assert Graded(BUG, answer("PASS")).delay is None
    assert [Graded(BUG, answer("FAIL", check())).caught_by(step) for step in (3, 4)] == [
        False,
        True,
    ]


def test_an_error_is_reported_with_its_rank():
    given = answer("ERROR", error={"rank": 1, "message": "the disk is on fire"})
    assert (given.judgement, given.error) == (Judgement.ERROR, "rank 1: the disk is on fire")


def measured(ratio: float, scale: float = 0.0, loss: float = 0.0) -> list[dict]:
    """What the real checks say of two parameters over four frozen batches; the first is off."""
    matched = np.array([1e-2, 2e-2])
    found = Errors(
        names=("a", "b"),
        frozen=True,
        test=matched * [ratio, 1.0],
        matched=matched,
        multiple=np.array([1.7, 1.7]),
        scale=np.full((4, 2), scale),
        loss=np.full(4, loss),
        loss_error=1e-3,
    )
    named = SimpleNamespace(name="control.matched")
    checks = []
    for question in (gradient_errors, gradient_scale, frozen_loss):
        given = {
            "errors": found,
            "measure": PrecisionRuns(named, named),
            "test": named,
            "control": named,
        }
        finding = question.ask(**{name: given[name] for name in question.inputs})
        about = {"measured": finding.measured, "limit": finding.limit.value}
        checks.append(
            {
                **check(question.name, "first step", finding.outcome.value, finding.onset),
                **about,
                "limit_origin": finding.limit.origin,
            }
        )
    return checks


def test_an_effect_is_measured_in_the_rounding_of_its_regime():
    effect = answer("PASS", *measured(1.1, scale=1e-4, loss=1e-4)).effect
    assert effect.error == pytest.approx(1.1)
    assert 0 < effect.scale < 1
    assert 0 < effect.loss < 1
    assert effect.is_rounding
    assert str(effect).startswith("error of gradients 1.10 x the matched control's; of what")
    assert answer("PASS").effect is None


@pytest.mark.parametrize(
    ("bug", "verdict", "checks", "below"),
    [
        ({}, "PASS", measured(1.1), True),
        ({}, "PASS", measured(1.5), False),
        ({}, "PASS", [], False),
        ({}, "INCONCLUSIVE", measured(1.1), False),
        ({}, "FAIL", measured(3.0), False),
        ({"kind": "C4"}, "PASS", measured(1.1), True),
        # What acts later, or where frozen steps do not look, is no rounding however small it is.
        ({"first_step": 5}, "PASS", measured(1.0), False),
        ({"kind": "C3"}, "PASS", measured(1.0), False),
        ({"kind": "C5"}, "PASS", measured(1.0), False),
        ({"kind": "C6", "first_step": 0}, "PASS", measured(1.0), False),
    ],
)
def test_below_rounding_is_what_was_measured_where_the_bug_acts(bug, verdict, checks, below):
    given = answer(verdict, *checks)
    assert Graded(replace(BUG, **{"first_step": 1, **bug}), given).below_rounding is below
