"""What the probe's benchmark derives from measured steps; the measuring is a real job's."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SOURCE = Path(__file__).parent.parent / "benchmarks" / "probe_cost.py"


@pytest.fixture(scope="module")
def probe_cost():
    spec = importlib.util.spec_from_file_location("probe_cost", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_cost"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["probe_cost"]


def test_every_round_has_all_modes_in_an_order_of_its_own(probe_cost):
    modes = probe_cost.shuffled_modes(20)
    rounds = [tuple(modes[first : first + 3]) for first in range(0, 60, 3)]
    assert modes[0] == "sampled"  # step 0 is sampled in the first step
    assert {frozenset(one) for one in rounds} == {frozenset(probe_cost.MODES)}
    assert len(set(rounds)) == 6


def test_steps_are_sorted_by_mode_and_the_warm_up_is_left_out(probe_cost):
    modes = ["sampled", "on", "off"] * probe_cost.WARM_UP + ["on", "sampled", "off"]
    seconds = [9.0] * 3 * probe_cost.WARM_UP + [2.0, 3.0, 1.0]
    assert probe_cost.by_mode(modes, seconds).tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("on", "sampled", "step_0_s", "expected"),
    [(1.01, 1.2, 0.2, (1.01, 1.2, (57 * 1.01 + 7 * 1.2 + 0.2) / 64)), (1, 2, 0, (1, 2, 71 / 64))],
)
def test_the_default_cadence_weighs_steps_as_they_occur(
    probe_cost, on, sampled, step_0_s, expected
):
    noise = np.array([0.9, 1.0, 1.1])[:, None]
    measured = probe_cost.Times(noise * np.array([1.0, on, sampled]), step_0_s, "wall")
    ratios = list(measured.ratios().values())
    assert [ratio.value for ratio in ratios] == pytest.approx(expected)
    assert all(ratio.low <= ratio.value <= ratio.high for ratio in ratios)


def test_the_time_in_hooks_comes_on_top_of_a_step_without_the_probe(probe_cost):
    cpu, hooks = np.array([[2.0, 9.0, 9.0]] * 2), np.array([[0.0, 0.1, 0.5]] * 2)
    measured = probe_cost.in_hooks(cpu, hooks, first_step_s=0.8)
    assert measured.step_0_s == pytest.approx(0.3)
    ratios = [ratio.value for ratio in measured.ratios().values()]
    assert ratios[:2] == pytest.approx([1.05, 1.25])


def test_goals_are_met_or_missed(probe_cost):
    case = probe_cost.Case("tiny", {})
    rounds = np.array([[1.0, 1.0, 1.3]] * 3)
    _, *lines = probe_cost._time_lines(case, probe_cost.Times(rounds, 0.0, "wall"))
    assert lines[1].endswith("at most 1.25: MISSED")
    assert lines[2].endswith("at most 1.02: MISSED")
    _, *lines = probe_cost._time_lines(case, probe_cost.Times(rounds[:, [0, 1, 1]], 0.0, "wall"))
    assert [line[-3:] for line in lines[1:]] == ["met", "met"]
    memory = probe_cost.Memory({"off": 5.0, "on": 5.0, "sampled": 6.0}, (9, "before_clip"), 4, 8)
    _, *lines = probe_cost._memory_lines(case, memory)
    assert [line.rsplit(maxsplit=1)[1] for line in lines] == ["met", "met", "met", "MISSED"]


def test_a_frozen_step_is_measured_in_steps_without_the_probe(probe_cost):
    head, ratio = probe_cost._frozen_lines(probe_cost.FROZEN[0], [0.3] * 16, [0.2] * 30)
    assert head == "bf16 mixed, FSDP 2: 200 ms a step, 16 frozen steps in 4.8 s"
    assert ratio.split() == ["a", "frozen", "step", "1.500", "1.500", "to", "1.500"]
