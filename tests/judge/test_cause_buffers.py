"""Causes from buffers: those that stand still, and those that are updated otherwise."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_LOSSES,
    CONTROL,
    broken,
    changed,
    scaled,
    since,
    turned,
    verdict_of,
)

from converge_harness.model import BufferRows, CauseClass, Precision

BIASES = ("layers.0.moe.expert_bias_E", "layers.1.moe.expert_bias_E")


def with_buffers(run, value):
    """The run with two biases, which move at every step; ``value`` may be wrong."""
    samples = []
    for sample in run.samples:
        if not sample.step:
            samples.append(sample)
            continue
        moves = np.random.default_rng(7).standard_normal((sample.step, len(BIASES), 64))
        sketch = value(sample.step, moves.sum(axis=0))
        rows = BufferRows(BIASES, np.array([4, 4]), np.linalg.norm(sketch, axis=1), sketch)
        samples.append(replace(sample, buffers=rows))
    return replace(run, samples=tuple(samples))


REFERENCE = with_buffers(CONTROL, lambda step, values: values)


def routed_otherwise(value, first=2, **more):
    """A run whose gradients follow other buffers from some step on."""
    run = broken(gradient=since(first, scaled(1.5, lambda name: "wq" in name)), **more)
    run = changed(run, lambda step, x: x * (1 + 1e-3 * (step >= first)), *BOTH_LOSSES)
    return verdict_of(with_buffers(run, value), REFERENCE)


def test_buffers_that_stay_zero_do_not_move():
    verdict = routed_otherwise(lambda step, values: 0 * values)
    assert verdict.cause_class is CauseClass.FROZEN
    assert "layers.*.moe.expert_bias_E do not change up to step 1" in verdict.cause
    assert "hooks of the optimizer" in verdict.look_at


@pytest.mark.parametrize("factor", [-1, 2])
def test_buffers_that_are_a_multiple_are_updated_otherwise(factor):
    verdict = routed_otherwise(lambda step, values: factor * values)
    assert verdict.cause_class is CauseClass.UPDATE
    assert f"are {factor} times the control's at step 1" in verdict.cause


def test_buffers_that_differ_after_the_gradients_are_no_cause():
    late = routed_otherwise(lambda step, values: values * (1 if step < 4 else -1))
    assert "buffers" not in late.cause


def test_buffers_that_hardly_differ_are_no_cause():
    assert "buffers" not in routed_otherwise(lambda step, values: 1.01 * values).cause


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_other_tokens_for_an_expert_are_no_cause(precision):
    """What rounding routes elsewhere does not explain what fails later."""
    test = with_buffers(broken(gradient=since(4, turned(lambda _: True, 3.0))), small)
    reference = replace(REFERENCE, precision=precision)
    assert "buffers" not in verdict_of(replace(test, precision=precision), reference).cause


def small(step, values):
    return values + 0.4 * np.linalg.norm(values) * np.eye(1, 64)


def with_table(run, factor):
    table = np.full((1, 64), factor)
    rows = BufferRows(("rope.cache",), np.array([64]), np.array([8.0 * factor]), table)
    return replace(run, samples=tuple(replace(each, buffers=rows) for each in run.samples))


def test_a_table_that_is_another_one_comes_before_what_follows_from_it():
    run = broken(gradient=turned(lambda name: "wo" in name, 1e-2))
    reference = with_table(CONTROL, 1.0)
    verdict = verdict_of(with_table(run, 1.5), reference)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "uses other tables: rope.cache, which training never changes, is off" in verdict.cause
    assert "rotary: base" in verdict.look_at


def test_a_table_that_was_rounded_is_not_the_cause_of_gross_errors():
    run = broken(gradient=turned(lambda name: "wo" in name, 1e-2))
    verdict = verdict_of(with_table(run, 1.002), with_table(CONTROL, 1.0))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    alone = verdict_of(with_table(broken(), 1.002), with_table(CONTROL, 1.0))
    assert "uses other tables" in alone.cause
