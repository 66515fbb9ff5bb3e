"""The probe of Megatron-LM's loop on real ranks over gloo, without a checkout of Megatron-LM."""

import json
from functools import partial

import pytest
from gloo_ranks import run_on_ranks
from megatron_models import NEEDED, SETTINGS, job_of, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from test_megatron_parameters import started

from converge_harness.probe import ProbeError
from converge_harness.probe.megatron_loop import WatchedLoop
from converge_harness.rank.megatron.model import build_optimizer, wrap_model

# What Megatron-Core and torch warn of while it builds models and optimizers is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = SETTINGS["training"]
MICROBATCHES = 2


def batches():
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        tokens = torch.randint(32, (SIZES["local_batch_size"], 17), generator=generator)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(len(tokens), 16),
        }


def forward_step(source, chunk):
    """As that of ``pretrain_gpt.py``."""
    batch = next(source)
    positions = torch.arange(16).expand_as(batch["tokens"])
    mask = batch["loss_mask"]
    losses = chunk(batch["tokens"], positions, None, labels=batch["labels"], loss_mask=mask)

    def loss_function(losses):
        return losses.sum(), mask.sum().int(), {"lm loss": losses.detach().mean()}

    return losses, loss_function


def train_step(chunks, optimizer, forward_step, source):
    """As Megatron-LM's: the losses to log, and whatever else."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=source,
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=16,
        micro_batch_size=SIZES["local_batch_size"],
        decoder_seq_length=16,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    mean = torch.stack([each["lm loss"] for each in losses]).mean()
    return {"lm loss": mean}, False, norm


def trained(folder, degrees, more):
    job = job_of(folder, degrees, steps=1, **more)
    config, chunks, _ = started(job)
    model_parallel_cuda_manual_seed(1)
    wrapped = wrap_model(config, chunks)
    optimizer = build_optimizer(config, wrapped)
    loop = WatchedLoop(job, wrapped, optimizer, {})
    loop.watched(partial(train_step, wrapped, optimizer))(forward_step, batches())


def in_force_of(folder, ranks, degrees, **more):
    run_on_ranks(trained, ranks, folder, degrees, more)
    return json.loads((folder / "in_force.json").read_text())


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {"dp_replicate": 2}),
        (2, {"dp_shard": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2}),
    ],
    ids=["plain", "distributed_optimizer", "two_instances"],
)
def test_the_degrees_are_those_of_the_process_groups(tmp_path, ranks, degrees):
    found = in_force_of(tmp_path, ranks, degrees)
    wanted = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1}
    assert found["degrees"] == {**wanted, **degrees}
    assert found["gradient_accumulation_steps"] == MICROBATCHES
    assert found["probe"]["recomputes_loss"]
    named = "distributed optimizer" in found["probe"]["wrapping"]
    assert named is ("dp_shard" in degrees)


def refused(folder):
    sharded = {
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    }
    job = job_of(folder, {"dp_shard": 2}, overrides=sharded)
    config, chunks, _ = started(job)
    wrapped = wrap_model(config, chunks)
    with pytest.raises(ProbeError, match=r"in Megatron-FSDP \(--use-megatron-fsdp\), whose shards"):
        WatchedLoop(job, wrapped, build_optimizer(config, wrapped), {})
    with pytest.raises(ProbeError, match="the model is in a GPTModel, whose shards"):
        WatchedLoop(job, chunks, None, {})  # not wrapped at all


def test_megatron_fsdp_is_refused_by_name(tmp_path):
    run_on_ranks(refused, 2, tmp_path)
