"""Checks between gradient and weight: clipping, the optimizer's state, buffers; wrong clipping."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from cause_examples import CONTROL, broken, changed, scaled, turned, verdict_of
from judge_examples import in_force, judge
from test_cause_optimizer import MAX_NORM, NAMES, REFERENCE, kept

from converge_harness.judge.checks.tensors import clipping_envelope, clipping_first_steps
from converge_harness.judge.compare.post_step_state import unchanging
from converge_harness.judge.comparison import compare_runs
from converge_harness.model import (
    BufferRows,
    CauseClass,
    Judgement,
    Outcome,
    Parallelism,
    Precision,
)

PP2 = Parallelism(dp_shard=2, pp=2)
LAST_STAGE = ("layers.2.", "layers.3.", "norm.", "output.")


def outcomes(test, control=REFERENCE):
    return {check.name: check for check in judge(test, control).checks}


def fails(test, control=REFERENCE):
    return {name: c for name, c in outcomes(test, control).items() if c.outcome is Outcome.FAIL}


def clipped(run, factor):
    """The run with gradients multiplied by ``factor(step, name)`` beside the right clipping."""

    def wrong(sample):
        return (
            np.array([factor(sample.step, name) for name in NAMES]) * sample.post_step.clipped_norm
        )

    return clipped_to(kept(run), wrong)


def clipped_to(run, norms):
    """The run with other norms after clipping: ``norms(sample)``."""
    samples = [
        replace(sample, post_step=replace(sample.post_step, clipped_norm=norms(sample)))
        if sample.post_step
        else sample
        for sample in run.samples
    ]
    return replace(run, samples=tuple(samples))


def with_buffers(run, bias=lambda step: step * 1e-3, cache=1.0):
    """The run with a router's bias that moves and a table that does not."""
    samples = [
        replace(
            sample,
            buffers=BufferRows(
                ("layers.0.moe.expert_bias", "rope.cache"),
                np.array([8, 64]),
                np.array([abs(bias(sample.step)), abs(cache)]) * 8,
                np.stack([np.full(64, bias(sample.step)), np.full(64, cache)]),
            ),
        )
        if sample.step
        else sample
        for sample in run.samples
    ]
    return replace(run, samples=tuple(samples))


def test_evidence_that_older_runs_lack_is_skipped():
    found = outcomes(broken(), CONTROL)
    for name in ("clipping-first-steps", "clipping-envelope", "optimizer-steps"):
        assert found[name].outcome is Outcome.SKIPPED
    for name in ("optimizer-state-first-steps", "buffers-first-steps", "buffers-envelope"):
        assert found[name].outcome is Outcome.SKIPPED


def test_the_same_leftovers_pass():
    found = outcomes(with_buffers(kept(broken())), with_buffers(REFERENCE))
    new = [name for name in found if name.startswith(("clipping", "optimizer", "buffers"))]
    assert len(new) == 7
    assert {found[name].outcome for name in new} == {Outcome.PASS}


def test_gradients_that_only_the_control_shows_after_clipping_are_no_pass():
    hidden = clipped(broken(), lambda _, name: np.nan if name == "norm.weight" else 1.0)
    verdict = judge(hidden, REFERENCE)
    assert verdict.judgement is Judgement.INVALID
    assert (
        "1 of 35 gradients could not be seen after clipping (first: norm.weight)" in verdict.cause
    )
    without = replace(
        hidden, samples=tuple(replace(each, post_step=None) for each in hidden.samples)
    )
    assert judge(without, REFERENCE).judgement is Judgement.INVALID
    foreign = outcomes(replace(without, in_force=None))
    assert foreign["clipping-first-steps"].outcome is Outcome.SKIPPED


def test_gradients_of_another_length_are_clipped_to_the_same_norm():
    doubled = kept(broken(gradient=scaled(2.0)))
    found = fails(doubled)
    assert "gradients-first-steps" in found
    assert not any(name.startswith("clipping") for name in found)


