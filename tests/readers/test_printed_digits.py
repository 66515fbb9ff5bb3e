"""How far a curve is printed is read from its digits, and a rounded curve is no other curve."""

import json
import math

import pytest
from reader_files import file

from converge_harness.judge import judge
from converge_harness.model import Judgement
from converge_harness.readers import read_curves
from converge_harness.readers.foreign import csv_table

STEPS = range(1, 101)
LOSSES = {step: 2.0 + 5.0 * math.exp(-step / 10) + 1e-3 * math.sin(step) for step in STEPS}
NORMS = {step: 1.0 + 0.4 * math.sin(3 * step) for step in STEPS}


def csv(spell):
    rows = "".join(f"{s},{spell(LOSSES[s])},{spell(NORMS[s])}\n" for s in STEPS)
    return "step,loss,grad_norm\n" + rows


def text(spell):
    return "".join(f"{s} {spell(LOSSES[s])} {spell(NORMS[s])}\n" for s in STEPS)


def row(step, spell):
    return f'{{"step": {step}, "loss": {spell(LOSSES[step])}, "grad_norm": {spell(NORMS[step])}}}'


def jsonl(spell):
    return "".join(row(step, spell) + "\n" for step in STEPS)


def trainer_state(spell):
    return f'{{"log_history": [{", ".join(row(step, spell) for step in STEPS)}]}}'


def golden(spell):
    values = ", ".join(f'"{step}": {spell(LOSSES[step])}' for step in STEPS)
    return f'{{"lm loss": {{"values": {{{values}}}}}}}'


FORMATS = {
    "a.csv": csv,
    "a.txt": text,
    "a.jsonl": jsonl,
    "trainer_state.json": trainer_state,
    "golden_values.json": golden,
}
SPELLINGS = {
    "4 decimals": lambda value: repr(round(value, 4)),
    "3 decimals": lambda value: f"{value:.3f}",
    "6 significant": lambda value: f"{value:.6g}",
    "scientific": lambda value: f"{value:.4e}",
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_curve_agrees_with_itself_as_printed(tmp_path, name, spelling):
    exact = read_curves(file(tmp_path / "exact", name, FORMATS[name](repr)))
    printed = read_curves(file(tmp_path / "printed", name, FORMATS[name](SPELLINGS[spelling])))
    for test, control in ((printed, exact), (exact, printed), (printed, printed)):
        verdict, _ = judge(test, control)
        assert verdict.judgement is Judgement.PASS, verdict.cause


@pytest.mark.parametrize("name", FORMATS)
def test_what_digits_show_is_not_hidden_by_them(tmp_path, name):
    exact = read_curves(file(tmp_path / "exact", name, FORMATS[name](repr)))
    other = FORMATS[name](lambda value: repr(round(1.01 * value, 4)))
    assert (
        judge(read_curves(file(tmp_path, name, other)), exact).verdict.judgement
        is not Judgement.PASS
    )


@pytest.mark.parametrize("fast_from", [0, 1 << 30])
def test_places_and_significant_digits(tmp_path, monkeypatch, fast_from):
    monkeypatch.setattr(csv_table, "FAST_FROM", fast_from)
    fixed = read_curves(file(tmp_path, "fixed.csv", "step,loss\n1,10.80\n2,9.12\n3,0.50\n"))
    assert (fixed.rounding, fixed.significant) == ({"loss": 5e-3}, {"loss": 4})
    short = read_curves(file(tmp_path, "g.csv", "step,loss\n1,1234\n2,12.34\n3,1.234\n"))
    assert (short.rounding, short.significant) == ({"loss": 5e-4}, {"loss": 4})
    power = read_curves(file(tmp_path, "e.csv", "step,loss\n1,1.250e+01\n2,9.5e-1\n"))
    assert (power.rounding, power.significant) == ({"loss": 5e-3}, {"loss": 4})
    full = read_curves(file(tmp_path, "full.csv", "step,loss\n1,8.0490971\n2,7.5\n"))
    assert (dict(full.rounding), dict(full.significant)) == ({"loss": 5e-8}, {"loss": 8})
    exact = read_curves(file(tmp_path, "exact.csv", "step,loss\n1,8.049097061157227\n2,7.5\n"))
    assert (exact.rounding, exact.significant) == ({}, {})
    whole = read_curves(file(tmp_path, "whole.csv", "step,loss\n1,8\n2,nan\n3,\n"))
    assert (whole.rounding, whole.significant) == ({"loss": 0.5}, {"loss": 1})
    tens = read_curves(file(tmp_path, "t.csv", "step,loss\n1,1.25e+04\n2,1.2e+4\n"))
    assert (tens.rounding, tens.significant) == ({"loss": 50.0}, {"loss": 3})
    spike = read_curves(file(tmp_path, "s.csv", "step,loss\n1,98765.4321\n2,0.0512\n"))
    assert (spike.rounding, spike.significant) == ({"loss": 5e-5}, {"loss": 9})
    none = read_curves(file(tmp_path, "n.csv", "step,loss\n1,nan\n2,\n"))
    assert (none.rounding, none.significant) == ({}, {})


def test_a_curve_of_two_digits_is_no_evidence_of_equal_values(tmp_path):
    """2.04 and 1.96 are both printed as 2.0: 4% apart, and the same digits."""
    curves = [
        file(tmp_path, name, json.dumps({"log_history": [
            {"step": step, "loss": round(2.5 - step / 100, 1)} for step in range(1, 31)
        ]}))
        for name in ("a.json", "b.json")
    ]  # fmt: skip
    first, second = (read_curves(path) for path in curves)
    verdict, _ = judge(first, second)
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert "printed too coarsely" in verdict.cause


def test_few_points_of_two_digits_are_no_evidence_either(tmp_path):
    paths = [file(tmp_path, f"{name}.csv", "step,loss\n1,2.4\n2,2.3\n3,2.2\n") for name in "ab"]
    verdict, _ = judge(*(read_curves(path) for path in paths))
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert "printed too coarsely" in verdict.cause
