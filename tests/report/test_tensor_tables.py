import numpy as np
import pytest
from report_samples import sample_view
from tensor_samples import NAMES, replicas, tensor_samples

from converge_harness.judge import calibrate
from converge_harness.judge.compare.tensors import compare_tensors
from converge_harness.model import Disagreement, Evidence
from converge_harness.report.view.tensor_tables import first_step_tensors, replica_view


def run(name, **moved):
    return Evidence(name, name, (1,), {"loss": (1.0,)}, samples=tensor_samples(name, **moved))


CONTROL = run("control")


def test_a_table_has_the_furthest_tensors_first():
    test = run("test", turned=lambda name: name == "layers.2.attention.wq.weight", noise=1e-9)
    table = first_step_tensors(compare_tensors(test, CONTROL, None))
    assert (table.step, table.parameters, table.outside) == (1, len(NAMES), 1)
    assert len(table.rows) == 10
    worst, second = table.rows[:2]
    assert worst.name == "layers.2.attention.wq.weight"
    assert worst.gradient > 1 > worst.gradient_limit
    assert second.gradient < second.gradient_limit
    assert table.summary.startswith("Step 1: 1 of 39 parameters has a gradient or an update outs")


def test_limits_are_those_that_the_calibration_taught():
    noisy = Evidence("r", "r", (1,), {"loss": (1.1,)}, samples=tensor_samples("r", noise=1e-3))
    learnt = calibrate(CONTROL, [noisy])
    table = first_step_tensors(compare_tensors(run("test", noise=1e-3), CONTROL, learnt))
    assert table.outside == 0
    assert "repeats" in table.gradient_origin
    assert table.rows[0].gradient_limit > 1e-3


def test_gradient_norms_are_given_by_kind_of_parameter_over_the_layers():
    table = first_step_tensors(compare_tensors(run("test"), CONTROL, None))
    groups = {group.name: group for group in table.groups}
    queries = groups["layers.*.attention.wq.weight"]
    assert (queries.parameters, groups["norm.weight"].parameters) == (4, 1)
    assert queries.ratio == pytest.approx(1.0, rel=0.5)
    gradients = CONTROL.samples[1].gradients.norm
    whole = np.sqrt(sum(group.control**2 for group in table.groups))
    assert whole == pytest.approx(np.linalg.norm(gradients))


def test_without_samples_on_both_sides_there_is_no_table():
    other = Evidence("a", "a", (1,), {})
    assert first_step_tensors(compare_tensors(other, CONTROL, None)) is None
    assert first_step_tensors(compare_tensors(CONTROL, other, None)) is None
    assert first_step_tensors(()) is None


def test_replicas_that_agree_are_one_sentence():
    found = replica_view(replicas())
    assert found.rows == ()
    assert found.summary == (
        "Shards that several ranks hold, compared bit for bit at steps 0, 1, 2, 4 "
        "(39 parameter, 39 gradient, 78 optimizer state): all copies agree."
    )
    assert replica_view(()) is None


def test_a_tensor_that_differs_is_listed_once_from_its_first_step():
    found = replica_view(replicas(Disagreement("buffer", "freqs", ("tp",), ((0, 2), (1, 3)))))
    (row,) = found.rows
    assert (row.step, row.tensor, row.mesh_dims, row.groups) == (1, "freqs", "tp", "0 2 | 1 3")
    assert found.summary.endswith(": the copies of 1 tensor differ.")


def test_runs_without_copies_say_that_nothing_was_compared():
    sample = replicas()[0]
    alone = type(sample)(0, {"parameter": 0})
    assert replica_view((alone,)).summary == "No shard has a copy on another rank (at step 0)."


def test_sets_of_the_sample_have_their_tables():
    tests = {test.run.name: test for test in sample_view().tests}
    assert tests["ddp2"].tensors.outside == len(NAMES)
    assert tests["fsdp2_tp2"].tensors.outside == 0
    assert tests["float8_async_tp"].replicas.disagreements == 1
    assert tests["tp2_pp2_fsdp2"].tensors is None
