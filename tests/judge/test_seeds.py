"""Runs of several seeds: what differs by more than seeds do is found, and nothing else is."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_examples import judge
from scipy import stats

from converge_harness.judge.compare.seeds import (
    BLOCKS,
    Group,
    blocks,
    over_seeds,
    pair_groups,
    step_noise,
    trajectory,
    welch,
)
from converge_harness.judge.compare.tost import Answer, equivalence
from converge_harness.model import (
    Ask,
    Column,
    Evidence,
    Judgement,
    Outcome,
    ReplayConflict,
    RunStatus,
    SeedRuns,
)

STEPS = 200
AT = np.arange(1, STEPS + 1)
LOSS = 2.0 + 6.0 * AT**-0.4
MARGIN = 0.01
WHOLE = np.ones(STEPS)

# ------------------------------------------------------------- the statistics


def test_the_difference_is_welch_s():
    random = np.random.default_rng(1)
    test, control = 2 + 0.1 * random.standard_normal(4), 2 + 0.3 * random.standard_normal(6)
    found = welch(Group.of(test), Group.of(control))
    reference = stats.ttest_ind(test, control, equal_var=False)
    assert found.difference / found.error == pytest.approx(reference.statistic)
    assert found.degrees == pytest.approx(min(reference.df, 6.0))


def test_of_pairs_it_is_student_s_of_the_differences():
    random = np.random.default_rng(2)
    control = 2 + 0.5 * random.standard_normal(5)
    test = control + 0.01 * random.standard_normal(5)
    found = welch(*pair_groups(test, control))
    reference = stats.ttest_rel(test, control)
    assert found.difference / found.error == pytest.approx(reference.statistic)
    assert found.degrees == reference.df


@given(st.integers(2, 20), st.integers(2, 20), st.floats(0, 1e3), st.floats(0, 1e3))
def test_degrees_of_freedom_stay_between_those_of_the_smaller_group_and_twice_as_many(
    tests, controls, one, other
):
    found = welch(Group(tests, 2.0, one), Group(controls, 2.0, other))
    least = min(tests, controls) - 1
    assert least <= found.degrees <= 2 * least
    assert math.isfinite(found.error)


@pytest.mark.parametrize(
    ("difference", "spread", "same", "no_worse"),
    [
        (0.0, 1e-3, Answer.EQUIVALENT, Answer.EQUIVALENT),
        (0.03, 1e-3, Answer.DIFFERENT, Answer.DIFFERENT),
        (-0.03, 1e-3, Answer.DIFFERENT, Answer.EQUIVALENT),
        (0.0, 3e-2, Answer.INCONCLUSIVE, Answer.INCONCLUSIVE),
        (0.01, 1e-3, Answer.INCONCLUSIVE, Answer.INCONCLUSIVE),
        (0.0, 0.0, Answer.EQUIVALENT, Answer.EQUIVALENT),
    ],
)
def test_only_a_whole_interval_on_one_side_of_the_margin_is_an_answer(
    difference, spread, same, no_worse
):
    test, control = Group(4, 2 * (1 + difference), (2 * spread) ** 2), Group(4, 2.0, spread**2)
    for one_sided, answer in ((False, same), (True, no_worse)):
        found = over_seeds(test, control, MARGIN, one_sided=one_sided)
        assert found.outcome is answer
        assert (found.bound <= MARGIN) == (answer is Answer.EQUIVALENT)


@pytest.mark.parametrize(("seeds", "margin"), [(1, 0.01), (3, 0.0), (3, math.nan)])
def test_what_cannot_be_tested_is_refused(seeds, margin):
    with pytest.raises(ValueError, match=r"seeds|margin"):
        over_seeds(Group(seeds, 2.0, 0.1), Group(3, 2.0, 0.1), margin)


def level_answer(random, seeds, spread):
    groups = [Group.of(2 * (1 + spread * random.standard_normal(seeds))) for _ in range(2)]
    return groups, over_seeds(*groups, MARGIN)


def test_further_seeds_settle_it_about_as_often_as_promised():
    random = np.random.default_rng(5)
    settled = foreseen = 0
    for _ in range(150):
        values = [2 * (1 + 8e-3 * random.standard_normal(500)) for _ in range(2)]
        few = over_seeds(*(Group.of(each[:4]) for each in values), MARGIN)
        if few.further_seeds is None or few.further_seeds > 490:
            continue
        foreseen += 1
        more = 4 + few.further_seeds
        settled += (
            over_seeds(*(Group.of(each[:more]) for each in values), MARGIN).outcome
            is not Answer.INCONCLUSIVE
        )
    assert foreseen > 50
    assert settled / foreseen > 0.75


def test_nothing_is_foreseen_next_to_the_margin():
    found = over_seeds(Group(5, 2.02, 1e-4), Group(5, 2.0, 1e-4), MARGIN)
    assert (found.outcome, found.further_seeds, found.lengthened) == (
        Answer.INCONCLUSIVE,
        None,
        None,
    )


def test_longer_runs_help_where_noise_of_steps_makes_the_spread_and_not_where_seeds_do():
    test = control = Group(6, 2.0, 4e-4)
    of_steps = over_seeds(test, control, MARGIN, noise=(4e-4, 4e-4))
    of_seeds = over_seeds(test, control, MARGIN, noise=(0.0, 0.0))
    assert of_steps.outcome is of_seeds.outcome is Answer.INCONCLUSIVE
    assert of_steps.lengthened > 1
    assert of_seeds.lengthened is None
    assert of_seeds.further_seeds == of_steps.further_seeds > 0
    longer = (Group(6, 2.0, 4e-4 / of_steps.lengthened),) * 2
    assert over_seeds(*longer, MARGIN).outcome is Answer.EQUIVALENT


def test_noise_of_steps_is_that_of_the_mean():
    random = np.random.default_rng(3)
    values = LOSS + 0.05 * random.standard_normal((40, STEPS))
    assert step_noise(values) == pytest.approx(0.05**2 / STEPS, rel=0.3)
    # What a seed keeps through the whole run is no noise of its steps.
    assert step_noise(values + random.standard_normal((40, 1))) == pytest.approx(step_noise(values))
    assert step_noise(values[:, :4]) == 0.0


@given(st.integers(0, 300))
def test_blocks_cover_the_run_once(steps):
    found = blocks(steps)
    assert [at for each in found for at in range(each.first, each.last + 1)] == list(range(steps))
    assert len(found) <= BLOCKS
    assert all(each.last > each.first for each in found) or steps < 2


def test_a_bump_that_is_over_before_the_second_half_shows_in_its_block():
    random = np.random.default_rng(4)
    control, test = (LOSS * (1 + 2e-3 * random.standard_normal((5, STEPS))) for _ in range(2))
    test[:, 50:75] *= 1.05
    off = [each.block for each in trajectory(test, control) if each.excess > MARGIN]
    assert off == [(50, 74)]
    assert not [each for each in trajectory(control, control) if each.excess > MARGIN]


def test_one_sided_equivalence_over_steps_takes_what_is_lower():
    noise = 1e-3 * np.random.default_rng(2).standard_normal(100)
    for bias, same, no_worse in (
        (0.0, Answer.EQUIVALENT, Answer.EQUIVALENT),
        (-0.05, Answer.DIFFERENT, Answer.EQUIVALENT),
        (0.05, Answer.DIFFERENT, Answer.DIFFERENT),
    ):
        assert equivalence(bias + noise, MARGIN).outcome is same
        found = equivalence(bias + noise, MARGIN, one_sided=True)
        assert found.outcome is no_worse
        assert (found.bound <= MARGIN) == (no_worse is Answer.EQUIVALENT)
    worse_at_end = np.linspace(-0.05, 0.05, 100) + noise
    assert equivalence(worse_at_end, MARGIN, one_sided=True).outcome is not Answer.EQUIVALENT


# ------------------------------------------------------------------ verdicts


def run(name, seed, factor=WHOLE, spread=1e-3, **more):
    random = np.random.default_rng(seed)
    level = 1 + spread * random.standard_normal()
    noise = 1 + 5e-3 * random.standard_normal(STEPS)
    signals = {"loss": LOSS * level * noise * factor}
    return Evidence(name, f"{name}.csv", AT, signals, **more)


def runs(factor=WHOLE, count=4, **more):
    control = tuple(run(f"c{seed}", seed) for seed in range(count))
    test = tuple(run(f"t{seed}", 100 + seed, factor, **more) for seed in range(count))
    return SeedRuns(control, test)


def judged(seeds, ask=Ask.SAME, margin=MARGIN, **more):
    return judge(
        seeds.test[0],
        seeds.control[0],
        ask=ask,
        seeds=seeds,
        same_seed=False,
        margin=margin,
        **more,
    )


def outcomes(verdict):
    return {check.name: check.outcome for check in verdict.checks}


@pytest.mark.parametrize(
    ("factor", "same", "no_worse"),
    [
        (WHOLE, Judgement.PASS, Judgement.PASS),
        (1.05 * WHOLE, Judgement.FAIL, Judgement.FAIL),
        (0.95 * WHOLE, Judgement.FAIL, Judgement.PASS),
        (np.where((AT > 60) & (AT <= 90), 1.2, 1.0), Judgement.FAIL, Judgement.PASS),
        (np.where(AT > 175, 1.04, 0.99), Judgement.FAIL, Judgement.FAIL),
    ],
    ids=["the same", "higher", "lower", "a bump on the way", "higher at the end"],
)
def test_the_two_questions(factor, same, no_worse):
    seeds = runs(factor)
    for ask, judgement in ((Ask.SAME, same), (Ask.NO_WORSE, no_worse)):
        verdict = judged(seeds, ask)
        assert verdict.judgement is judgement, verdict.cause
        assert verdict.ask is ask
        assert bool(verdict.cause) == (judgement is not Judgement.PASS)
        assert {"loss-envelope", "loss-first-step", "updates-first-steps"} <= {*verdict.not_asked}


def test_what_is_open_says_how_many_seeds_settle_it():
    verdict = judged(runs(count=2), margin=3e-3)
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert "further seeds per side" in verdict.cause
    assert verdict.next_command == (
        "converge compare --seeds --control c0.csv c1.csv CONTROL_3 … "
        "--test t0.csv t1.csv TEST_3 … --margin 0.003"
    )


def with_loss(evidence, values):
    return replace(evidence, signals={"loss": Column.of(values)})


def broken_runs():
    seeds = runs()
    last = seeds.test[-1]
    cut = slice(0, STEPS // 2)
    nan = np.where(AT == 150, math.nan, last.signals["loss"].values)
    half = replace(last, steps=AT[cut], signals={"loss": last.signals["loss"].values[cut]})
    hole = replace(
        last, steps=AT[AT != 50], signals={"loss": last.signals["loss"].values[AT != 50]}
    )
    zero = Column.of(np.zeros(STEPS))
    return {
        "NaN": with_loss(last, nan),
        "cut": half,
        "hole": hole,
        "crashed": replace(last, status=RunStatus.CRASHED),
        "short": replace(last, expected_steps=2 * STEPS),
        "contradicts": replace(last, replay_conflicts=(ReplayConflict(3, "loss 2, then 3"),)),
        "no loss": replace(last, signals={"grad_norm": np.ones(STEPS)}),
        "other steps": replace(last, steps=AT + 1000),
        "still": with_loss(last, np.full(STEPS, 2.0)),
        "no rate": replace(last, signals={**last.signals, "lr": zero}),
        "another seed's curve": replace(seeds.test[0], name="again"),
        "another seed's curve but for rounding": with_loss(
            replace(seeds.test[0], name="again"),
            seeds.test[0].signals["loss"].values * (1 + 1e-9 * AT**3 / STEPS),
        ),
    }


@pytest.mark.parametrize("ask", list(Ask))
@pytest.mark.parametrize("side", ["control", "test"])
@pytest.mark.parametrize("flaw", broken_runs())
def test_one_broken_run_of_many_never_passes(flaw, side, ask):
    """Whichever side it is on, and although it is none of the two that are looked at first."""
    broken = broken_runs()[flaw]
    seeds = runs()
    if side == "control":
        others = (seeds.control[-1],) if "another" in flaw else ()
        mine = broken if not others else replace(broken, signals=_doubled(broken, seeds))
        seeds = SeedRuns((*seeds.control[:-1], mine), seeds.test)
    else:
        seeds = SeedRuns(seeds.control, (*seeds.test[:-1], broken))
    verdict = judged(seeds, ask)
    expected = {
        ("NaN", "test"): Judgement.FAIL,
        ("crashed", "test"): Judgement.ERROR,
    }.get((flaw, side), Judgement.INVALID)
    assert verdict.judgement is expected, verdict.cause
    assert broken.name in verdict.cause or "crashed" in verdict.cause


def _doubled(broken, seeds):
    """The first control's curve, as the broken test run is that of the first test."""
    factor = broken.signals["loss"].values / runs().test[0].signals["loss"].values
    return {"loss": Column.of(seeds.control[0].signals["loss"].values * factor)}


