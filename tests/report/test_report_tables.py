"""`report.npz`: every number behind a report's figures."""

import numpy as np
import pytest
from pass_samples import resumed_view
from report_samples import foreign_view, hostile_view, sample_view

from converge_harness.report.renderers.npz_tables import FILE, read_npz, tables_of, to_npz
from converge_harness.report.view.report_view import SIGNAL_TITLES, ReportView


@pytest.mark.parametrize(
    "view", [sample_view(), hostile_view(), foreign_view(), resumed_view(), ReportView("empty")]
)
def test_what_is_written_is_read_again(tmp_path, view):
    path = tmp_path / FILE
    path.write_bytes(to_npz(view))
    read, made = read_npz(path), tables_of(view)
    assert read.keys() == made.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(read[name], array)
    assert to_npz(view) == path.read_bytes()


@pytest.mark.parametrize("view", [sample_view(), hostile_view(), resumed_view()])
def test_every_curve_and_limit_is_there_in_full(view):
    tables = tables_of(view)
    names = tables["names"].tolist()
    runs = [*view.judged_against, *(test.run for test in view.tests)]
    for run in runs:
        rows = tables["curves.run"] == names.index(run.name)
        steps = tables["curves.step"][rows]
        assert (np.diff(steps) > 0).all()
        for signal in SIGNAL_TITLES:
            curve = run.signal(signal)
            there = np.isin(steps, curve.steps)
            values = tables[f"curves.{signal}"][rows]
            np.testing.assert_array_equal(values[there], curve.values)
            assert np.isnan(values[~there]).all()
    limits = sum(len(each.limit) for test in view.tests for each in test.comparisons.values())
    assert tables["limits.limit"].size == limits


def test_no_text_could_steer_a_terminal():
    assert all(name.isprintable() for name in tables_of(hostile_view())["names"].tolist())
