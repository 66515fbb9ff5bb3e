import math
from decimal import Decimal, localcontext
from random import Random

import pytest

from converge_harness.corpus.language import TOTAL, Distribution, log_normal, zipf


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [7, 3], [10**15, 1, 1], zipf(500)])
def test_probabilities_are_positive_and_sum_to_one_exactly(weights):
    chances = Distribution.of(weights)
    assert sum(chances.weights) == TOTAL
    assert min(chances.weights) >= 1
    assert chances.cumulative[-1] == TOTAL
    logs = [chances.log_probability(outcome) for outcome in range(len(weights))]
    assert math.fsum(map(math.exp, logs)) == pytest.approx(1, abs=1e-12)


def test_draws_follow_the_weights():
    chances = Distribution.of([6, 3, 1])
    random = Random(0)
    drawn = [0, 0, 0]
    for _ in range(20_000):
        drawn[chances.draw(random)] += 1
    # Four standard deviations of a binomial count are below 300.
    assert drawn == pytest.approx([12_000, 6_000, 2_000], abs=300)


class Edge(Random):
    """A random source at the ends of its range."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def random(self):
        return self.value


def test_the_ends_of_the_range_are_outcomes():
    chances = Distribution.of([1, 1])
    assert chances.draw(Edge(0.0)) == 0
    assert chances.draw(Edge(0.5 - 2**-53)) == 0
    assert chances.draw(Edge(0.5)) == 1
    assert chances.draw(Edge(1 - 2**-53)) == 1


def test_log_normal_weights_have_the_median_asked_for():
    weights = log_normal(Decimal(20), Decimal("0.5"), 200)
    assert sum(weights[:20]) / sum(weights) == pytest.approx(0.5, abs=0.03)
    assert sum(weights[:10]) / sum(weights) < 0.15  # two thirds of a decade below: not flat


def test_log_normal_weights_do_not_depend_on_the_ambient_decimal_context():
    usual = log_normal(Decimal(5), Decimal("1.25"), 50)
    with localcontext() as context:
        context.prec = 4
        assert log_normal(Decimal(5), Decimal("1.25"), 50) == usual