@pytest.mark.parametrize(("tests", "controls"), [(1, 4), (4, 1)])
def test_one_seed_is_no_sample(tests, controls):
    seeds = runs()
    verdict = judged(SeedRuns(seeds.control[:controls], seeds.test[:tests]))
    assert verdict.judgement is Judgement.INVALID
    assert "has 1 seed: at least 2 per side" in verdict.cause


def test_control_and_test_may_be_the_same_to_the_last_bit():
    """As where the change changes nothing, and both sides have the same seeds."""
    seeds = runs()
    verdict = judged(SeedRuns(seeds.control, seeds.control))
    assert verdict.judgement is Judgement.PASS


def test_another_token_budget_is_no_comparison():
    def counted(evidence, tokens):
        random = np.random.default_rng(1)
        counts = tokens + random.integers(-5, 5, STEPS)
        return replace(evidence, signals={**evidence.signals, "tokens": counts.astype(float)})

    seeds = runs()
    control = tuple(counted(each, 1000) for each in seeds.control)
    for budget, judgement in ((1000, Judgement.PASS), (2000, Judgement.INVALID)):
        test = tuple(counted(each, budget) for each in seeds.test)
        verdict = judged(SeedRuns(control, test))
        assert verdict.judgement is judgement
    assert outcomes(verdict)["same-token-budget"] is Outcome.INVALID
    assert "t0 trains on 1999.71 tokens a step, c0 on 999.71" in verdict.cause


