"""What an objective is made of: the first term that differs, and how tokens are weighed."""

from dataclasses import replace

import pytest
from cause_examples import CONTROL, broken, changed, initial_weights, scaled, turned, verdict_of

from converge_harness.model import CauseClass, ObjectiveTerm, ObjectiveTerms, Precision

EVEN = dict.fromkeys(("step", "rank", "microbatch", "sample"), 0.0)
OF_SAMPLES = EVEN | dict.fromkeys(("step", "rank", "microbatch"), 0.8)
TERMS = {
    "old": ObjectiveTerm(-60.0, 90.0, 3.0, trains=False),
    "advantages": ObjectiveTerm(2.0, 100.0, -4.0, trains=False),
    "gain": ObjectiveTerm(3.0, 120.0, -5.0, trains=True),
    "kl": ObjectiveTerm(5.0, 2.0, 0.5, trains=True),
}
RIGHT = ObjectiveTerms(1, 100, 100, 16, 1, 1.0, EVEN, TERMS)
OF_SEQUENCES = replace(RIGHT, uneven=OF_SAMPLES)


def with_terms(run, terms=RIGHT, **sums):
    """The run as if its program showed these terms; ``sums`` replaces some."""
    shown = replace(terms, terms={**terms.terms, **sums})
    return replace(run, terms=(shown, replace(shown, step=2)))


def another(terms=RIGHT, *, loss=1.01, **sums):
    """A run of another objective, by its loss and all of its gradients, and what it shows."""
    run = broken(gradient=turned(lambda _: True, 0.1), update=turned(lambda _: True, 0.1))
    return with_terms(changed(run, lambda _, x: loss * x, "loss"), terms, **sums)


def cause_of(test, control=RIGHT):
    verdict = verdict_of(test, with_terms(CONTROL, control))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    return verdict.cause


def off(name, **changes):
    return {name: replace(TERMS[name], **changes)}


@pytest.mark.parametrize("name", TERMS)
def test_the_first_term_that_differs_is_named(name):
    names = list(TERMS)
    later = {each: replace(TERMS[each], total=9.0) for each in names[names.index(name) :]}
    cause = cause_of(another(**later))
    assert f"the objective differs from its term `{name}` on: at step 1" in cause
    assert "over the tokens that count, mean 0.09" in cause
    assert ("right before it" in cause) is (name != "old")
    assert ("with it" in cause) is (name != "kl")


def test_values_of_other_tokens_are_said_to_be_the_controls():
    assert "its values are the control's, on other tokens" in cause_of(
        another(**off("old", mixed=8))
    )
    assert "on other tokens" not in cause_of(another(**off("old", total=-61.0, mixed=8)))


def test_rounding_of_a_term_is_no_difference():
    rounded = {name: replace(term, total=term.total + 1e-5) for name, term in TERMS.items()}
    assert "the objective differs: the trainer's loss is" in cause_of(another(**rounded))
    assert "its term `kl` on" in cause_of(another(**off("kl", total=5.0 + 1e-2)))
    low = [
        replace(run, precision=Precision.BF16) for run in (another(**off("kl", total=5.1)), CONTROL)
    ]
    assert "`kl`" not in verdict_of(low[0], with_terms(low[1])).cause


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (
            84,
            "84 weigh something in the loss of step 1, 100 in the control (16 fewer, one for",
        ),
        (83, "(17 fewer); 100 have a label"),
        (500, "(400 more); 100 have a label"),
    ],
)
def test_other_tokens_are_counted(tokens, words):
    everything = {name: replace(term, total=-7.0) for name, term in TERMS.items()}
    cause = cause_of(another(replace(RIGHT, tokens=tokens), **everything))
    assert cause.startswith("the objective counts other tokens")
    assert words in cause


