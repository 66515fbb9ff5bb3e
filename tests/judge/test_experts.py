"""Single experts: tokens that rounding hands to another one are excused, and wrong ones are not."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import CONTROL, broken, other
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_examples import judge, with_signals

from converge_harness.judge import calibrate
from converge_harness.judge.compare.experts import together
from converge_harness.judge.compare.sketches import gradient_difference, shared_samples
from converge_harness.judge.compare.tensors import compare_tensors
from converge_harness.model import Outcome, PostStepState

LATE = 16
W1, W2 = (
    tuple(f"layers.{number}.feed_forward.{w}.weight" for number in range(4)) for w in ("w1", "w2")
)
"""Matrices that are called those of four experts of one layer."""
EXPERTS = W1 + W2


def of_experts(run):
    """The run with the four feed-forward layers for four experts of layer 7."""

    def renamed(name):
        _, number, *rest = name.split(".")
        return ".".join(["layers.7.mlp.experts", number, rest[-2], "weight"])

    samples = (
        replace(each, names=tuple(renamed(n) if n in EXPERTS else n for n in each.names))
        for each in run.samples
    )
    return replace(run, samples=tuple(samples))


def token(name, seed, size):
    """The gradient that one token gives an expert, of that size relative to all of an expert's."""
    values = other(name, seed, "token")
    return size * values / np.linalg.norm(values) * np.sqrt(values.size)


def rerouted(loses, wins, size, seed=0):
    """A late step at which one expert's token goes to another."""

    def change(step, name, values):
        number = name.split(".")[1] if name in EXPERTS else ""
        signs = {str(loses): -1.0, str(wins): 1.0}
        if step != LATE or number not in signs:
            return values
        return values + signs[number] * token(name, seed, size)

    return change


def idle(expert):
    """The same for an expert that gets none at all."""
    own = [f"layers.{expert}.feed_forward.{w}.weight" for w in ("w1", "w2")]
    return lambda step, name, values: values * (not (step == LATE and name in own))


def repeats_of(*changes):
    """Right repeats, which differ by rounding, and by where their tokens go."""

    def repeat(number, change):
        draw = np.random.default_rng(number)

        def gradient(step, name, values):
            return change(step, name, values) * (1 + 1e-7 * draw.standard_normal(values.shape))

        made = with_signals(
            replace(CONTROL, name=f"ulp.{number}", repeat="ulp"),
            grad_norm=lambda step, norm: norm * (1 + 1e-8 * draw.standard_normal()),
        )
        return replace(made, samples=broken(gradient=gradient).samples)

    return [of_experts(repeat(number, change)) for number, change in enumerate(changes)]


FEW_MOVE, ONE_IDLE, MANY_MOVE = (
    calibrate(of_experts(CONTROL), repeats_of(*changes))
    for changes in (
        [rerouted(0, 1, 5e-4, seed) for seed in range(4)],
        [idle(0), *(rerouted(0, 1, 5e-4, seed) for seed in range(3))],
        [rerouted(0, 1, 2.0, seed) for seed in range(4)],
    )
)


def check(test, learnt, control=CONTROL, name="gradients-envelope"):
    assert not learnt.problems
    verdict = judge(of_experts(test), of_experts(control), learnt)
    return next(each for each in verdict.checks if each.name == name)


# ------------------------------------------------------------------------- right sets


@settings(deadline=None, max_examples=25)
@given(
    experts=st.permutations(range(4)),
    size=st.floats(0.0, 1e-3),
    seed=st.integers(0, 99),
    learnt=st.sampled_from([FEW_MOVE, ONE_IDLE, MANY_MOVE]),
)
def test_any_expert_may_lose_and_win_as_many_tokens_as_some_did_in_repeats(
    experts, size, seed, learnt
):
    test = of_experts(broken(gradient=rerouted(experts[0], experts[1], size, seed)))
    found = next(
        each for each in compare_tensors(test, of_experts(CONTROL), learnt) if each.step == LATE
    )
    assert not found.gradients.outside.size


@pytest.mark.parametrize("lost", [True, False], ids=["in the test set", "in the control"])
@pytest.mark.parametrize(
    ("share", "outcome"),
    [(0.02, Outcome.PASS), (0.2, Outcome.PASS), (0.5, Outcome.FAIL), (1.0, Outcome.FAIL)],
)
def test_however_tokens_move_rounding_takes_all_of_them_only_from_an_expert_with_few(
    lost, share, outcome
):
    """``share`` is the length of its gradient, compared with those of the others."""

    def of_few_tokens(step, name, values):
        return values * share if step == LATE and name in (W1[2], W2[2]) else values

    def half_moved(seed):
        moved = rerouted(0, 1, 0.5, seed)
        return lambda step, name, values: moved(step, name, of_few_tokens(step, name, values))

    few, none = (
        replace(CONTROL, samples=broken(gradient=change).samples)
        for change in (of_few_tokens, idle(2))
    )
    test, control = (none, few) if lost else (few, none)
    learnt = calibrate(of_experts(few), repeats_of(*map(half_moved, range(4))))
    found = check(test, learnt, control)
    assert found.outcome is outcome
    if outcome is Outcome.FAIL:
        assert {each.tensor for each in found.deviations} == {
            f"layers.7.mlp.experts.2.{matrix}.weight" for matrix in ("w1", "w2")
        }


# ------------------------------------------------------------------------- wrong ones


def late(where, change):
    return lambda step, name, values: change(values) if step == LATE and name in where else values


