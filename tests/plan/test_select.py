"""``--only``: part of an experiment."""

import pytest

from harness.errors import ConfigError
from harness.plan import select

SETS = """
[[test]]
name = "tp"
parallelism = { dp_shard = 2, tp = 2 }
[[test]]
name = "old"
control = "other"
parallelism = { dp_shard = 2 }
[controls.other]
parallelism = { dp_shard = 2 }
toolchain = "torchtitan-0.2.2"
"""


@pytest.fixture
def experiment(planner):
    return planner.sets(SETS).experiment


def chosen(experiment, *names: str) -> list[str]:
    part = select(experiment, names)
    return [spec.name for spec in (*part.controls, *part.tests)]


def test_a_test_set_brings_its_control(experiment):
    assert chosen(experiment, "old") == ["other", "old"]
    assert chosen(experiment, "tp", "old") == ["control", "other", "tp", "old"]


def test_a_control_can_be_asked_for_alone(experiment):
    assert chosen(experiment, "control") == ["control"]
    assert chosen(experiment, "control", "old") == ["control", "other", "old"]


def test_an_unknown_name_is_refused_with_the_nearest(experiment):
    with pytest.raises(ConfigError, match=r"no set 'odl' \(did you mean 'old'") as caught:
        select(experiment, ["odl", "tp", "x"])
    assert len(caught.value.problems) == 2
