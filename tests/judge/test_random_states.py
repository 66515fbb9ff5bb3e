"""Random numbers that start over or that ranks share are named, and nothing else is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from judge_examples import STEPS, in_force, judge, run, samples, spec, with_signals
from resume_examples import ELASTIC, ELASTIC_PASSES, ELASTIC_SPEC, state

from converge_harness.judge import calibrate
from converge_harness.judge.checks.resume import badly_continued
from converge_harness.judge.compare.random_states import DrawnAgain, parted, repeats, shared
from converge_harness.model import (
    CauseClass,
    DropoutMasks,
    Judgement,
    Outcome,
    Parallelism,
    Precision,
    RestartOwner,
)
from converge_harness.trainers import trainer_of_kind

OWN = tuple(f"{step:016x}" for step in range(1, STEPS + 1))
"""A state of its own before every step."""
RESUMED = 9
AGAIN = OWN[: RESUMED - 1] + OWN[: STEPS - RESUMED + 1]
OTHER = OWN[: RESUMED - 1] + tuple(f"{step:016x}" for step in range(900, 901 + STEPS - RESUMED))
NOTHING = ("",) * STEPS
ONCE = ("aa", *[""] * (RESUMED - 2), "aa", *[""] * (STEPS - RESUMED))
"""A loader draws a seed where a process takes its first batch."""
NAME = "random-numbers-go-on"


def drawn(evidence, states, *, alike=None):
    ranks = (alike,) * len(states)
    return replace(evidence, random_states=states, random_shared=ranks)


def judged(
    states, control=OWN, *, test=None, alike=None, control_alike=None, precision=Precision.FP32
):
    return judge(
        replace(drawn(test or run("test"), states, alike=alike), precision=precision),
        replace(drawn(run("control"), control, alike=control_alike), precision=precision),
        spec=spec(),
        control_spec=spec(),
    )


def answer(verdict, name=NAME):
    return next(check for check in verdict.checks if check.name == name)


def later_loss(change, since=RESUMED):
    def off(step, value):
        return change * value if step >= since else value

    return with_signals(run("test"), loss=off, loss_recomputed=off)


MASKS = {Precision.FP32: 1.01, Precision.BF16: 1 + 1e-4, Precision.FLOAT8: 1 + 1e-4}
"""What other masks do to a loss; in low precision less than rounding may, so no curve fails."""


@pytest.mark.parametrize("precision", MASKS)
def test_random_numbers_that_start_over_fail_where_a_loss_shows_it(precision):
    verdict = judged(AGAIN, test=later_loss(MASKS[precision]), precision=precision)
    assert verdict.judgement is Judgement.FAIL
    failed = {check.name for check in verdict.checks if check.outcome is Outcome.FAIL}
    assert precision is Precision.FP32 or failed == {NAME}
    assert verdict.cause_class is CauseClass.STATE
    assert verdict.cause.startswith(
        "the random numbers (RNG) start over at step 9: the generators are as they were before "
        "step 1"
    )
    assert "torch.get_rng_state()" in verdict.look_at
    assert answer(verdict).onset == RESUMED


@pytest.mark.parametrize("kind", ["torchtitan", "command"])
def test_only_a_set_of_torchtitan_is_told_what_torchtitan_saves(kind):
    of_kind = spec(trainer=trainer_of_kind(kind).default_spec())
    runs = (drawn(later_loss(MASKS[Precision.FP32]), AGAIN), drawn(run("control"), OWN))
    verdict = judge(*runs, spec=of_kind, control_spec=of_kind)
    assert "torch.get_rng_state()" in verdict.look_at
    assert ("torchtitan saves none of them" in verdict.look_at) is (kind == "torchtitan")


def test_numbers_that_come_again_without_an_effect_are_those_of_a_loader():
    """A script that evaluates between steps draws a seed for every loop over its DataLoader."""
    right = judged(AGAIN)
    assert right.judgement is Judgement.PASS, right.cause
    assert "without an effect on loss or grad norm" in answer(right).detail
    assert "before step 1" in answer(right).detail
    rounding = judged(AGAIN, test=later_loss(1 + 1e-7))
    assert answer(rounding).outcome is Outcome.PASS
    # Off by as much before, where both drew the same numbers.
    before = judged(AGAIN, test=later_loss(1 + 1e-4, since=3), precision=Precision.BF16)
    assert answer(before).outcome is Outcome.PASS
    # Other degrees round otherwise: what float32 would not do, bf16 does.
    tp = later_loss(1 + 1e-4)
    tp = replace(tp, in_force=in_force(Parallelism(tp=2)))
    assert answer(judged(AGAIN, test=tp, precision=Precision.BF16)).outcome is Outcome.PASS
    assert answer(judged(AGAIN, test=replace(tp, in_force=run().in_force))).outcome is Outcome.FAIL


def test_an_effect_that_only_a_later_repeat_has_is_found():
    states = (*OWN[:4], *OWN[:2], "x", "y", *OWN[: STEPS - 8])
    verdict = judged(states, test=later_loss(1.01))
    assert (answer(verdict).outcome, answer(verdict).onset) == (Outcome.FAIL, RESUMED)


def test_without_a_loss_nothing_shows_an_effect():
    signals = dict.fromkeys(("loss", "loss_recomputed", "grad_norm", "grad_norm_recomputed"))
    verdict = judged(AGAIN, test=with_signals(run("test"), **signals))
    assert answer(verdict).outcome is Outcome.INVALID
    assert "no loss shows whether it matters" in answer(verdict).detail


RIGHT = {
    "go on": (OWN, OWN, Outcome.PASS),
    "none drawn": (NOTHING, NOTHING, Outcome.PASS),
    "a loader's seed at every start": (ONCE, ("aa", *[""] * (STEPS - 1)), Outcome.PASS),
    "seeded anew by both": (AGAIN, AGAIN, Outcome.PASS),
    "seeded anew with another seed": (OTHER, OWN, Outcome.PASS),
    "a control that draws nothing": (AGAIN, NOTHING, Outcome.PASS),
    "a test without a record, a control that draws nothing": ((), NOTHING, Outcome.SKIPPED),
    "neither has a record": ((), (), Outcome.SKIPPED),
    "an older control": (AGAIN, (), Outcome.SKIPPED),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_no_start_over_is_not_called_one(case):
    states, control, outcome = RIGHT[case]
    verdict = judged(states, control)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert answer(verdict).outcome is outcome, answer(verdict).detail


def test_a_test_set_without_a_record_is_invalid_where_its_control_draws():
    verdict = judged((), OWN)
    assert verdict.judgement is Judgement.INVALID
    assert "does not record which random numbers it draws" in answer(verdict).detail
    curve = replace(run("test"), samples=())
    assert answer(judged((), OWN, test=curve)).outcome is Outcome.SKIPPED


def test_a_step_without_a_record_is_invalid():
    verdict = judged((*OWN[:5], None, *OWN[6:]))
    assert answer(verdict).outcome is Outcome.INVALID
    assert answer(verdict).detail == "test does not record what it drew in step 6"
    assert verdict.judgement is Judgement.INVALID


def test_other_random_numbers_are_the_cause_of_what_differs_from_there_on():
    wrong = judged(OTHER, test=later_loss(1.5))
    assert wrong.judgement is Judgement.FAIL
    # Nothing was resumed, so nothing was lost: something else draws, or seeds.
    assert wrong.cause_class is CauseClass.LATER
    assert wrong.look_at.startswith("what else draws before step 9, or seeds: an evaluation")
    assert "goes through the same ones" not in wrong.cause
    assert "the random numbers (RNG) are others than the control's from step 9 on" in wrong.cause
    earlier = judged(OTHER, test=later_loss(1.5, since=5))
    assert "RNG" not in earlier.cause
    drawn_otherwise = tuple(f"{step:016x}" for step in range(900, 900 + STEPS))
    never_the_same = judged(drawn_otherwise, test=later_loss(1.5))
    assert "RNG" not in never_the_same.cause
    own_seeds_first = ("a loader's seed", *OTHER[1:])
    assert parted(drawn(run("t"), own_seeds_first), drawn(run("c"), OWN)) == RESUMED


def test_an_evaluation_that_draws_between_steps_is_told_from_another_seed():
    """Each step draws twice: its step 3 begins where the control's step 5 does."""
    twice = (*OWN[:1], *(f"{step:016x}" for step in range(3, 2 + 2 * STEPS, 2)))
    wrong = judged(twice, test=later_loss(1.01, since=2))
    assert "are others than the control's from step 2 on" in wrong.cause
    assert wrong.cause.endswith(
        "; its step 2 begins with the numbers of the control's step 3, so it goes through the same "
        "ones and has drawn more of them by then"
    )
    fewer = judged(OWN, twice, test=later_loss(1.01, since=2))
    assert "step 3 begins with the numbers of the control's step 2" in fewer.cause
    assert fewer.cause.endswith("has drawn fewer of them by then")


