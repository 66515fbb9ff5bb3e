"""The probe in a plain loop: what it takes, when, and what it says where it cannot."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from probed_loop import STEPS, Model, lines_of, microbatches, sample_of, train, write_job
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.utils import clip_grad_norm_

from converge_harness.probe import Probe, ProbeError, initial_weights
from converge_harness.rank.recorder.digest import BatchDigest

TOKENS = torch.arange(10).view(2, 5) % 13


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes a job and points the environment to it; its run folder."""

    probes = []
    make = Probe.from_env.__func__

    def kept(cls, *args, **kwargs):
        probes.append(make(cls, *args, **kwargs))
        return probes[-1]

    monkeypatch.setattr(Probe, "from_env", classmethod(kept))

    def written(**more):
        path = write_job(tmp_path / "run", **more)
        monkeypatch.setenv("CONVERGE_JOB", str(path))
        return path.parent

    yield written
    for probe in probes:
        probe.close()


class Loop:
    """A model, its optimizer and a probe."""

    def __init__(self, wrap=lambda optimizer: optimizer, **from_env):
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.probe = Probe.from_env(self.model, wrap(self.optimizer), **from_env)

    def backward(self):
        self.model(TOKENS).square().mean().backward()

    def step(self, clip=lambda parameters: None):
        self.optimizer.zero_grad()
        self.probe.batch(TOKENS, TOKENS)
        self.backward()
        norm = nn.utils.get_total_norm([each.grad for each in self.model.parameters()])
        clip(list(self.model.parameters()))
        self.optimizer.step()
        self.probe.step(loss=1.0)
        return float(norm)


OFF = """
import sys
from converge_harness.probe import Probe, initial_weights
assert initial_weights(None) is None
probe = Probe.from_env(None, None)
probe.batch(1, 2); probe.logits(1, 2); probe.gradients(); probe.step(loss=1); probe.close()
assert probe._loop is None
unwanted = ("converge_harness.rank", "torch", "numpy")
imported = [name for name in sys.modules if name.startswith(unwanted)]
assert not imported, imported
"""


def test_without_a_job_nothing_is_done_or_imported():
    environment = {key: value for key, value in os.environ.items() if key != "CONVERGE_JOB"}
    subprocess.run([sys.executable, "-c", OFF], env=environment, check=True, timeout=60)


# ------------------------------------------------------------------ gradients


def part_by_part(parameters):
    nn.utils.clip_grad_value_(parameters[:3], 1e-9)
    nn.utils.clip_grad_norm_(iter(parameters[3:]), 1e-9)


CLIPS = {
    "torch's function": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-9),
    "imported by name": lambda parameters: clip_grad_norm_(iter(parameters), 1e-9),
    "part by part": part_by_part,
}


@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_are_taken_before_they_are_clipped(job, clip):
    unwatched = nn.utils.clip_grad_norm_  # another test in this process may have left its watch on
    folder = job(steps=2)
    loop = Loop()
    norms = [loop.step(CLIPS[clip]), loop.step(CLIPS[clip])]
    found = [line["grad_norm_recomputed"] for line in lines_of(folder)]
    assert found == pytest.approx(norms, rel=1e-12)
    assert np.linalg.norm(sample_of(folder, 1)["gradients_norm"]) == pytest.approx(norms[0])
    assert json.loads((folder / "in_force.json").read_text())["probe"]["gradients"] == (
        "before clipping"
    )
    assert nn.utils.clip_grad_norm_ is unwatched  # the watch is off after the last step


def by_hand(parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_are_taken_without_the_factor_of_a_loss_scaler(job, clips):
    folder = job()
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    norms = []
    for _ in range(STEPS):
        loop.optimizer.zero_grad()
        loop.probe.batch(TOKENS, TOKENS)
        loss = loop.model(TOKENS).square().mean()
        parameters = list(loop.model.parameters())
        norms.append(float(nn.utils.get_total_norm(torch.autograd.grad(loss, parameters))))
        scaler.scale(loop.model(TOKENS).square().mean()).backward()
        if clips:
            scaler.unscale_(loop.optimizer)
            clip_grad_norm_(parameters, 1e-3)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.probe.step(loss=1.0)
    loop.probe.close()
    found = [line["grad_norm_recomputed"] for line in lines_of(folder)]
    assert found == pytest.approx(norms, rel=1e-12)


def test_clipping_that_is_not_seen_is_recorded_as_such(job):
    folder = job(steps=1)
    norm = Loop().step(by_hand)
    (line,) = lines_of(folder)
    assert line["grad_norm_recomputed"] == pytest.approx(norm / 2, rel=1e-12)
    in_force = json.loads((folder / "in_force.json").read_text())
    assert in_force["probe"]["gradients"] == "at the optimizer's step"


def test_what_the_loop_says_counts(job):
    folder = job(steps=1)
    loop = Loop()
    loop.probe.batch(TOKENS, TOKENS)
    loop.backward()
    norm = float(nn.utils.get_total_norm([each.grad for each in loop.model.parameters()]))
    loop.probe.gradients()
    by_hand(loop.model.parameters())
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-9)
    loop.optimizer.step()
    loop.probe.step()
    (line,) = lines_of(folder)
    assert line["grad_norm_recomputed"] == pytest.approx(norm, rel=1e-12)