def test_a_coarse_log_answers_nothing():
    seeds = runs()

    def coarse(side):
        return tuple(
            replace(
                with_loss(each, np.round(each.signals["loss"].values, 1)), rounding={"loss": 0.05}
            )
            for each in side
        )

    verdict = judged(SeedRuns(coarse(seeds.control), coarse(seeds.test)))
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert "printed too coarsely" in verdict.cause


# --------------------------------------------------- no worse, of one pair


@pytest.mark.parametrize(
    ("factor", "judgement"),
    [
        (0.9, Judgement.PASS),
        (1.001, Judgement.PASS),
        (1.05, Judgement.FAIL),
        (1.0 + 0.01, Judgement.INCONCLUSIVE),
    ],
)
def test_a_change_of_one_pair_is_asked_for_its_loss_alone(factor, judgement):
    seeds = runs()
    control = seeds.control[0]
    noise = 1 + 2e-3 * np.random.default_rng(7).standard_normal(STEPS)
    test = with_loss(replace(control, name="t"), control.signals["loss"].values * factor * noise)
    verdict = judge(test, control, ask=Ask.NO_WORSE, margin=MARGIN)
    assert verdict.judgement is judgement, verdict.cause
    assert "updates-first-steps" in verdict.not_asked
    assert "loss-no-worse" in outcomes(verdict)
    if judgement is not Judgement.PASS:
        assert "of one seed" in verdict.cause