def off_from_the_start():
    """As other masks leave a step: neither its loss nor its gradients are the control's."""
    wrong = samples(gradient=lambda step, name, values: values + 0.3 * values[::-1])
    return replace(later_loss(1.01, since=1), samples=wrong)


STOPS = (*OWN[: RESUMED - 1], *[""] * (STEPS - RESUMED + 1))
PAUSES = (*OWN[:4], "", "", *OWN[4:-2])


def test_a_run_that_stops_drawing_has_its_dropout_off():
    verdict = judged(STOPS, test=later_loss(1.01))
    assert verdict.cause == (
        "the run draws no random numbers from step 9 on, and its control does, as if dropout were "
        "off"
    )
    assert verdict.cause_class is CauseClass.LATER
    assert "model.eval()" in verdict.look_at
    assert "before step 9" in verdict.look_at
    test = with_masks(drawn(later_loss(1.01), STOPS), {1: ("a1", "b1"), 4: ("a4", "b4")})
    control = with_masks(drawn(run("control"), OWN), APART)
    with_units = judge(test, control, spec=spec(), control_spec=spec())
    assert with_units.cause == (
        "dropout is off from step 9 on: the run draws no random numbers there, and its control "
        "does (dropping 10% of the units)"
    )
    pauses = judged(PAUSES, test=later_loss(1.01, since=5))
    assert pauses.cause.startswith(
        "the run draws no random numbers at step 5, and its control does"
    )
    starts = judged(OWN, STOPS, test=later_loss(1.01))
    assert starts.cause == (
        "its control draws no random numbers from step 9 on, and the run does, as if dropout were "
        "on"
    )


