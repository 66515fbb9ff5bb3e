"""Each rule of elsewhere: an example that it flags and one that it does not, as its original."""

import math

import pytest
from proof import rules
from proof.curves import Curve
from proof.rules import RULES

STEPS = range(1, 17)
LOSS = {step: 8.0 - 0.2 * step for step in STEPS}
NORM = {step: 2.0 + 0.01 * step for step in STEPS}
CONTROL = Curve(LOSS, NORM)
REPEATS = tuple(
    Curve({step: loss * (1 + size) for step, loss in LOSS.items()}, NORM)
    for size in (0.0, 1e-4, -1e-4, 2e-4, -2e-4)
)


def scaled(factor: float, first: int = 1, last: int = 16) -> Curve:
    """The control with its loss scaled from one step to another."""
    steps = range(first, last + 1)
    return Curve({at: loss * (factor if at in steps else 1) for at, loss in LOSS.items()}, NORM)


def at(step: int, value: float) -> Curve:
    return Curve({**LOSS, step: value}, NORM)


def without(step: int) -> Curve:
    return Curve({at: loss for at, loss in LOSS.items() if at != step}, NORM)


NAN = at(5, math.nan)
ALL_NAN = Curve(dict.fromkeys(STEPS, math.nan), NORM)
LONGER = Curve({**LOSS, 17: 4.6}, {**NORM, 17: 2.2})


@pytest.mark.parametrize(
    ("rule", "flagged", "passed"),
    [
        (rules.exact, [scaled(1 + 1e-7), NAN, without(16), LONGER], []),
        (rules.close_1e5, [scaled(1 + 2e-5), NAN, without(16), LONGER], [scaled(1 + 5e-6)]),
        (
            rules.megatron_exact,
            [scaled(1 + 1e-5), NAN, without(16)],
            [scaled(1 + 1e-7), LONGER],
        ),
        (rules.within_1_percent, [scaled(0.98, 3, 3), without(16)], [scaled(0.991), NAN, LONGER]),
        (
            rules.megatron_5_percent,
            [scaled(1.06), scaled(1.06, 2, 3), ALL_NAN],
            [scaled(1.049), at(16, math.nan), at(9, 800.0), without(16), LONGER],
        ),
        (
            rules.megatron_bridge,
            [scaled(1.04), at(3, 30.0), scaled(1.11, 1, 2), Curve(LOSS, {1: math.nan})],
            [scaled(1.029), scaled(1.11, 1, 1), ALL_NAN, NAN, without(16), LONGER],
        ),
        (
            rules.final_1_percent,
            [scaled(0.98, 16, 16), at(16, math.nan), without(16)],
            [scaled(1.5, 1, 15), NAN, LONGER],
        ),
        (
            rules.converges_too_fast,
            [scaled(0.99), scaled(2.0), ALL_NAN],
            [scaled(1.01), scaled(1.5, 1, 8), scaled(1 - 1e-5)],
        ),
        (
            rules.grad_norm_1_percent,
            [Curve(LOSS, {**NORM, 7: 2.1}), Curve(LOSS, {**NORM, 7: math.nan}), LONGER],
            [scaled(2.0), Curve(LOSS, {**NORM, 7: NORM[7] * 1.009}), Curve(LOSS, {1: NORM[1]})],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_rule_flags_and_what_it_passes(rule, flagged, passed):
    assert [rule(curve, CONTROL, REPEATS) for curve in flagged] == [True] * len(flagged)
    assert [rule(curve, CONTROL, REPEATS) for curve in (CONTROL, *passed)] == [False] * (
        len(passed) + 1
    )


def test_every_rule_stands_in_the_table_with_its_source():
    assert {rule.flags for rule in RULES} == {
        rules.exact,
        rules.close_1e5,
        rules.megatron_exact,
        rules.within_1_percent,
        rules.megatron_5_percent,
        rules.megatron_bridge,
        rules.final_1_percent,
        rules.converges_too_fast,
        rules.grad_norm_1_percent,
    }
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.source for rule in RULES)


def test_too_few_repeats_make_no_t_test():
    assert not rules.converges_too_fast(scaled(0.5), CONTROL, REPEATS[:2])
