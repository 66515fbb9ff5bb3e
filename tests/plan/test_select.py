"""``--only``: part of an experiment."""

import pytest

from converge_harness.errors import ConfigError
from converge_harness.plan import select, select_controls

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

ONE_RANK = 'set = { "training.local_batch_size" = 8 }\n'


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


def test_an_anchor_stays_with_its_own_name_and_with_that_of_the_control_it_challenges(planner):
    anchored = planner.sets(SETS + "[anchor]\nparallelism = {}\n" + ONE_RANK).experiment
    for names in (["anchor"], ["control"], ["old", "anchor"]):
        part = select(anchored, names)
        assert part.anchor is anchored.anchor
        assert part.controls[0].name == "control"
    assert select(anchored, ["tp"]).anchor is None
    assert select(anchored, ["other"]).anchor is None


def test_calibrating_takes_controls_only(planner):
    anchored = planner.sets(SETS + "[anchor]\nparallelism = {}\n" + ONE_RANK).experiment
    everything = select_controls(anchored, [])
    assert [spec.name for spec in everything.controls] == ["control", "other"]
    assert (everything.tests, everything.anchor) == ((), None)
    assert [spec.name for spec in select_controls(anchored, ["other"]).controls] == ["other"]
    with pytest.raises(ConfigError, match=r"no control 'tp' \(valid: control, other\)"):
        select_controls(anchored, ["tp"])