def test_dropout_that_is_off_from_the_first_step_on_needs_masks_to_show_it():
    """Otherwise it may be a loader that draws seeds, and another bug."""

    def judged_beside(masks, states=NOTHING, control=OWN):
        test = drawn(off_from_the_start(), states)
        beside = with_masks(drawn(run("control"), control), masks)
        return judge(test, beside, spec=spec(), control_spec=spec())

    verdict = judged_beside(APART)
    assert verdict.cause.startswith(
        "dropout is off from step 1 on: the run draws no random numbers"
    )
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "dropout rates of both configurations" in verdict.look_at
    masks = answer(verdict, MASKS_CHECK)
    assert (masks.outcome, masks.detail) == (Outcome.PASS, "test draws no random numbers")
    assert judged_beside({}).cause.startswith("the forward pass or the objective differs")
    assert "dropout is" not in judged_beside(APART, states=OWN).cause


@pytest.mark.parametrize(
    ("states", "test"),
    {
        "without an effect": (STOPS, later_loss(1 + 1e-7)),
        "something was off before": (STOPS, later_loss(1.01, since=5)),
        "it is off later": (STOPS, later_loss(1.01, since=RESUMED + 2)),
        "the same": (OWN, later_loss(1.01)),
        "not recorded": ((), later_loss(1.01)),
    }.values(),
)
def test_a_run_that_stops_drawing_is_no_cause_of_anything_else(states, test):
    verdict = judged(states, test=test)
    assert "dropout were" not in verdict.cause


def test_masks_of_a_generator_without_a_trace_are_not_called_off():
    """It is seeded anew for every mask, so its states show nothing, and masks do."""
    masked = with_masks(drawn(off_from_the_start(), NOTHING), APART)
    control = with_masks(drawn(run("control"), OWN), APART)
    verdict = judge(masked, control, spec=spec(), control_spec=spec())
    assert "dropout is" not in verdict.cause


@pytest.mark.parametrize("library", ["torch", "python", "numpy"])
def test_numbers_that_part_without_an_effect_hide_no_other_cause(library):
    """One more draw at step 2 changes nothing; the learning rate is wrong from step 9 on."""
    parts = (OWN[0], *(f"{step:016x}" for step in range(900, 899 + STEPS)))
    control = with_states(run("control"), library, OWN)

    def judged_with(**signals):
        test = with_states(with_signals(run("test"), **signals), library, parts)
        return judge(test, control, spec=spec(), control_spec=spec())

    def since(step, change):
        return lambda at, value: change * value if at >= step else value

    off = {"loss": since(10, 1.02), "loss_recomputed": since(10, 1.02)}
    verdict = judged_with(lr=since(RESUMED, 1.5), **off)
    assert verdict.cause.startswith("learning-rate schedule: lr is 0.0015 at step 9")
    off = {"loss": since(2, 1.02), "loss_recomputed": since(2, 1.02)}
    assert "are others than the control's from step 2 on" in judged_with(**off).cause


