"""The loss of a step whose CUDA graph is replayed: read where the graph leaves it, or missing.

Nothing here runs on a GPU. A graph is stood in for by one that makes recorded operations again
(``recorded_graph``); ``tests/gpu`` asks the same of a real one.
"""

import json

import pytest
import torch
from recorded_graph import Wrapped

from converge_harness.rank.recorder import step_recorder
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView
from converge_harness.run_folder.job import BaseConfig, Degrees, RankJob

VOCABULARY = 11
STEPS = 5


class Loop:
    """A model, and a function of a microbatch that may be captured, with the recorder's hook."""

    def __init__(self, folder, accumulated=1):
        torch.manual_seed(1)
        self.model = torch.nn.Linear(4, VOCABULARY)
        self.accumulated = accumulated
        job = RankJob(
            "x", "control", "id", "titan_0_3", folder, 1, STEPS, Degrees(), BaseConfig("x")
        )
        view = TrainerView(
            model_parts=(self.model,),
            dp_rank=0,
            first_of_dp=True,
            has_last_stage=True,
            tp_rank=0,
            tp_group=None,
            vocab_size=VOCABULARY,
            device=torch.device("cpu"),
            optimizers=(),
            learning_rate=lambda: 0.1,
        )
        self.recorder = StepRecorder(view, job)
        self.folder = folder

    def forward_backward(self, inputs, labels):
        logits = self.model(inputs)
        self.recorder.on_logits(logits, labels)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss.backward()
        return loss

    def train(self, run):
        random = torch.Generator().manual_seed(2)
        for step in range(1, STEPS + 1):
            self.recorder.begin_step(step)
            self.model.zero_grad(set_to_none=False)
            for _ in range(self.accumulated):
                inputs = torch.randn(6, 4, generator=random)
                labels = torch.randint(VOCABULARY, (6,), generator=random)
                labels[0] = -100
                self.recorder.on_batch(inputs, labels)
                with self.recorder.forward_backward():
                    run(inputs, labels)
            self.recorder.before_clip()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
            self.recorder.end_step()
        self.recorder.close()
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "step"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Two runs of one loop: each microbatch as it is called, and by the function given."""

    def both(run, accumulated=1):
        found = []
        for name, chosen in (("eager", lambda loop: loop.forward_backward), ("graph", run)):
            (tmp_path / name).mkdir()
            loop = Loop(tmp_path / name, accumulated)
            call = chosen(loop)
            monkeypatch.setattr(
                step_recorder,
                "_is_captured",
                lambda _, call=call: getattr(call, "capturing", False),
            )
            found.append(loop.train(call))
        return found

    return both


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_loss_of_every_replayed_step_is_that_of_its_own_batch(trained, accumulated):
    eager, graph = trained(
        lambda loop: Wrapped(loop.forward_backward, loop.model.parameters()), accumulated
    )
    for signal in ("loss_recomputed", "grad_norm_recomputed", "tokens", "batch_digest"):
        assert [line[signal] for line in graph] == [line[signal] for line in eager], signal
    assert len({line["loss_recomputed"] for line in graph}) == STEPS
    assert not any("problems" in line for line in graph)


def without_hook(loop):
    def run(inputs, labels):
        logits = loop.model(inputs)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()

    return run


def test_a_step_whose_loss_function_nobody_saw_has_no_loss_instead_of_0(trained):
    _, unseen = trained(without_hook)
    assert [line["loss_recomputed"] for line in unseen] == [None] * STEPS
    assert all("disable_cuda_graphs" in line["problems"][0] for line in unseen)
    assert None not in [line["grad_norm_recomputed"] for line in unseen]


def test_one_microbatch_of_several_that_nobody_saw_takes_the_steps_loss(trained):
    def sometimes(loop):
        run, blind, calls = loop.forward_backward, without_hook(loop), []

        def call(*given):
            calls.append(given)
            return (blind if len(calls) == 4 else run)(*given)

        return call

    _, some = trained(sometimes, accumulated=2)
    assert [line["loss_recomputed"] is None for line in some] == [False, True, False, False, False]


def test_what_no_replay_has_written_is_not_counted_again(trained):
    """A call that reaches neither the loss function nor the graph: its values are the last ones."""

    def broken(loop):
        wrapped = Wrapped(loop.forward_backward, loop.model.parameters())

        class Skipping:
            capturing = property(lambda self: wrapped.capturing)

            def __call__(self, *given):
                return None if wrapped.calls == 4 else wrapped(*given)

        return Skipping()

    _, skipped = trained(broken)
    assert [line["loss_recomputed"] is None for line in skipped] == [False] * 4 + [True]
    assert "CUDA graph was replayed and left nothing" in skipped[4]["problems"][0]
