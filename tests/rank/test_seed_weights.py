"""A program of one's own that starts from another trainer's checkpoint, and has its names."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from probed_loop import sample_of, write_job
from torch import nn

from converge_harness.probe import Probe, ProbeError, load_seed_checkpoint
from converge_harness.probe.seed_weights import evidence_names
from converge_harness.probe.starting_weights import job_of
from converge_harness.probe.wrapping import Wrapped
from converge_harness.rank.recorder.flat_shard import FlatShard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process
ROWS = 4
"""Of a head; the weight has two."""
ORDER = [0, 2, 1, 3, 4, 6, 5, 7]
"""Where the checkpoint has each row of the model."""
MAPPING = {
    "parameters": {"model.layers.*.q.weight": "layers.*.wq.weight", "lm_head.weight": "out.weight"},
    "modules": {},
    "beside": ["optimizer.*"],
    "rotary_interleaved": True,
    "half_split": {"model.layers.*.q.weight": ROWS},
}


class Model(nn.Module):
    """A matrix in a layer, and one after it, by the names of ours or of the other trainer."""

    def __init__(self, *, ours):
        super().__init__()
        torch.manual_seed(7)
        layer = nn.ModuleDict({"q" if ours else "wq": nn.Linear(3, 8, bias=False)})
        layers = nn.ModuleList([layer])
        if ours:
            self.model = nn.ModuleDict({"layers": layers})
        else:
            self.layers = layers
        self.add_module("lm_head" if ours else "out", nn.Linear(3, 2, bias=False))


def save(folder, **more):
    """A checkpoint of the other trainer; its weights by their names."""
    other = Model(ours=False)
    state = {name: each.detach().clone() for name, each in other.named_parameters()} | more
    dcp.save(state, checkpoint_id=folder / "step-0", no_dist=True)
    return state


def started(folder, monkeypatch, *, mapped=True, **mapping):
    """``$CONVERGE_JOB`` of a run; its folder."""
    more = {"weights": MAPPING | mapping, "seed_checkpoint": str(folder / "step-0")}
    run = folder / ("ours" if mapped else "other")
    path = write_job(run, steps=1, sample_steps=[0, 1], **(more if mapped else {}))
    monkeypatch.setenv("CONVERGE_JOB", str(path))
    return run


def trained(model, order):
    """One step in which every row has a gradient of its own; ``order`` is that of the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    probe = Probe.from_env(model, optimizer)
    probe.batch(torch.arange(4)[None], torch.arange(4)[None])
    matrix, last = model.parameters()
    slopes = torch.arange(24.0).reshape(8, 3).square()[order]
    ((matrix * slopes).sum() + last.square().sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    probe.step(loss=1.0)


def test_weights_are_loaded_in_the_order_of_the_model(tmp_path, monkeypatch):
    stored = save(tmp_path, **{"optimizer.step": torch.zeros(1)})
    started(tmp_path, monkeypatch)
    model = Model(ours=True)
    for each in model.parameters():
        nn.init.zeros_(each)
    load_seed_checkpoint(model)
    matrix, last = model.parameters()
    assert torch.equal(matrix, stored["layers.0.wq.weight"][ORDER])
    assert torch.equal(last, stored["out.weight"])


def test_the_evidence_is_that_of_the_other_trainers_model(tmp_path, monkeypatch):
    save(tmp_path)
    ours = started(tmp_path, monkeypatch)
    model = Model(ours=True)
    load_seed_checkpoint(model)
    trained(model, ORDER)
    other = started(tmp_path, monkeypatch, mapped=False)
    trained(Model(ours=False), list(range(8)))
    for step in (0, 1):
        expected, found = sample_of(other, step), sample_of(ours, step)
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            if array.dtype.kind == "f":
                assert np.allclose(found[key], array, rtol=1e-6, equal_nan=True), (step, key)
            else:
                assert np.array_equal(found[key], array), (step, key)


def test_rows_in_another_order_leave_other_evidence(tmp_path, monkeypatch):
    save(tmp_path)
    first = started(tmp_path, monkeypatch)
    model = Model(ours=True)
    load_seed_checkpoint(model)
    with torch.no_grad():
        next(model.parameters()).copy_(next(model.parameters())[ORDER])
    trained(model, ORDER)
    other = started(tmp_path, monkeypatch, mapped=False)
    trained(Model(ours=False), list(range(8)))
    sketches = [sample_of(folder, 0)["parameters_sketch"] for folder in (first, other)]
    assert not np.allclose(*sketches)


@pytest.mark.parametrize(
    ("more", "mapping", "says"),
    [
        ({"odd.weight": torch.ones(2)}, {}, "it has odd.weight of shape"),
        ({"out.weight": torch.ones(3, 3)}, {}, "it has out.weight of shape"),
        (
            {},
            {"parameters": {"lm_head.weight": "out.weight"}, "half_split": {}},
            "model.layers.0.q.weight is a parameter of this model, and the file that",
        ),
        ({}, {"half_split": {"model.layers.*.q.weight": 6}}, "has 8 rows, no multiple of the 6"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, more, mapping, says):
    save(tmp_path, **more)
    started(tmp_path, monkeypatch, **mapping)
    with pytest.raises(ProbeError, match=says):
        load_seed_checkpoint(Model(ours=True))


def test_a_program_that_loads_nothing_is_refused(tmp_path, monkeypatch):
    save(tmp_path)
    started(tmp_path, monkeypatch)
    model = Model(ours=True)
    with pytest.raises(ProbeError, match="which was not loaded: call"):
        Probe.from_env(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_rows_of_a_flattened_parameter_cannot_be_put_in_another_order(tmp_path, monkeypatch):
    save(tmp_path)
    path = started(tmp_path, monkeypatch) / "job.json"
    model = Model(ours=True)
    load_seed_checkpoint(model)
    half = FlatShard((8, 3), 0, 12, lambda: torch.zeros(12))
    held = (("model.layers.0.q.weight", half),)
    wrapped = Wrapped("FSDP1", (model,), held, held, (), ())
    with pytest.raises(ProbeError, match="wrapped as FSDP1 cannot be put in the order"):
        evidence_names(wrapped, job_of(str(path)), str(path))


def test_a_run_without_another_trainers_checkpoint_has_nothing_to_load(tmp_path, monkeypatch):
    started(tmp_path, monkeypatch, mapped=False)
    with pytest.raises(ProbeError, match="has no checkpoint to start from"):
        load_seed_checkpoint(Model(ours=True))
    monkeypatch.delenv("CONVERGE_JOB")
    load_seed_checkpoint(Model(ours=True))  # nobody asks for evidence: it does nothing