def test_generators_that_start_over_are_named_before_others_that_part_there():
    test = replace(drawn(later_loss(1.01), OTHER), global_random_states={"python": AGAIN})
    control = shuffled(drawn(run("control"), OWN), "python", OWN)
    verdict = judge(test, control, spec=spec(), control_spec=spec())
    assert "the random generators of Python's random as they were" in answer(verdict).detail
    assert "the random numbers (RNG) of Python's random start over at step 9" in verdict.cause


def shuffled(evidence, library, states):
    return replace(evidence, global_random_states={library: states})


LIBRARIES = {"python": ("Python's random", "setstate"), "numpy": ("numpy.random", "set_state")}


@pytest.mark.parametrize("library", LIBRARIES)
def test_generators_of_python_and_numpy_are_judged_each_alone(library):
    whose, restored_by = LIBRARIES[library]
    control = shuffled(run("control"), library, OWN)

    def judged_with(states, test):
        test = shuffled(test, library, states)
        return judge(test, control, spec=spec(), control_spec=spec())

    right = judged_with(OWN, run("test"))
    assert right.judgement is Judgement.PASS, right.cause
    assert answer(right).detail.endswith(f"that draw from {whose}, none as an earlier one")
    assert judged_with(AGAIN, run("test")).judgement is Judgement.PASS  # nothing depends on it
    wrong = judged_with(AGAIN, later_loss(1.01))
    assert wrong.judgement is Judgement.FAIL
    assert f"the random numbers (RNG) of {whose} start over at step 9" in wrong.cause
    assert restored_by in wrong.look_at
    assert (answer(wrong).outcome, answer(wrong).onset) == (Outcome.FAIL, RESUMED)
    # What torch draws goes on, and hides nothing; nor does a generator that is never seeded.
    torch_too = replace(drawn(later_loss(1.01), OWN), global_random_states={library: AGAIN})
    with_torch = judge(torch_too, drawn(control, OWN), spec=spec(), control_spec=spec())
    assert f"of {whose} start over" in with_torch.cause
    never_seeded = shuffled(drawn(later_loss(1.01), AGAIN), library, OTHER)
    theirs = shuffled(drawn(run("control"), OWN), library, tuple(map(str, range(STEPS))))
    verdict = judge(never_seeded, theirs, spec=spec(), control_spec=spec())
    assert "the random numbers (RNG) start over at step 9" in verdict.cause


OWN_OF_EACH_RANK = tuple(f"{step:016x} of four ranks" for step in range(STEPS))
"""Ranks that seed with their own number draw on other degrees what the control never draws."""
SEEDED_AT_EVERY_START = (OWN_OF_EACH_RANK[: RESUMED - 1] + OWN_OF_EACH_RANK)[:STEPS]
FOUR = Parallelism(dp_shard=2, tp=2)


def rounding(evidence, seed, since=1, size=3e-4):
    """The run with other rounding, of which six repeats show that it may be as large."""
    noise = np.random.default_rng(seed).standard_normal(STEPS)

    def off(step, value):
        return value * (1 + size * noise[step - 1] * (step >= since))

    names = ("loss", "loss_recomputed", "grad_norm", "grad_norm_recomputed")
    return with_signals(evidence, **dict.fromkeys(names, off))


def with_states(evidence, library, states):
    return drawn(evidence, states) if library == "torch" else shuffled(evidence, library, states)


