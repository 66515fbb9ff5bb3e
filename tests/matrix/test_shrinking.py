"""What is the same failure, and the smallest pair as a file; real runs: ``tests/e2e``."""

from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.matrix.failure import WAIVED, Failure, failure_of, is_failure, trial_of
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.pair_files import write_pair
from converge_harness.matrix.shrink import NothingToShrinkError, Shrinking
from converge_harness.model import (
    CauseClass,
    Check,
    Deviation,
    Experiment,
    Judgement,
    Outcome,
    Tier,
    Verdict,
)
from converge_harness.plan import select
from converge_harness.shrink import Effect, Trial, reductions, smallest_pair, why_not
from converge_harness.trainers import assume_toolchain

ROOT = Path(__file__).parents[2]
SCALE = CauseClass.GRADIENT_SCALE


def planned(experiment: Experiment):
    return plan_experiment(experiment, on_gpu=False, find=assume_toolchain)


def meaning(experiment: Experiment):
    """Everything that a run depends on, by the name of its set."""
    return {job.name: job.identity for job in planned(experiment).jobs}


@pytest.mark.parametrize("name", ["known_bugs", "four_d", "guide_bugs", "megatron"])
def test_a_pair_that_is_written_means_the_same_when_it_is_read(tmp_path, name):
    experiment = load_experiment(ROOT / "experiments" / f"{name}.toml")
    written = 0
    for spec in experiment.tests:
        pair = smallest_pair(select(experiment, [spec.name]), experiment.repeats[:1], WAIVED)
        for made in (pair, *(each.made for each in list(reductions(pair))[::3])):
            try:
                wanted = meaning(made)
            except ConfigError:
                continue  # no plan: nothing that a search would keep
            written += 1
            path, *_ = write_pair(made, "smaller", tmp_path / str(written), "converge shrink")
            assert meaning(load_experiment(path)) == wanted
            assert load_experiment(path).controls[0].trainer == spec.trainer
    assert written > 3 * len(experiment.tests)


def verdict_with(*tensors, cause_class=SCALE):
    deviations = tuple(Deviation(each, 1, 2.0, 1.0) for each in tensors)
    failed = Check("gradient-scale", "", Tier.FIRST_STEP, Outcome.FAIL, deviations=deviations)
    return Verdict("t", "c", Judgement.FAIL, "scaled", cause_class, checks=(failed,))


def test_a_failure_is_the_same_in_fewer_layers_and_by_the_same_class():
    whole = failure_of(verdict_with("layers.0.attention.wq.weight", "layers.3.ffn.w1.weight"))
    assert whole.tensors == {"layers.*.attention.wq.weight", "layers.*.ffn.w1.weight"}
    assert failure_of(verdict_with("layers.1.ffn.w1.weight")).is_that_of(whole)
    assert not failure_of(verdict_with("norm.weight")).is_that_of(whole)
    assert failure_of(verdict_with()).is_that_of(whole)  # it names no tensor
    other = failure_of(verdict_with("layers.1.ffn.w1.weight", cause_class=CauseClass.UPDATE))
    assert not other.is_that_of(whole)
    assert Failure(SCALE, frozenset(), "").is_that_of(whole)


def test_a_failure_is_the_same_only_in_the_same_module():
    def wrong_in(module):
        return failure_of(replace(verdict_with("norm.weight"), module=module))

    whole = wrong_in("layers.3.attention.wo")
    assert whole.module == "layers.*.attention.wo"
    assert wrong_in("layers.0.attention.wo").is_that_of(whole)
    assert not wrong_in("layers.3.feed_forward").is_that_of(whole)
    assert not wrong_in("layers.3.attention.w").is_that_of(whole)
    for module in ("", "layers.0"):  # not recorded; a compiled block
        assert wrong_in(module).is_that_of(whole)
        assert whole.is_that_of(wrong_in(module))


def not_in_force(detail):
    named = Check("named-in-force", "", Tier.INTEGRITY, Outcome.INVALID, detail=detail)
    return Verdict("t", "c", Judgement.INVALID, detail, checks=(named,))


ASYNC_TP = not_in_force("async_tp is named but not in force: 8 products were not fused; tp 2")


