"""Steps that occur more than once, or out of order: what is kept, and what is said about it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_files import file

from converge_harness.model import Column, ReplayConflict
from converge_harness.readers import read_curves
from converge_harness.readers.points import Points, last_values


def rows(*pairs, **more):
    return "".join(json.dumps({"step": step, "loss": loss, **more}) + "\n" for step, loss in pairs)


def read(tmp_path, text):
    return read_curves(file(tmp_path, "a.jsonl", text))


def test_a_restart_that_goes_back_several_steps(tmp_path):
    text = rows((1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (3, 7.0), (4, 6.0), (5, 5.0))
    evidence = read(tmp_path, text)
    assert evidence.steps.tolist() == [1, 2, 3, 4, 5]
    assert evidence.signals["loss"] == (9.0, 8.0, 7.0, 6.0, 5.0)
    assert evidence.replayed == (3, 4)
    assert evidence.replay_conflicts == ()
    assert evidence.problems == ()


def test_the_last_value_is_kept_and_a_different_one_before_it_is_reported(tmp_path):
    evidence = read(tmp_path, rows((1, 9.0), (2, 8.0), (2, 8.5), (3, 7.0), (2, 8.25)))
    assert evidence.signals["loss"] == (9.0, 8.25, 7.0)
    assert evidence.replayed == (2,)
    assert evidence.replay_conflicts == (ReplayConflict(2, "loss 8.0, then 8.25"),)


def test_a_value_that_differed_in_between_is_reported(tmp_path):
    evidence = read(tmp_path, rows((1, 9.0), (1, 9.5), (1, 9.0)))
    assert evidence.replay_conflicts == (ReplayConflict(1, "loss 9.0, then 9.5"),)


def test_nan_agrees_with_nan_and_with_nothing_else(tmp_path):
    text = rows((1, "nan"), (2, "nan"), (1, "nan"), (2, 1.0))
    evidence = read(tmp_path, text)
    assert math.isnan(evidence.signals["loss"][0])
    assert evidence.replayed == (1, 2)
    assert evidence.replay_conflicts == (ReplayConflict(2, "loss nan, then 1.0"),)


def test_rows_of_one_step_with_different_signals_are_merged(tmp_path):
    text = (
        '{"step": 1, "loss": 9.0}\n{"step": 1, "grad_norm": 0.5}\n'
        '{"step": 2, "grad_norm": 0.25, "loss": null}\n{"step": 2, "loss": 8.0}\n'
    )
    evidence = read(tmp_path, text)
    assert evidence.signals["loss"] == (9.0, 8.0)
    assert evidence.signals["grad_norm"] == (0.5, 0.25)
    assert (evidence.replayed, evidence.replay_conflicts) == ((), ())


def test_several_signals_that_differ_make_one_clause(tmp_path):
    text = rows((1, 9.0), grad_norm=0.5) + rows((1, 9.5), grad_norm=0.25)
    (clause,) = read(tmp_path, text).replay_conflicts
    assert str(clause) == "step 1: loss 9.0, then 9.5, and grad_norm 0.5, then 0.25"


def test_every_conflict_is_listed(tmp_path):
    evidence = read(tmp_path, rows(*((step, 9.0) for step in range(1, 26))) * 2)
    assert evidence.replay_conflicts == ()
    other = rows(*((step, 8.0) for step in range(1, 26)))
    evidence = read(tmp_path, rows(*((step, 9.0) for step in range(1, 26))) + other)
    assert len(evidence.replay_conflicts) == 25
    assert str(evidence.replay_conflicts[19]) == "step 20: loss 9.0, then 8.0"


def test_steps_out_of_order_are_sorted_and_reported(tmp_path):
    evidence = read(tmp_path, rows((1, 9.0), (3, 7.0), (2, 8.0), (5, 5.0), (4, 6.0)))
    assert evidence.steps.tolist() == [1, 2, 3, 4, 5]
    assert evidence.signals["loss"] == (9.0, 8.0, 7.0, 6.0, 5.0)
    assert evidence.replayed == ()
    (problem,) = evidence.problems
    assert "not increasing: step 2 and 1 more comes after step 3; they were sorted" in problem


POINTS = st.lists(
    st.tuples(st.integers(0, 9), st.none() | st.sampled_from([1.0, 2.0, math.nan])), max_size=30
)


@given(POINTS, POINTS)
def test_steps_are_those_of_a_plain_walk_through_the_source(loss, lr):
    """The arrays' way against the obvious one: a dictionary per signal."""
    values = last_values({name: points_of(pairs) for name, pairs in (("loss", loss), ("lr", lr))})
    steps = sorted({step for step, _ in loss + lr})
    assert values.steps.tolist() == steps
    seen = {}
    for name, pairs in (("loss", loss), ("lr", lr)):
        kept = {step: value for step, value in pairs if value is not None}
        expected = Column.of([kept.get(step) for step in steps])
        assert values.signals[name].present.tolist() == expected.present.tolist()
        np.testing.assert_array_equal(values.signals[name].values, expected.values)
        for step, value in pairs:
            if value is not None:
                seen.setdefault(step, {}).setdefault(name, []).append(value)
    replayed = [step for step in steps if any(len(v) > 1 for v in seen.get(step, {}).values())]
    conflicts = [step for step in replayed if any(differ(v) for v in seen[step].values())]
    assert list(values.replayed) == replayed
    assert sorted(values.differences) == conflicts


def points_of(pairs):
    steps = np.array([step for step, _ in pairs], dtype=np.int64)
    return Points(steps, Column.of([value for _, value in pairs]))


def differ(values):
    return len({str(value) for value in values}) > 1


# ------------------------------------------------------- the same in every format


def as_csv(pairs):
    return "a.csv", "step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in pairs)


def as_console(pairs):
    line = "step: {:2}  loss: {:8.5f}  grad_norm:  0.5000  memory:  0.88GiB(1.11%)\n"
    return "a.log", "".join(line.format(*pair) for pair in pairs)


def as_text(pairs):
    return "a.txt", "".join(f"{step} {loss}\n" for step, loss in pairs)


def as_trainer_state(pairs):
    history = [{"epoch": 0.1, "loss": loss, "step": step} for step, loss in pairs]
    return "trainer_state.json", json.dumps({"log_history": history})


@pytest.mark.parametrize("form", [as_csv, as_console, as_text, as_trainer_state])
def test_every_text_format_takes_the_last_of_replays(tmp_path, form):
    pairs = [(1, 9.5), (2, 8.5), (3, 7.5), (2, 8.5), (3, 7.25), (4, 6.5)]
    evidence = read_curves(file(tmp_path, *form(pairs)))
    assert evidence.steps.tolist() == [1, 2, 3, 4]
    assert evidence.signals["loss"] == (9.5, 8.5, 7.25, 6.5)
    assert evidence.replayed == (2, 3)
    assert evidence.replay_conflicts == (ReplayConflict(3, "loss 7.5, then 7.25"),)