@pytest.mark.parametrize("library", ["torch", *LIBRARIES])
@pytest.mark.parametrize(
    ("states", "since"),
    [(SEEDED_AT_EVERY_START, 1), (AGAIN, RESUMED)],
    ids=["never the control's", "the control's before the resume"],
)
def test_draws_that_nothing_depends_on_may_start_over_on_other_degrees(library, states, since):
    """A correct set-up is off by what its control's repeats are."""
    control = with_states(run("control"), library, OWN)
    repeats_of_control = [
        with_states(rounding(run(f"ulp.{seed}", repeat="ulp"), seed), library, OWN)
        for seed in range(6)
    ]
    learnt = calibrate(control, repeats_of_control)

    def judged_with(test):
        test = replace(test, in_force=in_force(FOUR))
        test = with_states(test, library, states)
        return judge(test, control, learnt, spec=spec("test", FOUR), control_spec=spec())

    right = judged_with(rounding(run("test"), 99, since=since))
    assert right.judgement is Judgement.PASS, right.cause
    assert "without an effect on loss or grad norm" in answer(right).detail
    wrong = judged_with(later_loss(1.05))
    assert (answer(wrong).outcome, answer(wrong).onset) == (Outcome.FAIL, RESUMED)


def test_without_repeats_earlier_steps_show_what_rounding_does_beside_numbers_of_python():
    """Torch's may be masks, which are off as far before."""
    four = replace(rounding(run("test"), 99), in_force=in_force(FOUR))
    for library, outcome in {"python": Outcome.PASS, "torch": Outcome.FAIL}.items():
        test = with_states(four, library, SEEDED_AT_EVERY_START)
        control = with_states(run("control"), library, OWN)
        verdict = judge(test, control, spec=spec("test", FOUR), control_spec=spec())
        assert answer(verdict).outcome is outcome


@pytest.mark.parametrize("library", LIBRARIES)
def test_older_controls_are_judged_by_torch_alone_and_older_test_sets_are_invalid(library):
    """They have no digests of Python's and NumPy's generators."""
    older, newer = run("test"), shuffled(run("control"), library, NOTHING)
    assert judge(older, newer, spec=spec(), control_spec=spec()).judgement is Judgement.PASS
    draws = shuffled(run("control"), library, OWN)
    unknown = judge(older, draws, spec=spec(), control_spec=spec())
    assert answer(unknown).outcome is Outcome.INVALID
    assert "train it again" in answer(unknown).detail
    assert judge(draws, run("control"), spec=spec(), control_spec=spec()).judgement is (
        Judgement.PASS
    )


def test_other_samples_by_a_shuffle_that_starts_over_are_named():
    first, second, third = ELASTIC_PASSES
    again = second.batch_digests[:0] + first.batch_digests[: len(second.batch_digests)]
    passes = (first, replace(second, batch_digests=again), third)
    test = replace(later_loss(1.5), passes=passes, replayed=ELASTIC.replayed)
    verdict = judge(
        shuffled(test, "python", AGAIN),
        shuffled(run("control"), "python", OWN),
        spec=ELASTIC_SPEC,
        control_spec=spec(),
    )
    assert verdict.cause.startswith("data order is lost at the resume")
    assert "of Python's random start over there, as they were before step 1: if samples follow" in (
        verdict.cause
    )


def test_ranks_that_drop_the_same_units_fail_where_those_of_the_control_do_not():
    verdict = judged(OWN, alike=True, control_alike=False)
    assert verdict.judgement is Judgement.FAIL
    assert "so all of them drop the same units" in verdict.cause
    assert "ranks that share samples (TP) the same seed" in verdict.look_at
    for ours, theirs in (
        (False, False),
        (True, True),  # Megatron-LM and torchtitan seed so
        (False, True),
        (None, False),  # on one data-parallel rank nothing is shared
        (True, None),
    ):
        right = judged(OWN, alike=ours, control_alike=theirs)
        assert right.judgement is Judgement.PASS, (ours, theirs, right.cause)
        assert answer(right, "ranks-draw-apart").outcome is Outcome.PASS
    once = judged(ONCE, ONCE, alike=True, control_alike=False)
    assert once.judgement is Judgement.PASS, once.cause


def test_a_resume_is_named_with_what_its_load_restored():
    first, second, third = ELASTIC_PASSES
    second = replace(second, loaded=state(8, random_states=("c", "d")))
    first = replace(first, saved=(state(8, random_states=("a", "b")),))
    test = replace(later_loss(1.5), passes=(first, second, third), replayed=ELASTIC.replayed)
    verdict = judge(
        drawn(test, AGAIN), drawn(run("control"), OWN), spec=ELASTIC_SPEC, control_spec=spec()
    )
    assert verdict.judgement is Judgement.FAIL
    assert "start over at step 9" in verdict.cause
    assert "step 9 is part of pass 2, which loads step 8" in verdict.cause
    assert "the generators of 2 of 2 ranks are not in the states saved" in verdict.cause


