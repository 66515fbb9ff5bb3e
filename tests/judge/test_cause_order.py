"""In which order signatures of causes are asked: by a rule, whatever order they come in."""

import random
from dataclasses import replace

import pytest

from converge_harness.judge.causes import ORDERED, SIGNATURES
from converge_harness.judge.causes.signature import (
    Basis,
    ComparisonKind,
    Signature,
    Stage,
    in_order,
    signature,
)

BEFORE_THE_RULE = {
    ComparisonKind.ORDINARY: """
        nothing_loaded data_lost torn_loaded state_lost not_continued random_numbers_lost
        replayed_otherwise recovered_late not_finite other_input dropout_switched ranks_draw_alike
        no_gradient still_buffers replicas initial draws_by_itself counted_first other_tables
        clipping scaled_objective term_differs trained_objective added_term metric_only other_masks
        loss_of_right_gradients loss_scaled_alone scaled_at_frozen_weights hidden_forward
        forward_at_frozen_weights averaged_otherwise other_buffers sampled_gradients beyond_rounding
        faintly_scaled gradients_scaled gradient_direction objective lost_at_resume frozen
        counted_otherwise moments_lost one_step rounding_growth gradients_from
        sampled_gradients_later moved_too_far rounded some_parted forward_on_new_data updated later
        contradiction rounded_tables
    """,
    ComparisonKind.CURVES: """
        not_continued replayed_otherwise recovered_late not_finite other_input no_gradient
        metric_only loss_scaled_alone norm_scaled logged_twice one_step rounding_growth curves_part
    """,
    ComparisonKind.DRAWING: """
        not_finite random_numbers_lost other_input ranks_draw_alike no_gradient replicas initial
        metric_only drawn_otherwise scaled_at_frozen_weights beyond_rounding
    """,
}
"""The lists that stood in the code, by position, before there was a rule; of curves the first
three, as of ordinary runs, since programs without the probe can be resumed and killed; and
``dropout_switched`` and ``other_masks``."""


@pytest.mark.parametrize("pair", ComparisonKind)
def test_the_rule_gives_the_order_that_was_written_down_by_hand(pair):
    assert [each.name for each in ORDERED[pair]] == BEFORE_THE_RULE[pair].split()


@pytest.mark.parametrize("seed", range(20))
def test_the_order_in_which_signatures_are_found_changes_nothing(seed):
    shuffled = sorted(SIGNATURES, key=lambda each: each.name)
    random.Random(seed).shuffle(shuffled)
    for pair in ComparisonKind:
        assert in_order(each for each in shuffled if pair in each.asked_of) == ORDERED[pair]


def test_overrides_name_signatures_that_there_are():
    names = {each.name for each in SIGNATURES}
    assert len(names) == len(SIGNATURES)
    assert {name for each in SIGNATURES for name in each.overrides} <= names


OVERRIDES = sorted((each.name, name) for each in SIGNATURES for name in each.overrides)


@pytest.mark.parametrize(("name", "overridden"), OVERRIDES)
def test_no_override_says_what_basis_and_stage_say_already(name, overridden):
    """Without it the order is another one, or there is none."""

    def without(each: Signature) -> Signature:
        if each.name != name:
            return each
        return replace(each, overrides=tuple(o for o in each.overrides if o != overridden))

    def asked(pair: ComparisonKind, signatures: set[Signature]) -> list[str] | None:
        try:
            return [each.name for each in in_order(s for s in signatures if pair in s.asked_of)]
        except ValueError:
            return None

    changed = {without(each) for each in SIGNATURES}
    assert any(asked(pair, changed) != BEFORE_THE_RULE[pair].split() for pair in ComparisonKind)


def made(name, basis=Basis.EXACT, stage=Stage.INPUT, *overrides):
    return Signature(name, basis, stage, overrides, (ComparisonKind.ORDINARY,), lambda _: None)


def names_of(*signatures):
    return [each.name for each in in_order(signatures)]


def test_basis_comes_before_stage_and_overrides_come_before_both():
    early, sure = made("early", Basis.LEFT_OVER, Stage.RESUME), made("sure", stage=Stage.UPDATE)
    assert names_of(early, sure) == ["sure", "early"]
    assert names_of(replace(early, overrides=("sure",)), sure) == ["early", "sure"]
    forward = made("forward", stage=Stage.FORWARD)
    assert names_of(sure, forward) == ["forward", "sure"]


def test_a_tie_has_to_be_settled():
    with pytest.raises(ValueError, match="a and b have no order: one has to override"):
        names_of(made("b"), made("a"))
    assert names_of(made("a"), made("b", Basis.EXACT, Stage.INPUT, "a")) == ["b", "a"]


def test_a_circle_is_refused():
    circle = made("a", Basis.EXACT, Stage.INPUT, "b"), made("b", Basis.EXACT, Stage.INPUT, "a")
    with pytest.raises(ValueError, match="overrides in a circle: a, b"):
        names_of(*circle)


def test_a_signature_has_to_say_what_it_recognises():
    with pytest.raises(TypeError, match="signature silent has no docstring"):

        @signature(Basis.EXACT, Stage.INPUT)
        def silent(context):
            return None