def test_a_loss_that_stands_still_is_not_better():
    control = run("c", 1)
    for value in (0.0, 1.0):
        verdict = judge(
            with_loss(run("t", 2), np.full(STEPS, value)), control, ask=Ask.NO_WORSE, margin=MARGIN
        )
        assert verdict.judgement is Judgement.INVALID


def test_an_ordinary_verdict_leaves_nothing_out():
    seeds = runs()
    verdict = judge(seeds.test[0], seeds.control[0])
    assert (verdict.ask, verdict.not_asked) == (Ask.SAME, ())


def test_runs_of_one_seed_are_asked_everything_and_the_seeds_beside():
    """As the runs of an experiment are: the first pair step by step, all over the seeds."""
    seeds = runs()
    twins = SeedRuns(seeds.control, (replace(seeds.control[0], name="t0"), *seeds.test[1:]))
    verdict = judge(twins.test[0], twins.control[0], seeds=twins, margin=MARGIN)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert verdict.not_asked == ()
    assert {"loss-envelope", "loss-same-over-seeds"} <= {*outcomes(verdict)}
    # All but the twin are higher: the first pair shows nothing of it.
    higher = tuple(with_loss(each, each.signals["loss"].values * 1.05) for each in twins.test[1:])
    worse = SeedRuns(
        twins.control,
        (
            twins.test[0],
            *higher,
            *(
                with_loss(
                    replace(each, name=f"more {each.name}"), each.signals["loss"].values * 1.0501
                )
                for each in runs(count=8).test[4:]
            ),
        ),
    )
    verdict = judge(worse.test[0], worse.control[0], seeds=worse, margin=1e-3)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause.startswith("mean loss of 8 seeds +0.0")
    assert outcomes(verdict)["loss-envelope"] is Outcome.PASS