HALVES = tuple(f"within {step}" for step in range(STEPS))


@pytest.mark.parametrize(
    ("since", "begins"),
    [
        (OWN[0:8:2], 1),  # on half the ranks: a step draws what two steps drew
        (
            [each for two in zip(OWN, HALVES, strict=True) for each in two][:8],
            1,
        ),  # on twice as many
        ((OWN[0], *OWN[RESUMED:]), None),  # the seed of a loader, and what the control draws
        ((OWN[0], *HALVES[:6], OWN[0]), None),
    ],
)
def test_a_start_over_on_other_ranks_is_found_though_steps_draw_more_or_less(since, begins):
    rest = tuple(f"{step:x} later" for step in range(STEPS))
    states = (*OWN[: RESUMED - 1], *since, *rest)[:STEPS]
    found = list(repeats(drawn(ELASTIC, states), drawn(run("c"), OWN)))
    assert found[:1] == ([DrawnAgain(RESUMED, begins)] if begins else [])
    assert not list(repeats(drawn(run("on the same ranks"), states), drawn(run("c"), OWN)))


SEED_ALONE = (OWN[0], *HALVES[:5])
"""Pass 2, steps 9 to 14: its loader draws a seed from the first state; then come other numbers."""


@pytest.mark.parametrize(
    ("second", "third", "again"),
    [
        (SEED_ALONE, OWN[:6], DrawnAgain(15, 1)),
        (OWN[:6], OWN[:6], DrawnAgain(RESUMED, 1)),  # starts over twice
        (SEED_ALONE, SEED_ALONE, DrawnAgain(16, 10)),  # as pass 2
        (SEED_ALONE, (OWN[0], *(f"{step:x} of pass 3" for step in range(5))), None),
    ],
)
def test_the_pass_is_blamed_that_starts_over(second, third, again):
    test = drawn(ELASTIC, (*OWN[: RESUMED - 1], *second, *third))
    assert next(repeats(test, drawn(run("c"), OWN)), None) == again


def test_a_control_that_was_continued_with_its_first_random_numbers_is_no_control():
    first, second, _ = ELASTIC_PASSES
    passes = (first, replace(second, in_force=first.in_force))
    control = replace(ELASTIC, passes=passes, restarts=RestartOwner.USER)
    other = drawn(later_loss(1.5), OWN)
    assert badly_continued(drawn(control, OWN), other=other) is None
    flaw = badly_continued(drawn(control, AGAIN), other=other)
    assert flaw is not None
    assert (flaw.step, "draws the random numbers of step 1 again" in flaw.what) == (9, True)
    # Without an effect, or with nothing that shows one.
    assert badly_continued(drawn(control, AGAIN), other=drawn(run("test"), OWN)) is None
    assert badly_continued(drawn(control, AGAIN)) is None
    # Seeded anew at a step that is no resume: as the program means it.
    assert badly_continued(drawn(control, OWN[:4] + OWN[: STEPS - 4]), other=other) is None


states = st.lists(st.sampled_from(["", *"abcdef"]), min_size=1, max_size=STEPS)


@given(states, states)
@example(["a", "a", "", "a", "a"], ["a", "", "", "a", "a"])
@example(["", "", "a", "a", "", "a", "a"], ["", "", "a", "", "", "a", "a"])
def test_a_repeat_is_two_steps_that_the_run_has_drawn_and_the_control_has_not(mine, theirs):
    def of(found):
        return drawn(run("r", steps=tuple(range(1, len(found) + 1))), tuple(found), alike=True)

    test, control = of(mine), of(theirs)
    assert not list(repeats(control, control))
    assert parted(control, control) is None
    assert all(mine[step - 1] and mine[step] for step in shared(test))
    for step, earlier in repeats(test, control):
        assert earlier < step
        assert mine[step - 1] == mine[earlier - 1]
        assert mine[step] in (mine[earlier], *theirs[earlier : earlier + 1])
        assert "" not in mine[step - 1 : step + 1]
        assert theirs[step - 1] != theirs[earlier - 1]


@given(st.integers(2, STEPS - 1), st.integers(1, STEPS - 1))
def test_starting_over_is_found_wherever_two_steps_follow(resumed, length):
    others = tuple(f"{step:x} seeded anew" for step in range(STEPS))
    again = (OWN[: resumed - 1] + OWN[:length] + others)[:STEPS]
    found = next(repeats(drawn(run("t"), again), drawn(run("c"), OWN)), None)
    assert found == (DrawnAgain(resumed, 1) if length > 1 else None)