@pytest.mark.parametrize(
    ("where", "change", "of"),
    [
        (W1, lambda x: 2 * x, 4),  # the expert-parallel degree
        (EXPERTS, lambda x: x / 2, 8),  # of half of the ranks
        (W1[2:], np.zeros_like, 4),  # those of one rank are lost
        (W1[3:], np.zeros_like, 4),
        (W1[3:], lambda x: -x, 4),
        (W2, np.flip, 4),
    ],
)
def test_more_than_repeats_show_is_wrong_in_all_experts_of_the_layer(where, change, of):
    found = check(broken(gradient=late(where, change)), FEW_MOVE)
    assert found.outcome is Outcome.FAIL
    assert len(found.deviations) == of
    assert all(".experts." in each.tensor for each in found.deviations)


def test_an_expert_of_usual_size_that_is_lost_is_wrong_even_if_whole_experts_move_in_repeats():
    assert check(broken(gradient=idle(2)), MANY_MOVE).outcome is Outcome.FAIL


@pytest.mark.parametrize("of", [W1, W2])
def test_a_layer_whose_experts_all_lack_their_gradient_is_wrong_however_tokens_move(of):
    found = check(broken(gradient=late(of, np.zeros_like)), MANY_MOVE)
    assert found.outcome is Outcome.FAIL
    assert {each.measured for each in found.deviations} == {np.inf}
    assert check(broken(gradient=rerouted(2, 3, 2.0)), MANY_MOVE).outcome is Outcome.PASS


@pytest.mark.parametrize("name", ["layers.3.attention.wo.weight", "norm.weight"])
def test_tokens_that_move_excuse_no_tensor_that_all_tokens_train(name):
    found = check(broken(gradient=late([name], lambda x: 1.01 * x)), ONE_IDLE)
    assert (found.outcome, found.deviations[0].tensor) == (Outcome.FAIL, name)


def test_at_the_first_step_each_expert_is_compared_by_itself():
    def first(step, name, values):
        return values * 1.001 if step == 1 and name == W1[1] else values

    found = check(broken(gradient=first), ONE_IDLE, name="gradients-first-steps")
    assert (found.outcome, found.onset) == (Outcome.FAIL, 1)
    assert found.measured == pytest.approx(1e-3, rel=0.3)  # as a sketch estimates it
    assert [each.tensor for each in found.deviations] == ["layers.7.mlp.experts.1.w1.weight"]


# ------------------------------------------------------------------------- what is measured


def pair_at(step, test):
    pairs = shared_samples(of_experts(test), of_experts(CONTROL))
    return next(pair for pair in pairs if pair[1].step == step)


@pytest.mark.parametrize("step", [1, 2, LATE])
def test_experts_differ_after_the_first_step_as_the_one_tensor_of_their_layer(step):
    test = broken(gradient=lambda at, name, values: values + 0.1 * other(name, at, "noise"))
    ours, theirs = pair_at(step, test)
    found = gradient_difference(ours, theirs)
    off = np.linalg.norm(ours.gradients.sketch - theirs.gradients.sketch, axis=1)
    expected = off / np.minimum(ours.gradients.norm, theirs.gradients.norm)
    for matrix in ("w1", "w2") if step > 1 else ():
        names = [f"layers.7.mlp.experts.{number}.{matrix}.weight" for number in range(4)]
        rows = [theirs.names.index(name) for name in names]
        whole = min(np.linalg.norm(each.gradients.norm[rows]) for each in (ours, theirs))
        expected[rows] = np.linalg.norm(off[rows]) / whole
    assert found == pytest.approx(expected)


def test_an_expert_that_is_not_finite_leaves_the_others_of_its_layer_as_they_are():
    def broken_sum(step, name, values):
        return values * np.inf if step == LATE and name == W1[0] else values

    with np.errstate(invalid="ignore"):
        found = gradient_difference(*pair_at(LATE, broken(gradient=broken_sum)))
    names = pair_at(LATE, CONTROL)[1].names
    off = [names[at] for at in np.flatnonzero(~np.isfinite(found))]
    assert off == ["layers.7.mlp.experts.0.w1.weight"]


def test_moments_of_experts_are_compared_as_their_gradients_are():
    """One that had no tokens for long has small moments, which others of its layer outweigh."""

    def with_moments(run, small):
        samples = []
        for each in run.samples:
            length = np.where([".experts.1.w1" in name for name in each.names], small, 1.0)
            steps = np.full(len(length), float(each.step))
            state = PostStepState(
                np.full(len(length), np.nan), ("exp_avg",), length[:, None], steps
            )
            samples.append(replace(each, post_step=state if each.step else None))
        return replace(run, samples=tuple(samples))

    def outcome(small, of_control):
        test, control = (
            with_moments(of_experts(run), size)
            for run, size in ((broken(), small), (CONTROL, of_control))
        )
        verdict = judge(test, control, FEW_MOVE)
        return {each.name: each.outcome for each in verdict.checks}

    late = "optimizer-state-envelope"
    assert outcome(1.1e-4, 1e-4)[late] is Outcome.PASS
    assert outcome(1.1e-4, 1e-4)["optimizer-state-first-steps"] is Outcome.FAIL  # of step 1
    assert outcome(0.0, 1e-4)[late] is Outcome.FAIL  # it is gone
    assert outcome(3.0, 1.0)[late] is Outcome.FAIL


NAMES = [f"layers.{layer}.mlp.experts.{number}.w1" for layer in (0, 1) for number in (0, 1, 2)]


@given(st.lists(st.floats(0, 1e3), min_size=8, max_size=8), st.permutations(range(8)))
def test_experts_are_gathered_by_layer_and_tensor_in_any_order(lengths, order):
    names = [*NAMES, "layers.0.mlp.router.weight", "layers.0.mlp.experts.0.w2"]
    length = np.array(lengths)
    layers = np.r_[[np.linalg.norm(length[:3])] * 3, [np.linalg.norm(length[3:6])] * 3, length[6:]]
    found = together(length[order], [names[at] for at in order])
    assert found == pytest.approx(layers[order])
