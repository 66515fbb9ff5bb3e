"""The map of gradients: rows in the model's order, the furthest of a layer, limits kept."""

from types import SimpleNamespace

import numpy as np
import pytest
from report_samples import evidence
from tensor_samples import tensor_samples

from converge_harness.judge.compare.tensors import compare_tensors
from converge_harness.report.view import gradient_map as map_module
from converge_harness.report.view.gradient_map import gradient_map

WRONG = "layers.2.attention.wq.weight"


@pytest.fixture(scope="module")
def runs():
    turned = tensor_samples("t", noise=2e-7, turned=lambda name: name == WRONG)
    return SimpleNamespace(
        control=evidence("c", 4, samples=tensor_samples("c")),
        equal=evidence("e", 4, samples=tensor_samples("e", noise=2e-7)),
        turned=evidence("t", 4, samples=turned),
    )


def test_rows_are_in_the_order_of_the_model_and_columns_are_the_sampled_steps(runs):
    found = gradient_map(compare_tensors(runs.equal, runs.control, None))
    assert found.steps == (1, 2, 4)
    assert found.names[0] == "tok_embeddings.weight"
    assert [name for name in found.names if "wq" in name] == [
        f"layers.{layer}.attention.wq.weight" for layer in range(4)
    ]
    assert found.names[-2:] == ("norm.weight", "output.weight")
    assert found.outside == 0
    assert found.summary.endswith("0 of 117 cells outside the limit.")


def test_a_wrong_gradient_is_outside_in_its_own_row(runs):
    found = gradient_map(compare_tensors(runs.turned, runs.control, None))
    outside = ~(found.difference <= found.limit)
    assert [found.names[row] for row in np.flatnonzero(outside.any(axis=1))] == [WRONG]
    assert found.outside == 3


def test_a_large_model_has_a_row_per_layer_which_shows_its_furthest(runs, monkeypatch):
    monkeypatch.setattr(map_module, "MOST_ROWS", 20)
    found = gradient_map(compare_tensors(runs.turned, runs.control, None))
    assert found.names == (
        "tok_embeddings.weight",
        *(f"layers.{layer}" for layer in range(4)),
        "norm.weight",
        "output.weight",
    )
    assert found.outside == 3
    assert found.difference[3].min() > found.limit[3].max()
    assert "7 layers (39 parameters)" in found.summary


def test_runs_without_samples_have_no_map(runs):
    assert gradient_map(compare_tensors(evidence("e", 4), runs.control, None)) is None
    assert gradient_map(()) is None