UNITS, KEPT = (640, 640), (576, 575)
APART = {1: ("a1", "b1"), 2: ("a2", "b2"), 4: ("a4", "b4"), 8: ("a8", "b8"), 16: ("a9", "b9")}
MASKS_CHECK = "dropout-masks-differ"


def with_masks(evidence, sums, *, kept=KEPT, alike=None):
    """``alike``: whether ranks of other samples share them; None: by the sums of the two ranks."""
    found = (
        DropoutMasks(
            step, UNITS, kept, each, len(set(each)) < len(each) if alike is None else alike
        )
        for step, each in sums.items()
    )
    return replace(evidence, masks=tuple(found))


def judged_by_masks(sums, control=APART, *, test=None, states=NOTHING, **more):
    """``states`` are the control's."""
    return judge(
        with_masks(test or later_loss(1.01, since=1), sums, **more),
        with_masks(drawn(run("control"), states), control),
        spec=spec(),
        control_spec=spec(),
    )


SAME_ON_RANKS = {step: (sums[0], sums[0]) for step, sums in APART.items()}


def test_masks_that_ranks_share_are_named_whatever_the_generators_states_are():
    verdict = judged_by_masks(
        SAME_ON_RANKS, test=drawn(later_loss(1.01, since=1), OWN, alike=False)
    )
    assert verdict.judgement is Judgement.FAIL
    assert answer(verdict, "ranks-draw-apart").outcome is Outcome.PASS
    assert (answer(verdict, MASKS_CHECK).outcome, answer(verdict, MASKS_CHECK).onset) == (
        Outcome.FAIL,
        1,
    )
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert verdict.cause.startswith("ranks drop the same units: at step 1 the dropout masks of")
    # Shared since the resume before step 6, and seen at step 8.
    later = judged_by_masks(APART | {8: ("a8", "a8")}, test=later_loss(1.01, since=6))
    assert "at step 8 the dropout masks of ranks" in later.cause
    earlier = judged_by_masks(APART | {8: ("a8", "a8")}, test=later_loss(1.01, since=3))
    assert "mask" not in earlier.cause


def test_masks_that_come_again_are_named_whatever_the_generators_states_are():
    again = APART | {8: APART[4]}
    verdict = judged_by_masks(again, test=later_loss(1.01, since=5))
    assert verdict.judgement is Judgement.FAIL
    assert answer(verdict, MASKS_CHECK).onset == 8
    assert verdict.cause_class is CauseClass.STATE
    assert verdict.cause.startswith("dropout draws the masks of step 4 again at step 8")
    # Whichever rank it was that had them: a resume may number ranks otherwise.
    turned = judged_by_masks(APART | {8: APART[4][::-1]}, test=later_loss(1.01))
    assert answer(turned, MASKS_CHECK).outcome is Outcome.FAIL
    # The states show it at once.
    started_over = drawn(later_loss(1.01, since=5), OWN[:4] + OWN[:-4])
    states = judged_by_masks(again, test=started_over, states=OWN)
    assert states.cause.startswith("the random numbers (RNG) start over at step 5")


def test_masks_that_come_again_beside_states_that_start_over_later_are_not_told_apart():
    """The loss is off at step 6, and the states start over at step 9, which explains none of it."""

    def off(step, value):
        return value * (1.1 if step >= RESUMED else 1.001 if step > 5 else 1)

    test = drawn(with_signals(run("test"), loss=off, loss_recomputed=off), AGAIN)
    verdict = judged_by_masks(APART | {8: APART[4]}, test=test, states=OWN)
    assert (answer(verdict).outcome, answer(verdict).onset) == (Outcome.FAIL, RESUMED)
    assert verdict.cause == "dropout draws the masks of step 4 again at step 8, on every rank"
    alone = judged_by_masks(APART | {8: APART[4]}, test=later_loss(1.01, since=5))
    assert "though the random numbers (RNG) that are recorded do not start over" in alone.cause