def ended(evidence, last):
    """As a run that stops once it has reached its target."""
    kept = slice(0, last)
    return replace(evidence, steps=AT[kept], signals={"loss": loss_of(evidence)[kept]})


def loss_of(evidence):
    return evidence.signals["loss"].values


@pytest.mark.parametrize(
    ("pace", "judgement"),
    [(1.0, Judgement.PASS), (1.5, Judgement.PASS), (0.5, Judgement.FAIL)],
    ids=["as soon", "sooner", "later"],
)
def test_a_target_is_reached_in_no_more_steps(pace, judgement):
    def seed(name, number, pace):
        random = np.random.default_rng(number)
        reached = pace * (1 + 0.02 * random.standard_normal())
        return Evidence(name, f"{name}.csv", AT, {"loss": 2.0 + 6.0 * (AT * reached) ** -0.4})

    control = tuple(seed(f"c{number}", number, 1.0) for number in range(5))
    test = tuple(seed(f"t{number}", 10 + number, pace) for number in range(5))
    shorter = tuple(ended(each, 150) for each in test)
    for runs in (SeedRuns(control, test), SeedRuns(control, shorter)):
        verdict = judged(runs, margin=0.15, target=3.0, ask=None)
        assert verdict.judgement is judgement, verdict.cause
        assert verdict.ask is Ask.NO_WORSE
        assert {"same-steps", "loss-no-worse"}.isdisjoint(outcomes(verdict))