def test_gradients_clipped_after_every_microbatch_are_those_of_the_last(job):
    folder = job(steps=1)
    loop = Loop()
    for _ in range(2):
        loop.probe.batch(TOKENS, TOKENS)
        loop.backward()
        norm = float(nn.utils.get_total_norm([each.grad for each in loop.model.parameters()]))
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.optimizer.step()
    loop.probe.step()
    (line,) = lines_of(folder)
    assert line["grad_norm_recomputed"] == pytest.approx(norm, rel=1e-12)


def test_a_loop_that_cannot_be_edited_is_probed_through_hooks(tmp_path, monkeypatch):
    train(write_job(tmp_path / "edited"), "plain", accumulate=1)
    path = write_job(tmp_path / "hooked")
    monkeypatch.setenv("CONVERGE_JOB", str(path))
    model = Hooked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    Probe.from_env(model, optimizer, hooks=True)
    untouched_loop(model, optimizer)
    pairs = zip(lines_of(tmp_path / "edited"), lines_of(tmp_path / "hooked"), strict=True)
    for expected, line in pairs:
        for key in ("loss", "grad_norm_recomputed"):
            assert line[key] == pytest.approx(expected[key], rel=1e-12), key
        assert line["batch_digest"] == expected["batch_digest"]


class Hooked(Model):
    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def untouched_loop(model, optimizer):
    for step in (1, 2, 3):
        ((inputs, labels),) = microbatches(step, accumulate=1)
        with torch.no_grad():
            model(inputs, labels=labels)  # a look that is no training
        model(inputs, labels=labels)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("hooks", [False, True])
def test_states_made_before_the_first_step_are_no_step(job, hooks):
    """Torch makes them by a step with zero gradients and a rate of 0."""
    folder = job(steps=1)
    loop = Loop(lambda optimizer: torch.optim.AdamW(optimizer.param_groups), hooks=hooks)
    (optimizer,) = loop.probe._loop._wrapped.optimizers
    get_state_dict(loop.model, optimizer)
    loop.probe.batch(TOKENS, TOKENS)
    loop.backward()
    norm = nn.utils.get_total_norm([each.grad for each in loop.model.parameters()])
    optimizer.step()
    if not hooks:
        loop.probe.step(loss=1.0)
    (line,) = lines_of(folder)
    assert line["grad_norm_recomputed"] == pytest.approx(float(norm), rel=1e-12)


def test_a_first_step_at_a_rate_of_0_is_a_step(job):
    folder = job(steps=1)
    loop = Loop()
    loop.optimizer.param_groups[0]["lr"] = 0.0
    norm = loop.step()
    (line,) = lines_of(folder)
    assert line["grad_norm_recomputed"] == pytest.approx(norm, rel=1e-12)


# ------------------------------------------------------------------ batches


def digest(*batches):
    found = BatchDigest()
    for batch in batches:
        found.add(*batch)
    return found.total, found.samples


def test_padding_under_a_mask_is_no_part_of_a_sample():
    short, long = torch.tensor([[5, 6]]), torch.tensor([[7, 8, 9, 10]])
    padded = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    apart = digest((short, short), (long, long))
    assert digest((padded, padded, mask)) == apart
    assert digest((padded.flip(0), padded.flip(0), mask.flip(0))) == apart
    assert digest((padded, padded)) != apart
    of_each = torch.tensor([1, 2])  # a label of a sample is no padding
    assert digest((padded, of_each, mask)) == digest((short, of_each[:1]), (long, of_each[1:]))


def test_numbers_that_are_no_integers_count_by_their_bits():
    image = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    moved = image.clone()
    moved[1, 2, 3] = torch.nextafter(moved[1, 2, 3], torch.tensor(9.0))
    assert digest((image,)) == digest((image[1:],), (image[:1],))
    assert digest((image,)) != digest((moved,))
    assert digest((image.bfloat16(), torch.tensor([1, 2]))) != digest((image.bfloat16(),))