@pytest.mark.parametrize("size", [1e-8, 1e-4])
def test_rounding_of_norms_and_moments_is_allowed(size):
    rng = np.random.default_rng(0)
    noise = {(step, name): 1 + size * rng.standard_normal() for step in range(20) for name in NAMES}
    common = clipped(broken(), lambda step, _: 1 + size)
    assert not fails(common)
    if size < 1e-5:
        assert not fails(clipped(broken(), lambda step, name: noise[step, name]))
    assert not fails(kept(broken(), moments=lambda step, _, name: noise[step, name]))


def test_coarse_precision_allows_more():
    ours = replace(kept(broken(noise=1e-3)), precision=Precision.BF16)
    moments = replace(kept(broken(noise=1e-3), moments=lambda *_: 1.02), precision=Precision.BF16)
    assert "optimizer-state-first-steps" not in fails(ours)
    assert "optimizer-state-first-steps" not in fails(moments)


def one_tensor(_, name):
    return 1.5 if name == "norm.weight" else 1.0


def test_wrong_clipping_fails_at_its_step():
    first = fails(clipped(broken(), one_tensor))["clipping-first-steps"]
    assert "1 of 35 gradients" in first.detail
    assert [each.tensor for each in first.deviations] == ["norm.weight"]
    assert fails(clipped(broken(), lambda *_: 0.5))["clipping-first-steps"].onset == 1
    later = fails(clipped(broken(), lambda step, _: 0.5 if step > 5 else 1.0))
    assert "clipping-first-steps" not in later
    assert later["clipping-envelope"].onset == 8


def clipping_fails(control, test, size):
    """Whether a run with larger gradients fails by its clipping; both clip to a norm."""
    ours = kept(broken(gradient=scaled(size)), clip=lambda _: test)
    found = fails(ours, kept(CONTROL, clip=lambda _: control))
    return any(name.startswith("clipping") for name in found)


def test_a_norm_that_crosses_the_largest_one_is_clipped_rightly():
    """The control has norms of 43.4, 44.5, 43.7, 41.6 and 42.70; its config does not say more."""
    assert not clipping_fails(42.71, 42.71, 1.002)  # its earlier steps show 42.71
    assert clipping_fails(42.71, 42.0, 1.002)
    # A control that is never clipped shows that 44.5 is not.
    assert not clipping_fails(50.0, 50.0, 1.2)
    assert clipping_fails(50.0, 43.0, 1.2)


def by_step(sizes):
    return lambda step, _, value: sizes.get(step, 1.0) * value


def clipping_of(control, test, sizes=MappingProxyType({})):
    """Both checks of a run that clips, and has larger gradients, by step; else to 100, by 1."""
    if isinstance(control, dict):
        norms = control
        control = kept(CONTROL, clip=lambda step: norms.get(step, 100.0))
    ours = kept(broken(gradient=by_step(sizes)), clip=lambda step: test.get(step, 100.0))
    compared = compare_runs(ours, control)
    return tuple(each(compared).outcome for each in (clipping_first_steps, clipping_envelope))


def test_one_clipped_step_does_not_show_the_largest_norm():
    """Both clip to 42 at step 4 and to 100 in the others, as a schedule of the norm may say."""
    schedule = {4: 42.0}
    assert clipping_of(schedule, schedule, {8: 1.02}) == (Outcome.PASS, Outcome.PASS)
    assert clipping_of(schedule, {4: 41.0}) == (Outcome.PASS, Outcome.FAIL)


def test_a_larger_norm_that_was_left_as_it_is_shows_that_none_is_the_largest():
    """The control leaves the 44.5 of step 2, or clips it; its 42.70 of step 16 is below 43."""
    grown, some, every = {16: 1.03}, dict.fromkeys((1, 4), 43.0), dict.fromkeys((1, 2, 4), 43.0)
    assert clipping_of(some, some, grown) == (Outcome.PASS, Outcome.PASS)
    assert clipping_of(every, {**every, 16: 43.0}, grown) == (Outcome.PASS, Outcome.PASS)
    assert clipping_of(every, every, grown) == (Outcome.PASS, Outcome.FAIL)


