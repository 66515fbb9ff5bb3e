"""The operations of one module's first call, as a dispatch mode sees them."""

import json
from types import SimpleNamespace

import pytest
import torch
from test_activations import TOKENS, Model, view_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from converge_harness.rank.recorder import operations
from converge_harness.rank.recorder.activations import activation_samples
from converge_harness.rank.recorder.operations import SUMS, summed
from converge_harness.run_folder.operations import GIVEN, MODEL, UNSEEN


def recorded(folder, model, module, *, calls=1, forward=None):
    """What the one rank writes of a module after so many first batches."""
    job = SimpleNamespace(sample_steps=(0, 1), frozen=0, operations_of=module, run_folder=folder)
    sampler = activation_samples(view_of(model), job, folder)
    sampler.begin()
    for _ in range(calls):
        (forward or model)(TOKENS).square().sum().backward()
    sampler.end_batch()
    sampler.finish()
    return json.loads((folder / "operations" / "rank-00000.json").read_text())


def test_operations_have_their_modules_settings_and_what_made_their_inputs(tmp_path):
    model = Model()
    found = recorded(tmp_path, model, "block")
    back = found["operations"][3]["name"]  # a view, in some releases an unsafe one
    assert back.endswith("view.default")
    assert [(each["name"], each["module"]) for each in found["operations"]] == [
        *(("aten.view.default", "block.first"), ("aten.t.default", "block.first")),
        *(("aten.addmm.default", "block.first"), (back, "block.first")),
        ("aten.tanh.default", ""),
        *(("aten.view.default", "block.second"), ("aten.t.default", "block.second")),
        *(("aten.addmm.default", "block.second"), (back, "block.second")),
        *(("aten.mul.Tensor", ""), ("aten.mul.Tensor", "")),
    ]
    by_name = {each["name"]: each for each in found["operations"]}
    assert by_name["aten.addmm.default"]["inputs"][0]["made_by"] == UNSEEN  # the bias
    first = found["operations"][0]
    assert first["settings"] == ["28", "6"]
    assert first["inputs"][0]["made_by"] == GIVEN
    assert (first["inputs"][0]["kind"], first["outputs"][0]["kind"]) == (
        "float32[4, 7, 6]",
        "float32[28, 6]",
    )
    last = len(found["operations"]) - 1
    assert [each["made_by"] for each in found["outputs"]] == [last]
    assert found["outputs"][0]["sums"] == found["operations"][-1]["outputs"][0]["sums"]
    assert [each["kind"] for each in found["inputs"]] == ["float32[4, 7, 6]", "float32[1, 1, 4]"]


def test_what_changes_in_place_has_its_new_sums(tmp_path):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 6)

        def forward(self, tokens):
            hidden = self.embed(tokens) * 1.0
            hidden.add_(3.0)
            return hidden.tanh()

    found = recorded(tmp_path, InPlace(), MODEL)
    *_, made, added, used = found["operations"]
    assert (made["name"], added["name"]) == ("aten.mul.Tensor", "aten.add_.Tensor")
    assert added["inputs"][0]["sums"] == made["outputs"][0]["sums"]
    assert added["outputs"][0]["sums"] != made["outputs"][0]["sums"]
    assert used["inputs"][0]["sums"] == added["outputs"][0]["sums"]
    assert found["operations"][used["inputs"][0]["made_by"]]["name"] == "aten.add_.Tensor"


def test_only_the_first_call_counts_and_nothing_computed_again(tmp_path):
    once, twice, again = (tmp_path / name for name in ("once", "twice", "again"))
    for folder in (once, twice, again):
        folder.mkdir()
    model = Model()

    def checkpointed(tokens):
        return checkpoint(model, tokens, use_reentrant=False)

    plain = recorded(once, model, "block")
    assert recorded(twice, model, "block", calls=2) == plain
    assert recorded(again, model, "block", forward=checkpointed) == plain


def test_training_has_the_same_bits(tmp_path):
    plain, looked_at = Model(), Model()
    plain(TOKENS).square().sum().backward()
    recorded(tmp_path, looked_at, "block")
    for mine, its in zip(looked_at.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_compiled_modules_and_those_that_are_not_called_are_said(tmp_path):
    compiled, idle = tmp_path / "compiled", tmp_path / "idle"
    compiled.mkdir()
    idle.mkdir()
    model = Model()
    model.block.compile(backend="eager")  # at its first call, of which there is none
    found = recorded(compiled, model, "block", forward=model.embed)
    assert (found["problem"], found["operations"]) == ("it is compiled", [])
    model = Model()
    model.more = nn.Linear(2, 2)
    assert recorded(idle, model, "more")["problem"] == "it was not called"


def test_a_module_of_another_pipeline_stage_leaves_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        recorded(tmp_path, Model(), "layers.7")


def test_long_modules_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "MOST", 3)
    found = recorded(tmp_path, Model(), "block")
    assert len(found["operations"]) == 3
    assert found["left_out"] > 5


def test_an_error_in_the_module_leaves_no_mode_behind(tmp_path):
    model = Model()

    def fail(_module, _inputs, _output):
        raise ValueError("wrong")

    model.block.first.register_forward_hook(fail)
    with pytest.raises(ValueError, match="wrong"):
        recorded(tmp_path, model, "block")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_sums_show_exchanged_entries_and_count_what_is_not_finite(monkeypatch):
    tensor = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(0))
    plain = summed(tensor)
    assert plain["kind"] == "float32[5, 6, 7]"
    assert len(plain["sums"]) == SUMS
    assert plain["norm"] == pytest.approx(float(tensor.norm()), rel=1e-6)
    for dim in range(3):
        assert summed(tensor.flip(dim))["sums"] != plain["sums"]
    monkeypatch.setattr(operations, "_BLOCK", 20)
    assert summed(tensor)["sums"] == pytest.approx(plain["sums"], rel=1e-9)
    tensor[0, 0, 0] = float("inf")
    assert summed(tensor)["not_finite"] == 1
    for odd in (torch.tensor(2.0), torch.zeros(0, 3), torch.arange(4), torch.ones(2).cfloat()):
        assert len(summed(odd)["sums"]) == SUMS