@pytest.mark.parametrize(
    ("uneven", "microbatches", "words"),
    [
        (("step",), 2, "weigh the same in each rank only, as if each divided by its own, and in"),
        (("step",), 1, "in each rank only, as if each divided by its own (it has one microbatch)"),
        (("step", "rank"), 2, "weigh the same in each microbatch only, as if each divided"),
        (("step", "rank", "microbatch"), 2, "weigh the same in each sample only, as if each"),
        (tuple(EVEN), 2, "tokens of one sample have different weights"),
    ],
)
def test_the_part_in_which_tokens_weigh_the_same_tells_the_mean(uneven, microbatches, words):
    means = replace(RIGHT, uneven=EVEN | dict.fromkeys(uneven, 0.1), microbatches=microbatches)
    cause = cause_of(another(means))
    assert cause.startswith("the objective is another mean of the same terms: at step 1")
    assert words in cause
    assert "in the control all tokens of the step weigh the same" in cause
    assert "add up" not in cause


def test_a_mean_over_sequences_that_became_one_over_tokens_is_told_with_its_sum():
    cause = cause_of(another(replace(RIGHT, weight=0.25)), OF_SEQUENCES)
    assert (
        "at step 1 all tokens of the step weigh the same, and in the control tokens weigh" in cause
    )
    assert "weights add up to 0.25 (control: 1)" in cause
    rounded = replace(OF_SEQUENCES, uneven=OF_SAMPLES | {"sample": 1e-6})
    assert "the objective differs: the trainer's loss" in cause_of(another(rounded), OF_SEQUENCES)


def test_weights_of_another_sum_name_what_they_are_divided_by():
    cause = cause_of(another(replace(RIGHT, weight=0.25)))
    assert "weighed otherwise at step 1; weights add up to 0.25 (control: 1)" in cause
    assert "each of 100 tokens weighs as if divided by 400, and by 100 in the control" in cause
    cause = cause_of(another(replace(OF_SEQUENCES, weight=0.25)), OF_SEQUENCES)
    assert "as if divided by 400" not in cause


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_a_scaled_objective_names_its_divisor_if_weights_show_it(weight):
    run = changed(broken(gradient=scaled(0.25)), lambda _, x: 0.25 * x, "loss")
    cause = cause_of(with_terms(run, replace(RIGHT, weight=weight)))
    assert "all 35 gradients are 0.25 times the control's" in cause
    assert ("tokens weighs as if divided by 400" in cause) is (weight == 0.25)


@pytest.mark.parametrize("trains", [True, False])
def test_a_term_that_lost_its_gradient_or_got_one_is_named(trains):
    test = with_terms(broken(gradient=turned(lambda _: True, 0.1)))
    test = with_terms(test, **off("kl", trains=trains))
    control = with_terms(CONTROL, **off("kl", trains=not trains))
    verdict = verdict_of(test, control)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    has = "has a gradient, and none in the control"
    lost = "has no gradient, and one in the control"
    assert f"the term `kl` of the objective {has if trains else lost}" in verdict.cause
    alike = verdict_of(
        with_terms(broken(gradient=turned(lambda _: True, 0.1))), with_terms(CONTROL)
    )
    assert alike.cause_class is CauseClass.GRADIENT_DIRECTION


def test_terms_say_nothing_where_scores_weights_or_samples_are_wrong():
    wrong = another(**off("old", total=9.0))
    shown = with_terms(CONTROL)
    assert "`old`" in verdict_of(wrong, shown).cause
    scores = changed(wrong, lambda _, x: 1.1 * x, "loss_recomputed")
    assert "`old`" not in verdict_of(scores, shown).cause
    initial = with_terms(broken(weights=weights_moved()), **off("old", total=9.0))
    assert "`old`" not in verdict_of(initial, shown).cause
    assert "`old`" not in verdict_of(wrong, CONTROL).cause  # it shows none
    later = replace(wrong, terms=wrong.terms[1:])
    assert "`old`" not in verdict_of(later, shown).cause


def weights_moved():

    return {name: values + 1.0 for name, values in initial_weights().items()}