def test_clipping_that_the_first_steps_show_is_known_later():
    """Norms are largest at first: of the control those of steps 1 and 2 alone are above 43.3."""
    lower, first = {4: 0.98}, dict.fromkeys((1, 2), 43.3)
    grown = {**lower, 16: 1.04}
    control = kept(broken(gradient=by_step(lower)), clip=lambda step: first.get(step, 100.0))
    right = clipping_of(control, {**first, 16: 43.3}, grown)
    assert right == (Outcome.PASS, Outcome.PASS)
    assert clipping_of(control, first, grown) == (Outcome.PASS, Outcome.FAIL)


def test_a_lost_counter_fails():
    found = fails(kept(broken(), count=lambda step, _: step if step < 6 else step - 5))
    assert found["optimizer-steps"].onset == 8
    assert found["optimizer-steps"].measured == 5


def test_lost_moments_fail_and_name_the_state():
    def reset(step, state, _):
        return 0.4 if step == 8 and state == "exp_avg" else 1.0

    found = fails(kept(broken(), moments=reset))["optimizer-state-envelope"]
    assert "exp_avg" in found.detail
    assert found.onset == 8


def test_a_state_that_is_gone_fails():
    found = fails(kept(broken(), moments=lambda step, *_: np.nan if step > 2 else 1.0))
    assert "gone" in found["optimizer-state-envelope"].detail


def test_buffers_that_stay_or_change_fail():
    control = with_buffers(REFERENCE)
    still = fails(with_buffers(kept(broken()), bias=lambda step: 0.0), control)
    assert still["buffers-first-steps"].onset == 1
    late = fails(with_buffers(kept(broken()), bias=lambda step: min(step, 4) * 1e-3), control)
    assert late["buffers-envelope"].onset == 8
    table = fails(with_buffers(kept(broken()), cache=1 + 1e-4), control)
    assert "rope.cache" in table["buffers-first-steps"].detail


def test_one_expert_near_a_tie_may_go_the_other_way():
    def biases(run, signs):
        pushed = np.array(signs) - np.mean(signs)
        rows = BufferRows(
            ("layers.0.moe.expert_bias",),
            np.array([4]),
            np.array([np.linalg.norm(pushed)]),
            np.array([[*pushed, *np.zeros(60)]]),
        )
        first = replace(run.samples[1], buffers=rows)
        return replace(run, samples=(run.samples[0], first, *run.samples[2:]))

    control = biases(with_buffers(REFERENCE), [1, 1, -1, -1])
    near = biases(with_buffers(kept(broken())), [1, -1, -1, -1])
    assert not fails(near, control)
    away = biases(with_buffers(kept(broken())), [-1, -1, 1, 1])
    assert "buffers-first-steps" in fails(away, control)


def test_sums_in_another_order_do_not_change_a_buffer():
    noisy = with_buffers(REFERENCE)
    samples = [
        replace(s, buffers=replace(s.buffers, sketch=s.buffers.sketch * (1 + s.step * 1e-15)))
        if s.buffers
        else s
        for s in noisy.samples
    ]
    assert unchanging(replace(noisy, samples=tuple(samples))) == {"rope.cache"}


def test_a_buffer_that_was_seen_once_may_well_change():
    assert not unchanging(
        replace(with_buffers(REFERENCE), samples=with_buffers(REFERENCE).samples[:2])
    )


# ------------------------------------------------------------------ the cause