def test_labels_count_as_tokens_and_may_be_left_out(job):
    folder = job(steps=4, sample_steps=[])
    loop = Loop()
    labels = torch.tensor([3, -100])
    batches = ((TOKENS, labels), (TOKENS,), (torch.ones(2, 3),), (TOKENS, None, TOKENS > 6))
    for batch in batches:
        loop.probe.batch(*batch)
        loop.probe.step(loss=torch.tensor(2.0))
    lines = lines_of(folder)
    assert [line["tokens"] for line in lines] == [1, 10, 2, 3]
    assert [line["loss"] for line in lines] == [2.0] * 4


# ------------------------------------------------------------------ wrong use


def test_more_steps_than_the_job_has(job):
    folder = job(steps=1)
    loop = Loop()
    loop.step()
    assert lines_of(folder, "end") == [{"kind": "end", "steps": 1}]
    with pytest.raises(ProbeError, match="after the job's 1 steps"):
        loop.step()


def test_a_step_without_a_batch(job):
    job()
    with pytest.raises(ProbeError, match="step 1 without probe"):
        Loop().probe.step(loss=1.0)


def test_a_job_of_another_schema(job):
    job(schema=2)
    with pytest.raises(ProbeError, match="job schema is 2, this rank code reads 1"):
        Loop()


def test_parameters_that_were_replaced(job):
    job()
    loop = Loop()
    loop.probe.batch(TOKENS)
    loop.model.scale = nn.Parameter(torch.ones(3, 1, 2, dtype=torch.float64))
    with pytest.raises(ProbeError, match="scale is another tensor at step 1"):
        loop.probe.step(loss=1.0)
    loop.probe.close()


def test_an_optimizer_of_another_model(job):
    job()
    other = torch.optim.SGD(Model().parameters(), lr=0.1)
    with pytest.raises(ProbeError, match="updates none of the model's"):
        Probe.from_env(Model(), other)
    with pytest.raises(ProbeError, match="the optimizer is a NoneType"):
        Probe.from_env(Model())


class Around(torch.optim.Optimizer):
    """As accelerate 1.15 wraps an optimizer: one by class, never initialised, so without hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_that_wraps_another_is_looked_into(job):
    folder = job(steps=1)
    norm = Loop(wrap=Around).step()
    (line,) = lines_of(folder)
    assert line["grad_norm_recomputed"] == pytest.approx(norm, rel=1e-12)


def test_a_second_probe_does_not_replace_the_evidence_of_the_first(job):
    folder = job(steps=1, repeat="ulp")
    loop = Loop()
    loop.step()
    left = (folder / "metrics.jsonl").read_bytes()
    before = [each.detach().clone() for each in loop.model.parameters()]
    with pytest.raises(ProbeError, match="called a second time"):
        Probe.from_env(loop.model, loop.optimizer)
    assert (folder / "metrics.jsonl").read_bytes() == left
    assert all(map(torch.equal, before, loop.model.parameters()))


def test_a_job_that_leaves_curves_only(job):
    job(command={"probed": False})
    with pytest.raises(ProbeError, match=r"trainer\.probe = false"):
        Loop()


def test_several_processes_without_a_process_group(job, monkeypatch):
    job()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ProbeError, match="init_process_group before"):
        Loop()


def test_batches_and_logits_of_other_shapes(job):
    job()
    probe = Loop().probe
    with pytest.raises(ProbeError, match=r"labels is torch.Size\(\[3\]\)"):
        probe.batch(TOKENS, torch.zeros(3))
    with pytest.raises(ProbeError, match=r"mask of shape \(2, 4\) does not fit"):
        probe.batch(TOKENS, TOKENS, TOKENS[:, 1:])
    with pytest.raises(ProbeError, match="shifted as in the loss"):
        probe.logits(torch.zeros(2, 5, 13), TOKENS[:, 1:])
    probe.close()


def test_weights_without_values_cannot_be_moved(job):
    job(repeat="ulp")
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ProbeError, match="meta device"):
        initial_weights(model)


def test_no_module_of_the_probe_hides_a_function_of_the_package():
    code = "from converge_harness import probe\nimport converge_harness.probe.loop\n"
    code += "probe.initial_weights(None)"
    bare = {name: value for name, value in os.environ.items() if name != "CONVERGE_JOB"}
    subprocess.run([sys.executable, "-c", code], env=bare, check=True)