RIGHT_MASKS = {
    "other masks on every rank and step": (APART, APART, Outcome.PASS),
    "those of TP ranks alone are the same": (SAME_ON_RANKS, APART, Outcome.PASS),
    "ranks of the control share them": (SAME_ON_RANKS, SAME_ON_RANKS, Outcome.PASS),
    "the control draws them again": (APART | {8: APART[4]}, APART | {8: APART[4]}, Outcome.PASS),
    "one rank's come again": (APART | {8: ("a4", "b8")}, APART, Outcome.PASS),
    "the control's step is not known": (
        APART | {8: APART[4]},
        {step: sums for step, sums in APART.items() if step != 8},
        Outcome.PASS,
    ),
    "none seen": ({}, APART, Outcome.SKIPPED),
    "none seen in the control": (SAME_ON_RANKS, {}, Outcome.SKIPPED),
}


@pytest.mark.parametrize("case", RIGHT_MASKS)
def test_what_is_no_mask_of_another_is_not_called_one(case):
    sums, control, outcome = RIGHT_MASKS[case]
    alike = False if "TP ranks" in case else None
    verdict = judged_by_masks(sums, control, test=run("test"), alike=alike)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert answer(verdict, MASKS_CHECK).outcome is outcome, answer(verdict, MASKS_CHECK).detail


@pytest.mark.parametrize(("kept", "outcome"), [(624, Outcome.FAIL), (625, Outcome.SKIPPED)])
def test_masks_that_drop_hardly_a_unit_say_nothing(kept, outcome):
    verdict = judged_by_masks(SAME_ON_RANKS, test=run("test"), kept=(kept, kept))
    assert answer(verdict, MASKS_CHECK).outcome is outcome


def test_other_units_are_named_where_they_are_why_the_first_step_differs():
    test = drawn(off_from_the_start(), OWN)
    verdict = judged_by_masks(APART, test=test, states=OWN, kept=(570, 575))
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause == (
        "dropout drops other units than the control's at step 1, though its random generators "
        "begin that step in the same states: their numbers go to other places; so single steps "
        "cannot agree, whether or not anything else is wrong"
    )
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "own_random_numbers = true" in verdict.look_at
    other = drawn(off_from_the_start(), tuple(f"{step:016x}" for step in range(90, 90 + STEPS)))
    other_states = judged_by_masks(APART, test=other, states=OWN, kept=(570, 575))
    assert "begin that step in other states" in other_states.cause


@pytest.mark.parametrize("kept", [KEPT, KEPT[::-1], (639, 639)])
def test_masks_that_may_be_the_same_are_not_called_others(kept):
    """As many units are kept: on other ranks, or by other calls, the same masks have other sums."""
    sums = {step: (f"c{step}", f"d{step}") for step in APART}
    test = drawn(off_from_the_start(), OWN)
    verdict = judged_by_masks(sums, test=test, states=OWN, kept=kept)
    assert verdict.cause.startswith("the forward pass or the objective differs")
    unseen = "both draw random numbers, and other masks of dropout, not seen, would look the same"
    assert (unseen in verdict.cause) is (kept == (639, 639))


def test_other_units_do_not_explain_what_was_off_before_or_begins_later():
    early = drawn(with_signals(off_from_the_start(), lr=lambda step, x: 1.5 * x), OWN)
    assert "learning-rate" in judged_by_masks(APART, test=early, kept=(570, 575)).cause
    agree = judged_by_masks(APART, test=drawn(later_loss(1.01, since=1), OWN), kept=(570, 575))
    assert agree.cause.startswith("only the loss as a number is wrong")
    later = judged_by_masks(APART, test=drawn(later_loss(1.01), OWN), states=OWN, kept=(570, 575))
    assert "drops other units" not in later.cause
    reported = with_signals(run("test"), loss=lambda step, x: 2 * x)
    metric = judged_by_masks(APART, test=drawn(reported, OWN), states=OWN, kept=(570, 575))
    assert metric.cause.startswith("only the metric is wrong")


@pytest.mark.parametrize(("kept", "named"), [((430, 430), True), ((500, 500), False)])
def test_another_rate_is_told_from_other_units_by_what_chance_allows(kept, named):
    """Of 640 units of each rank 10% are dropped, and 33% or 22%: by 7 or 4 standard deviations."""
    test = drawn(off_from_the_start(), OWN)
    cause = judged_by_masks(APART, test=test, states=OWN, kept=kept).cause
    of_rate = "dropout drops 33% of the units at step 1, and the control's 10%"
    assert (cause == of_rate) is named
    assert named or cause.startswith("dropout drops other units than the control's")