def stages_alone(run):
    """Each pipeline stage clipped by its own norm."""
    last = np.array([name.startswith(LAST_STAGE) for name in NAMES])

    def wrong(sample):
        norms = sample.gradients.norm
        wholes = np.where(last, np.linalg.norm(norms[last]), np.linalg.norm(norms[~last]))
        return norms * np.minimum(1.0, MAX_NORM / wholes)

    return clipped_to(kept(run), wrong)


def test_stages_clipped_by_their_own_norms_are_named():
    verdict = verdict_of(stages_alone(broken(PP2, in_force=in_force(PP2))), REFERENCE)
    assert verdict.cause_class is CauseClass.CLIPPING
    assert "as the last pipeline stage may hold" in verdict.cause
    assert "each group is clipped by the norm of its own gradients alone" in verdict.cause


def test_a_wrong_reported_norm_that_clipping_uses_is_wrong_clipping():
    test = changed(stages_alone(broken()), lambda step, norm: 0.7 * norm, "grad_norm")
    verdict = verdict_of(test, REFERENCE)
    assert verdict.cause_class is CauseClass.CLIPPING
    assert "reported is wrong, too: clipping uses it" in verdict.cause


def test_a_wrong_reported_norm_alone_is_a_metric():
    test = changed(kept(broken()), lambda step, norm: 0.7 * norm, "grad_norm")
    verdict = verdict_of(test, REFERENCE)
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert verdict.cause.endswith("training itself is right, clipping too")


def test_one_tensor_that_is_left_out_of_clipping_is_named():
    verdict = verdict_of(clipped(broken(), one_tensor), REFERENCE)
    assert verdict.cause_class is CauseClass.CLIPPING
    assert "norm.weight by" in verdict.cause


def test_skipped_and_other_clipping_are_told_apart():
    skipped = verdict_of(kept(broken(), clip=lambda _: np.inf), REFERENCE)
    assert skipped.cause_class is CauseClass.CLIPPING
    assert "they are not clipped at all" in skipped.cause
    other = verdict_of(kept(broken(), clip=lambda _: 0.5 * MAX_NORM), REFERENCE)
    assert "clipped to 0.5 where 1 is meant" in other.cause


def test_gradients_changed_after_clipping_are_no_wrong_clipping():
    rng = np.random.default_rng(1)
    decayed = {name: 1 + rng.uniform(0.01, 300) for name in NAMES}
    verdict = verdict_of(clipped(broken(), lambda _, name: decayed[name]), REFERENCE)
    assert verdict.cause_class is CauseClass.UPDATE
    assert "changed between clipping and the update at step 1" in verdict.cause


def ranks_alone(norm):
    """Two ranks clip their shards, of which the first has other shares, each by its own norm."""
    share = np.random.default_rng(2).uniform(0.3, 0.7, norm.size)
    parts = [norm * np.sqrt(share), norm * np.sqrt(1 - share)]
    return np.hypot(*(part * min(1.0, MAX_NORM / np.linalg.norm(part)) for part in parts))


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        (lambda norm: np.minimum(norm, MAX_NORM), "by the norm of its own gradient alone"),
        (ranks_alone, "by norms of parts"),
    ],
)
def test_a_factor_for_each_parameter_is_wrong_clipping(norms, words):
    test = clipped_to(kept(broken()), lambda sample: norms(sample.gradients.norm))
    verdict = verdict_of(test, REFERENCE)
    assert verdict.cause_class is CauseClass.CLIPPING
    assert words in verdict.cause


def test_gradients_that_are_zero_after_clipping_are_reported():
    found = clipped(broken(), lambda _, name: 0.0 if name == "norm.weight" else 1.0)
    assert "norm.weight by 0" in verdict_of(found, REFERENCE).cause


def test_clipping_that_follows_from_wrong_gradients_is_not_blamed():
    gradient = turned(lambda name: "attention" in name, 2.0)
    test = clipped(broken(gradient=gradient), lambda step, _: 1.05)
    verdict = verdict_of(test, REFERENCE)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
