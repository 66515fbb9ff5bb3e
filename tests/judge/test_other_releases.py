"""Runs of two releases: each with a seed checkpoint of its own, and names of its own."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import judge, run, samples, spec

from converge_harness.model import Judgement, Outcome, TensorRows

OTHER_WEIGHTS = run(samples=samples(initial=lambda name, x: x + 1))
OLD = spec()
NEW = replace(OLD, toolchain="another release")


def renamed(evidence, factor=1.0, entries=0):
    """The run as a release leaves it that calls one parameter otherwise, and so sketches it."""

    def other(rows, index):
        if rows is None:
            return None
        sketch, norm = rows.sketch.copy(), rows.norm.copy()
        sketch[index], norm[index] = np.random.default_rng(1).standard_normal(64), norm[index]
        norm[index] *= factor
        return TensorRows(sketch, norm, rows.zeros, rows.not_finite)

    found = []
    for sample in evidence.samples:
        index = sample.names.index("norm.weight")
        names = tuple("zz.weight" if name == "norm.weight" else name for name in sample.names)
        sizes = sample.sizes.copy()
        sizes[index] += entries
        rows = {what: other(getattr(sample, what), index) for what in ("parameters", "gradients")}
        found.append(replace(sample, names=names, sizes=sizes, **rows))
    return replace(evidence, samples=tuple(found))


def check(verdict, name):
    return next(each for each in verdict.checks if each.name == name)


def test_weights_of_another_seed_checkpoint_make_a_comparison_invalid():
    verdict = judge(OTHER_WEIGHTS, run(), spec=OLD, control_spec=OLD, own_start=True)
    assert verdict.judgement is Judgement.INVALID
    assert "starts from other weights than the control" in verdict.cause
    assert "its seed checkpoint is not what the control started from" in verdict.cause


def test_other_weights_of_one_seed_checkpoint_are_a_fault_of_the_run():
    verdict = judge(OTHER_WEIGHTS, run(), spec=OLD, control_spec=OLD)
    assert verdict.judgement is Judgement.FAIL
    assert check(verdict, "same-initial-parameters").outcome is Outcome.FAIL


def test_the_same_weights_of_two_seed_checkpoints_are_shown_to_be_the_same():
    verdict = judge(run("test"), run(), spec=OLD, control_spec=OLD, own_start=True)
    assert verdict.judgement is Judgement.PASS
    assert check(verdict, "starts-as-the-control").detail == "3 initial parameters"


def test_where_nothing_shows_it_the_comparison_is_invalid():
    blind = run(samples=(), sample_steps=())
    verdict = judge(blind, blind, spec=OLD, control_spec=OLD, own_start=True)
    assert verdict.judgement is Judgement.INVALID
    assert "nothing shows that" in verdict.cause


def test_a_parameter_by_another_name_is_compared_by_its_norm():
    verdict = judge(renamed(run("test")), run(), spec=NEW, control_spec=OLD)
    assert verdict.judgement is Judgement.PASS
    found = check(verdict, "renamed-parameters-agree")
    assert found.detail.startswith("1 parameters here (zz.weight …) for 1 in the control (norm.w")
    assert check(verdict, "same-parameters").detail == "2 parameters"


@pytest.mark.parametrize(
    ("test", "spec", "judgement", "name"),
    [
        (renamed(run("test"), factor=1.01), NEW, Judgement.FAIL, "renamed-parameters-agree"),
        (renamed(run("test"), entries=1), NEW, Judgement.INVALID, "same-parameters"),
        (renamed(run("test")), OLD, Judgement.INVALID, "same-parameters"),
    ],
    ids=["other norm", "other model", "same release"],
)
def test_another_parameter_is_not_taken_for_a_renamed_one(test, spec, judgement, name):
    verdict = judge(test, run(), spec=spec, control_spec=OLD)
    assert verdict.judgement is judgement
    assert check(verdict, name).outcome not in (Outcome.PASS, Outcome.SKIPPED)


def test_names_are_not_taken_for_renamed_where_no_step_was_sampled_by_both():
    test, control = renamed(run("test")), run()
    test, control = (
        replace(test, samples=test.samples[2:]),
        replace(control, samples=control.samples[:2]),
    )
    verdict = judge(test, control, spec=NEW, control_spec=OLD)
    assert verdict.judgement is Judgement.INVALID
    assert check(verdict, "same-parameters").outcome is Outcome.INVALID
