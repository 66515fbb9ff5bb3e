"""The judge on a few simulated experiments: correct runs pass, gross bias fails, at every law.

The rates themselves, from hundreds of experiments, are in docs/operating-characteristics.md.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from characteristics import several_seeds, short_runs, simulation  # noqa: E402
from characteristics.deviations import deviations  # noqa: E402
from characteristics.rates import Rate, Situation, judged  # noqa: E402
from characteristics.rates import _right_runs as right_runs  # noqa: E402
from characteristics.real_runs import real_runs  # noqa: E402
from characteristics.settled_early import STEPS, settled_really  # noqa: E402
from characteristics.tables import several_seeds_table, short_run_table  # noqa: E402
from operating_characteristics import with_table  # noqa: E402

from converge_harness.judge import calibrate  # noqa: E402
from converge_harness.judge.compare.limits import SIGNAL_ALARMS, multiples  # noqa: E402
from converge_harness.model import Judgement, Tier  # noqa: E402

LAWS = pytest.mark.parametrize("law", simulation.LAWS, ids=lambda law: law.name)
GROSS = 0.1


def test_a_limit_of_few_repeats_is_as_wide_as_the_page_on_curves_says():
    page = (BENCHMARKS.parent / "docs" / "curves.md").read_text()
    three, five, eight, twenty = (
        float(multiples(np.array([100]), SIGNAL_ALARMS, repeats)[0]) for repeats in (3, 5, 8, 20)
    )
    said = (
        f"the limit at step 100 is {three:,.0f} times what three repeats differ by, {five:.0f} "
        f"times for five, {eight:.0f} for eight and {twenty:.0f} for twenty"
    )
    assert said in page


@LAWS
def test_right_runs_raise_no_alarm(law):
    verdicts = right_runs((Situation(law, 50, 1.0), 3, 11))
    assert sum(len(of_experiment) for of_experiment in verdicts) == 3 * simulation.TESTS
    assert [one.failed for of_experiment in verdicts for one in of_experiment if one.failed] == []


@LAWS
@pytest.mark.parametrize("start", [1, 26])
def test_a_gross_bias_is_found_at_the_step_where_it_begins(law, start):
    for drawn in simulation.experiments(law, 50, 3, tests=1, seed=12):
        test = simulation.biased(drawn.tests[0], GROSS, start)
        found = judged(test, drawn.control, calibrate(drawn.control, drawn.repeats))
        assert found.judgement is Judgement.FAIL
        assert found.onset == start
        assert found.tier is (Tier.FIRST_STEP if start == 1 else Tier.ENVELOPE)


def test_simulated_runs_follow_their_law():
    """Scale, rounding and the bit-identical rerun are what the laws say."""
    law, steps = simulation.FP32, 200
    drawn = simulation.experiment(law, steps, np.random.SeedSequence(1))
    rerun, other = drawn.repeats[0], drawn.repeats[1]
    assert rerun.signals["loss"] == drawn.control.signals["loss"]
    ratio = (
        other.signals["loss_recomputed"].values / drawn.control.signals["loss_recomputed"].values
    )
    late = np.std(ratio[100:] - 1) / np.sqrt(2)  # of two runs that both deviate
    assert late == pytest.approx(np.sqrt(np.mean(law.scale(steps)[100:] ** 2)), rel=0.5)
    reported = drawn.control.signals["loss"].values
    assert np.array_equal(reported, reported.astype(np.float32))


def test_rates_have_exact_intervals():
    assert Rate(0, 400).interval == (0.0, pytest.approx(0.0092, abs=1e-4))
    assert Rate(5, 100).interval == (
        pytest.approx(0.0164, abs=1e-4),
        pytest.approx(0.1128, abs=1e-4),
    )
    assert Rate(10, 10).interval[1] == 1.0


def test_repeats_of_one_control_raise_no_alarm_and_a_wrong_one_among_them_does():
    drawn = simulation.experiment(simulation.FP32, 50, np.random.SeedSequence(2))
    right = [drawn.control, *drawn.repeats[1:], *drawn.tests[:4]]
    found = real_runs(right)
    assert (found.runs, found.pairs.trials, found.pairs.hits) == (10, 30, 0)
    wrong = simulation.biased(right[-1], 1e-3, 20)
    assert real_runs([*right[:-1], wrong]).controls.hits > 0


def test_real_runs_are_settled_early_unless_they_differ():
    drawn = simulation.experiment(simulation.FP32, STEPS, np.random.SeedSequence(3))
    runs = [drawn.control, *drawn.repeats[1:3]]  # the first is a bit-identical rerun
    found = settled_really(runs)
    assert (found.runs, found.equivalent, found.early) == (3, Rate(3, 3), Rate(3, 3))
    assert found.trained == pytest.approx(
        0.4
    )  # 1,200 steps: the first look after twice the warm-up
    assert (found.wrongly_equivalent.hits, found.different.hits) == (0, 6)
    far = settled_really([*runs[:2], simulation.biased(runs[2], 0.01, 1)])
    assert far.equivalent == Rate(1, 3)
    assert far.apart > 1
    with pytest.raises(ValueError, match="looks are planned for 3000"):
        settled_really([*runs, drawn.control.up_to(100)])


def test_real_runs_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match="a control, 6 repeats and a test set make 8"):
        real_runs([])
    shorter = simulation.experiment(simulation.FP32, 20, np.random.SeedSequence(2))
    longer = simulation.experiment(simulation.FP32, 50, np.random.SeedSequence(2))
    with pytest.raises(ValueError, match="not repeats of one control"):
        real_runs([*longer.tests, *shorter.tests])


def test_deviations_of_test_sets_are_in_units_of_what_repeats_do():
    drawn = simulation.experiment(simulation.FP32, 200, np.random.SeedSequence(3), factor=4.0)
    repeats = [replace(run, name=f"control.{run.name}") for run in drawn.repeats]
    found = deviations([drawn.control, *repeats, *drawn.tests])
    assert [one.name for one in found] == [run.name for run in drawn.tests]
    typical = np.median([one.loss[0] for one in found])
    assert 1.5 < typical < 4.0  # sqrt((1 + 4 ** 2) / 2) is 2.9: the control deviates, too
    with pytest.raises(ValueError, match="no test set of control"):
        deviations([drawn.control, *repeats])
    with pytest.raises(ValueError, match="none of the runs has repeats"):
        deviations(drawn.tests)


def test_a_table_takes_its_place_in_the_page_and_nothing_else():
    page = "before <!-- power: measured -->old<!-- power: end --> after"
    assert with_table(page, "power", "new") == (
        "before <!-- power: measured -->\nnew\n<!-- power: end --> after"
    )
    with pytest.raises(ValueError, match="0 places"):
        with_table(page, "speed", "new")


def test_groups_of_seeds_are_counted_by_what_was_answered():
    """Loud enough effects are found and none is passed; the table has a row for every setting."""
    quiet = several_seeds.Setting(3e-4, 0.5, 5, 5)
    found = {
        effect: several_seeds._measure((quiet, effect, 10, [1])) for effect in (0.0, 0.5, 1.0, 4.0)
    }
    assert found[0.0].same[0].hits == found[0.0].no_worse[0].hits == 0
    assert found[4.0].same[0].hits == found[4.0].no_worse[0].hits == 10
    assert found[4.0].same[1].hits == 0
    rows = [
        replace(found[effect], effect=at)
        for at, effect in zip(several_seeds.EFFECTS, found, strict=True)
    ]
    table = several_seeds_table(rows)
    assert "| same | 0.0%, rho 0.5 | 5 and 5 |" in table
    assert "No rate of a wrong answer" in table
    alarms = replace(rows[0], same=(Rate(9, 10), Rate(0, 10)))
    assert list(several_seeds.not_kept([alarms, *rows[1:]])) == [alarms]


def test_short_runs_that_are_right_are_passed_over_and_biased_ones_are_not():
    found = short_runs._measure((short_runs.UNSTABLE, 16, 20, 1))
    assert [one.bias for one in found] == list(short_runs.BIASES)
    for one in found:
        hits = [rate.hits for rate in one.asked]
        assert hits == sorted(hits, reverse=True)  # the rarer an alarm, the blinder
    usual = short_runs.LEVELS.index(short_runs.USUAL)
    right, wrong = found[0].asked, found[-1].asked
    assert right[0].hits > 10
    assert right[usual].hits < 4
    assert wrong[usual].hits > 15
    table = short_run_table(found)
    assert "| any outside | 1 in 10 | 1 in 20 | 1 in 100 | 1 in 5,000 |" in table
    assert "| bf16, unstable | 16 | none |" in table


def test_a_short_unstable_run_passes_unless_it_is_further_off_than_its_repeats():
    answers = []
    for drawn in simulation.experiments(short_runs.UNSTABLE, 16, 10, tests=1, seed=2):
        learnt = calibrate(drawn.control, drawn.repeats)
        runs = (drawn.tests[0], simulation.biased(drawn.tests[0], 2e-2, 9))
        answers.append([judged(run, drawn.control, learnt).judgement for run in runs])
    right, wrong = zip(*answers, strict=True)
    assert set(right) <= {Judgement.PASS, Judgement.INCONCLUSIVE}
    assert right.count(Judgement.PASS) >= 8  # 1 in 20 is further off
    assert Judgement.PASS not in wrong