def test_a_target_that_is_not_reached_is_no_pass():
    control = tuple(run(f"c{seed}", seed) for seed in range(4))
    test = tuple(run(f"t{seed}", 100 + seed) for seed in range(4))
    verdict = judged(SeedRuns(control, test), margin=0.15, target=0.5)
    assert verdict.judgement is Judgement.INVALID
    assert "the control c0 never reaches a loss of 0.5" in verdict.cause
    stuck = (*test[:-1], with_loss(test[-1], loss_of(test[-1]) + 1.0))
    verdict = judged(SeedRuns(control, stuck), margin=0.9, target=3.0)
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert "t3 never below 3" in verdict.cause
    for margin, target in ((None, 3.0), (0.1, math.nan)):
        with pytest.raises(ValueError, match="target"):
            judged(SeedRuns(control, test), margin=margin, target=target)


@pytest.mark.parametrize(
    ("factor", "judgement"),
    [(1.0, Judgement.PASS), (1.001, Judgement.PASS), (1.02, Judgement.FAIL)],
)
def test_pairs_of_one_seed_are_compared_seed_by_seed(factor, judgement):
    """Seeds lie 20% apart, which three of them as a group could say nothing of."""
    control = tuple(run(f"c{seed}", seed, spread=0.2) for seed in range(3))
    random = np.random.default_rng(7)
    test = tuple(
        replace(
            with_loss(
                each,
                each.signals["loss"].values
                * factor
                * (1 + 1e-4 * random.standard_normal(STEPS) * (number > 0)),
            ),
            name=f"t{number}",
        )
        for number, each in enumerate(control)
    )
    seeds = SeedRuns(control, test, paired=True)
    assert judged(seeds).judgement is judgement
    assert judged(replace(seeds, paired=False)).judgement is Judgement.INCONCLUSIVE
    assert "seed by seed" in next(
        each.detail for each in judged(seeds).checks if each.name == "loss-same-over-seeds"
    )
    with pytest.raises(ValueError, match="3 and 2 seeds are no pairs"):
        judged(replace(seeds, control=control[:2]))


def test_seeds_that_are_not_those_of_the_runs_are_refused():
    seeds = runs()
    with pytest.raises(ValueError, match="first runs of seeds"):
        judge(seeds.test[1], seeds.control[0], seeds=seeds)
    with pytest.raises(ValueError, match="give seeds"):
        judge(seeds.test[0], seeds.control[0], same_seed=False)


def decaying(name, number, *, pace=1.0, at=AT):
    """A loss that falls below 3 within 60 to 200 steps, by its pace; seeds vary it by 2%."""
    random = np.random.default_rng(number)
    reached = pace * (1 + 0.02 * random.standard_normal())
    return Evidence(name, f"{name}.csv", at, {"loss": 2.0 + 6.0 * (at * reached) ** -0.4})


def by_target(change, *, control=lambda evidence: evidence, margin=0.15):
    """The verdict on four seeds that are the control's with a change each."""
    ours = tuple(change(decaying(f"t{number}", 10 + number)) for number in range(4))
    theirs = tuple(control(decaying(f"c{number}", number)) for number in range(4))
    return judged(SeedRuns(theirs, ours), margin=margin, target=3.0)


def altered(evidence, where, value):
    losses = loss_of(evidence).copy()
    losses[where] = value
    return with_loss(evidence, losses)


def test_a_run_that_leaves_its_target_again_has_not_reached_it():
    diverged = by_target(lambda each: altered(each, slice(120, None), 50.0))
    assert diverged.judgement is not Judgement.PASS
    assert "above it again at the end" in diverged.cause
    broken = by_target(lambda each: each, control=lambda each: altered(each, slice(120, None), 9.0))
    assert broken.judgement is Judgement.INVALID
    assert "c0 reaches and leaves again a loss of 3" in broken.cause


def test_a_glitch_of_the_log_reaches_no_target():
    slow = tuple(decaying(f"t{number}", 10 + number, pace=0.5) for number in range(4))
    control = tuple(decaying(f"c{number}", number) for number in range(4))
    glitch = tuple(altered(each, 2, 1e-9) for each in slow)
    for runs in (slow, glitch):
        verdict = judged(SeedRuns(control, runs), margin=0.15, target=3.0)
        assert verdict.judgement is Judgement.FAIL, verdict.cause


