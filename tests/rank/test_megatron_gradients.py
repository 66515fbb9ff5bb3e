"""Gradients of a whole pass are those of one rank: in bf16, under SP, with several microbatches."""

import importlib
import math

import pytest
from gloo_ranks import run_on_ranks
from megatron_models import NEEDED, job_of, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from test_megatron_parameters import CPU, save_seed, started, whole

from converge_harness.rank.data_order import Sample
from converge_harness.rank.megatron.model import build_optimizer, wrap_model
from converge_harness.rank.megatron.parameters import fused_of, pieces_of, trained_by
from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.rank.seed_checkpoint import load_weights

# What Megatron-Core and torch warn of while it builds models and optimizers is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 4
SEQUENCE = {"transformer.sequence_parallel": True}
BF16 = {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
SINGLE = {"training.local_batch_size": 1}


def microbatches(sizes):
    """Of this rank's part of one global batch, in which samples have other numbers of targets."""
    tokens = torch.randint(32, (SAMPLES, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    for number in range(SAMPLES):
        labels[number, : 3 * number] = IGNORE_INDEX
    share = SAMPLES // parallel_state.get_data_parallel_world_size()
    first = share * parallel_state.get_data_parallel_rank()
    for start in range(first, first + share, sizes.local_batch_size):
        rows = slice(start, start + sizes.local_batch_size)
        positions = torch.arange(16).expand_as(labels[rows])
        yield Sample(tokens[rows, :-1], positions, labels[rows])


def gradients(folder, name, degrees, overrides):
    """All ranks' gradients of a pass, as whole tensors, in a file."""
    config, chunks, parts = started(job_of(folder, degrees, overrides=overrides))
    pieces = pieces_of(parts)
    load_weights(folder / "seed", pieces, fused_of(parts))
    model_parallel_cuda_manual_seed(1)
    wrapped = wrap_model(config, chunks)
    optimizer = build_optimizer(config, wrapped)
    trained = trained_by(optimizer, pieces)
    batches = microbatches(config.tables.training)
    MegatronTrainer(config, wrapped, optimizer, None, batches, CPU).forward_backward()
    assert next(batches, None) is None
    found = whole([(name, shard.grad) for name, shard in trained.shards])
    if dist.get_rank() == 0:
        torch.save(found, folder / name)


def reference(folder):
    run_on_ranks(save_seed, 1, folder, {})
    run_on_ranks(gradients, 1, folder, "one", {}, {"training.local_batch_size": SAMPLES})
    return torch.load(folder / "one")


@pytest.mark.parametrize(
    ("degrees", "overrides"),
    [
        ({}, SINGLE),
        ({"dp_shard": 2}, SINGLE),
        ({"dp_replicate": 2, "dp_shard": 2}, SINGLE),
        ({"tp": 2}, SEQUENCE),
        ({"dp_shard": 2, "tp": 2}, {**SEQUENCE, **SINGLE}),
        ({"tp": 2}, {**SEQUENCE, **BF16}),
        ({"dp_shard": 2, "tp": 2}, {**SEQUENCE, **SINGLE, **BF16}),
    ],
    ids=[
        *("4_microbatches", "zero1_2_microbatches", "instances", "tp2_sp"),
        *("zero1_tp2_sp_2_microbatches", "bf16_tp2_sp", "bf16_zero1_tp2_sp_2_microbatches"),
    ],
)
def test_gradients_of_a_pass_are_those_of_one_rank(tmp_path, degrees, overrides):
    expected = reference(tmp_path)
    run_on_ranks(gradients, math.prod(degrees.values()), tmp_path, "many", degrees, overrides)
    found = torch.load(tmp_path / "many")
    assert found.keys() == expected.keys()
    # A bfloat16 has 8 bits.
    limit = 2**-5 if "training.dtype" in overrides else 1e-5
    for name, wanted in expected.items():
        assert found[name].dtype is torch.float32
        assert (found[name] - wanted).norm() < limit * wanted.norm(), name


def without_the_sum_over_tp(folder):
    # The package has a function of the module's name.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None
    with pytest.raises(AssertionError, match="layernorm"):  # of which copies differ
        gradients(folder, "many", {"tp": 2}, SEQUENCE)


def test_norms_that_are_not_summed_under_sequence_parallelism_are_seen(tmp_path):
    run_on_ranks(save_seed, 1, tmp_path, {})
    run_on_ranks(without_the_sum_over_tp, 2, tmp_path)


def test_means_of_microbatches_have_other_gradients(tmp_path):
    """Samples have other numbers of targets, so what the passes above agree on is not given."""
    expected = reference(tmp_path)
    overrides = {**SINGLE, "transformer.calculate_per_token_loss": False}
    run_on_ranks(gradients, 1, tmp_path, "means", {}, overrides)
    found = torch.load(tmp_path / "means")
    assert all(
        (found[name] - wanted).norm() > 0.01 * wanted.norm() for name, wanted in expected.items()
    )