def test_a_set_that_names_what_does_not_run_is_followed_by_what_that_is():
    whole = failure_of(ASYNC_TP)
    assert is_failure(ASYNC_TP)
    assert whole.not_in_force == {"async_tp"}
    fewer = not_in_force("async_tp is named but not in force: 2 products were not fused")
    assert trial_of(fewer, whole) == Trial(Effect.SAME, fewer.cause)
    other = not_in_force("without_fixes symm-mem is named, none is in force")
    assert trial_of(other, whole).effect is Effect.UNDECIDED
    assert trial_of(verdict_with("norm.weight"), whole).effect is Effect.OTHER
    halved = failure_of(not_in_force("tp 2 is named, 1 is in force"))
    assert halved.is_that_of(failure_of(not_in_force("tp 4 is named, 1 is in force")))
    assert not halved.is_that_of(failure_of(not_in_force("cp 2 is named, 1 is in force")))
    injected = failure_of(not_in_force("inject a.py:f is named, None is in force"))
    assert injected.not_in_force == {"inject a.py:f"}
    # A set that fails is not followed by one whose numbers were not compared.
    assert trial_of(ASYNC_TP, failure_of(verdict_with("norm.weight"))).effect is Effect.UNDECIDED


@pytest.mark.parametrize(
    "verdict",
    [
        not_in_force("t left no record of what ran"),
        not_in_force("optimizer.lrr = 1 is named but cannot be verified: no such key"),
        replace(ASYNC_TP, judgement=Judgement.ERROR),
        replace(ASYNC_TP, checks=()),
        replace(ASYNC_TP, checks=(replace(ASYNC_TP.checks[0], name="same-config"),)),
        Verdict("t", "c", Judgement.PASS),
    ],
    ids=["no record", "no such key", "crashed", "nothing compared", "another check", "passes"],
)
def test_other_sets_that_do_not_fail_are_not_followed(verdict):
    assert not is_failure(verdict)


def test_what_cannot_be_shrunk_is_refused():
    elastic = load_experiment(ROOT / "experiments" / "elastic.toml")
    mapped = load_experiment(ROOT / "experiments" / "across_frameworks.toml").tests[0]
    assert "by another trainer than its control" in why_not(mapped)
    program = load_experiment(ROOT / "experiments" / "zero.toml").tests[0]
    assert why_not(program) == ""
    with pytest.raises(ConfigError, match="only sets of one pass can be shrunk"):
        Shrinking(elastic, elastic.tests[0].name, lambda plan: None, None)
    with pytest.raises(ConfigError, match="no set 'nobody'"):
        Shrinking(elastic, "nobody", lambda plan: None, None)
    with pytest.raises(ConfigError, match="is not a single test set"):
        Shrinking(elastic, elastic.controls[0].name, lambda plan: None, None)


class Scripted(Shrinking):
    """Gives verdicts in an order, and notes which were asked from nothing."""

    def __init__(self, *verdicts):
        super().__init__(load_experiment(ROOT / "experiments" / "smoke.toml"), "ddp2", None, None)
        self.verdicts, self.fresh = list(verdicts), []

    def _judged(self, experiment, *, fresh=None):
        self.fresh.append(fresh)
        return self.verdicts.pop(0)


PASSES = Verdict("t", "c", Judgement.PASS)
FAILS = verdict_with("norm.weight")


def test_a_set_that_failed_and_passes_now_is_counted():
    again = Scripted(PASSES, FAILS, PASSES)
    with pytest.raises(NothingToShrinkError, match=r"is PASS, not FAIL; it failed in 1 of 3 runs"):
        again.failure(failed=True)
    assert again.fresh == [None, True, True]
    with pytest.raises(NothingToShrinkError, match=r"is PASS, not FAIL \(only a set that FAILs"):
        Scripted(PASSES, PASSES, PASSES).failure(failed=True)
    hung = Scripted(replace(PASSES, judgement=Judgement.ERROR, cause="hung"))
    with pytest.raises(NothingToShrinkError, match="is ERROR, not FAIL: hung"):
        hung.failure(failed=True)
    assert hung.fresh == [None]
    once = Scripted(PASSES)
    with pytest.raises(NothingToShrinkError):
        once.failure(failed=False)
    assert once.fresh == [None]


def test_a_set_that_passes_with_fewer_repeats_is_counted():
    again = Scripted(FAILS, PASSES, PASSES, FAILS, ASYNC_TP)
    with pytest.raises(NothingToShrinkError, match=r"it passes; it failed in 1 of 3 runs"):
        again.start(again.failure(failed=True))
    assert again.fresh == [None, None, None, True, True]


def test_the_smallest_is_run_once_more_from_nothing():
    again = Scripted(FAILS, FAILS, PASSES)
    failure = again.failure(failed=True)
    pair = again._alone
    assert [again.again(pair, failure).effect for _ in range(2)] == [Effect.SAME, Effect.PASSES]
    assert again.fresh == [None, True, True]