def test_curves_have_to_show_how_a_target_is_reached():
    def cut(evidence, kept):
        return replace(evidence, steps=AT[kept], signals={"loss": loss_of(evidence)[kept]})

    hole = np.r_[0:40, 140 : AT.size]
    for verdict in (
        by_target(lambda each: cut(each, hole)),
        by_target(lambda each: each, control=lambda each: cut(each, hole)),
    ):
        assert verdict.judgement is Judgement.INVALID
        assert "lacks steps 41 to 140" in verdict.cause
    late = by_target(lambda each: cut(each, slice(20, None)))
    assert late.judgement is Judgement.INVALID
    assert "t0 begins at step 21 and c0 at step 1" in late.cause
    there = by_target(lambda each: with_loss(each, loss_of(each) - 6))
    assert there.judgement is Judgement.INVALID
    assert "t0 is at a loss of 3 at its first point already" in there.cause


def test_a_log_that_is_too_sparse_for_a_margin_asks_for_no_seeds():
    rarely = slice(0, None, 20)
    sparse = by_target(
        lambda each: replace(each, steps=AT[rarely], signals={"loss": loss_of(each)[rarely]}),
        margin=0.05,
    )
    assert sparse.judgement is Judgement.INCONCLUSIVE
    assert "log more often, or give a larger margin" in sparse.cause
    assert sparse.next_command == ""


def test_reruns_of_one_seed_that_are_printed_coarsely_count_once():
    def printed(evidence, number):
        noise = 1 + 1e-6 * np.random.default_rng(number).standard_normal(AT.size)
        losses = np.round(loss_of(evidence) * noise, 4)
        made = with_loss(replace(evidence, name=f"{evidence.name}.{number}"), losses)
        return replace(made, rounding={"loss": 5e-5})

    one, other = run("a", 1), run("b", 2)
    reruns = SeedRuns(
        tuple(printed(one, number) for number in range(3)),
        tuple(printed(other, number) for number in range(3)),
    )
    verdict = judged(reruns, margin=0.01)
    assert verdict.judgement is Judgement.INVALID
    assert "have the same loss except for rounding at their first 25 steps" in verdict.cause
    seeds = SeedRuns(
        tuple(printed(run(f"c{number}", number), 0) for number in range(3)),
        tuple(printed(run(f"t{number}", 9 + number), 0) for number in range(3)),
    )
    assert judged(seeds, margin=0.05).judgement is Judgement.PASS


def test_tokens_are_compared_where_they_are_counted():
    pair = runs(count=3)
    counted = [
        replace(each, signals={**each.signals, "tokens": np.full(AT.size, tokens)})
        for each, tokens in ((pair.control[0], 1000.0), (pair.test[0], 2000.0))
    ]
    mixed = SeedRuns((counted[0], *pair.control[1:]), (counted[1], *pair.test[1:]))
    verdict = judged(mixed, margin=0.05)
    assert verdict.judgement is Judgement.INVALID
    assert "trains on 2000 tokens a step" in verdict.cause


def test_a_loss_that_stops_moving_halfway_is_no_training():
    pair = runs(count=3)
    frozen = SeedRuns(
        pair.control, (altered(pair.test[0], slice(STEPS // 3, None), 0.001), *pair.test[1:])
    )
    verdict = judged(frozen, ask=Ask.NO_WORSE, margin=0.05)
    assert verdict.judgement is Judgement.INVALID
    assert f"is 0.001 at all of its last {STEPS - STEPS // 2} steps" in verdict.cause
    coarse = (replace(frozen.test[0], rounding={"loss": 5e-4}), *frozen.test[1:])
    assert judged(SeedRuns(pair.control, coarse), ask=Ask.NO_WORSE).judgement is not Judgement.PASS
