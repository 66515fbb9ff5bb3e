"""Megatron-FSDP: its shards are read where they are, at every strategy, by real ranks over gloo."""

import math
from dataclasses import replace
from importlib import metadata

import pytest
from gloo_ranks import run_on_ranks
from megatron_models import NEEDED, SETTINGS, job_of, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from test_megatron_parameters import EXPERTS, save_seed, started, whole

from converge_harness.rank.megatron.audit import strategy_of, tp_degree
from converge_harness.rank.megatron.config import build_config
from converge_harness.rank.megatron.model import build_optimizer, wrap_model
from converge_harness.rank.megatron.parameters import (
    fused_of,
    pieces_of,
    trained_by,
    weights_of,
)
from converge_harness.rank.recorder.block_shard import BlockShard
from converge_harness.rank.seed_checkpoint import load_weights
from converge_harness.rank.settings import SettingError

# What Megatron-Core and torch warn of while it builds models and optimizers is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

IS_0_16 = metadata.version("megatron-core").startswith("0.16.")
INSTANCES = {"dp_replicate": 2, "dp_shard": 2}
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
OVERLAPPED = {
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "optimizer.overlap_param_gather": True,
}


def fsdp(strategy, **more):
    return {
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": strategy,
        **more,
    }


def backward(model):
    """The summed loss of this rank's tokens, and its backward pass."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    tokens = torch.randint(32, (2, 16), generator=generator)
    positions = torch.arange(16).expand(2, -1)
    model(tokens, positions, None, labels=tokens).sum().backward()


def read_all(folder, degrees, more):
    for strategy in STRATEGIES:
        if (strategy, more, IS_0_16) == ("optim", OVERLAPPED, True):
            # A bug of it, and no other reading: it adds the sum to a rank's own gradients.
            with pytest.raises(AssertionError, match="word_embeddings"):
                read(folder, degrees, fsdp(strategy, **more))
        else:
            read(folder, degrees, fsdp(strategy, **more))
        parallel_state.destroy_model_parallel()


def read(folder, degrees, overrides):
    config, chunks, parts = started(job_of(folder, degrees, overrides=overrides))
    pieces = pieces_of(parts)
    load_weights(folder / "seed", pieces, fused_of(parts))
    weights = whole(weights_of(pieces))

    model_parallel_cuda_manual_seed(1)
    backward(chunks[0])
    for piece in pieces:  # as DDP does, or FSDP before it takes its part
        dist.all_reduce(piece.parameter.grad, group=parallel_state.get_data_parallel_group())
    alone = [
        (piece.name, BlockShard(piece.held.whole, piece.held.runs, piece.parameter.grad.clone))
        for piece in pieces
    ]
    expected = whole(alone)
    for piece in pieces:
        piece.parameter.grad = None

    (wrapped,) = wrap_model(config, chunks)
    optimizer = build_optimizer(config, [wrapped])
    trained = trained_by(optimizer, pieces)
    strategy = overrides["ddp.data_parallel_sharding_strategy"]
    assert strategy_of(wrapped) == strategy
    assert tp_degree(parts) == degrees.get("tp", 1)
    held = sum(piece.parameter.numel() for piece in pieces)
    assert 0 < sum(shard.entries for _, shard in trained.shards) < held
    found = whole(trained.shards)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)

    for _ in range(2):  # the second time with gradients and buffers that were used before
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        if config.tables.ddp.overlap_grad_reduce:
            with wrapped.no_sync():
                pass  # as the schedule before the last microbatch, of which there is only one
        backward(wrapped)
        wrapped.finish_grad_sync()
        reduced = whole([(name, shard.grad) for name, shard in trained.shards])
        for name in expected:
            torch.testing.assert_close(reduced[name], expected[name], msg=name)

    optimizer.step()
    updated = whole(trained.shards)
    assert not any(torch.equal(updated[name], weights[name]) for name in weights)
    if strategy != "optim_grads_params" and not config.tables.ddp.overlap_param_gather:
        # Every rank has the whole weights again, so they can be compared with their copies.
        copies = whole(trained.copies)
        assert all(torch.equal(copies[name], updated[name]) for name in updated)
    for name, shard in trained.shards:
        kept = shard.kept()
        assert float(kept["step"]) == 1
        torch.testing.assert_close(kept["exp_avg"].local(), 0.1 * shard.grad.local(), msg=name)


@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        ({"dp_shard": 2}, {}),
        ({"dp_shard": 2, "tp": 2}, OVERLAPPED),
        ({"dp_shard": 3}, {"training.global_batch_size": 6}),  # rows are divided unevenly
        (INSTANCES, OVERLAPPED),
    ],
    ids=["dp2", "overlapped_dp2_tp2", "dp3", "overlapped_instances"],
)
def test_what_all_ranks_read_is_what_one_rank_computes(tmp_path, degrees, more):
    run_on_ranks(save_seed, 1, tmp_path, {})
    run_on_ranks(read_all, math.prod(degrees.values()), tmp_path, degrees, more)


def apart(folder):
    with pytest.raises(AssertionError, match=r"\.weight"):  # of which copies differ
        read(folder, INSTANCES, fsdp("optim"))
    parallel_state.destroy_model_parallel()


def test_instances_keep_their_own_gradients_if_the_schedule_never_enters_no_sync(tmp_path):
    """A trap of Megatron-FSDP, and the reading shows it."""
    run_on_ranks(save_seed, 1, tmp_path, {})
    run_on_ranks(apart, 4, tmp_path)


def alone_with_its_experts(folder):
    degrees = {"dp_shard": 2, "ep": 2}
    overrides = {**EXPERTS, **fsdp("optim_grads_params")}
    config, chunks, parts = started(job_of(folder, degrees, overrides=overrides))
    pieces = pieces_of(parts)
    (wrapped,) = wrap_model(config, chunks)
    # Nobody shares a rank's experts, so they are whole; all else is sharded.
    assert strategy_of(wrapped) == "optim_grads_params"
    trained = trained_by(build_optimizer(config, [wrapped]), pieces)
    sizes = {piece.name: piece.parameter.numel() for piece in pieces}
    held = dict.fromkeys(sizes, 0)
    for name, shard in trained.shards:
        held[name] += shard.entries
    experts = [name for name in sizes if ".mlp.experts." in name]
    assert experts
    assert all(held[name] == sizes[name] for name in experts)
    assert sum(held.values()) < sum(sizes.values())


def partly_sharded(folder):
    """What the audit has to see: buffers, or an optimizer, with all of what ranks should share."""
    overrides = fsdp("optim_grads_params")
    config, chunks, _ = started(job_of(folder, {"dp_shard": 2, "tp": 2}, overrides=overrides))
    (wrapped,) = wrap_model(config, chunks)
    buffer = wrapped.param_and_grad_buffer
    assert strategy_of(wrapped) == "optim_grads_params"
    buffer.parameter_groups[0].model_weight_buffer.is_data_distributed = False
    assert strategy_of(wrapped) == "optim_grads_params?"
    for _, main in buffer.optimizer_named_parameters:
        main._local_tensor = torch.empty(main.orig_param.shape)
    assert strategy_of(wrapped) == "grads_params?"


def test_what_is_not_sharded_is_seen(tmp_path):
    run_on_ranks(partly_sharded, 4, tmp_path)


def test_what_it_overlaps_by_itself_is_in_the_config(tmp_path):
    def overlapped(strategy):
        flat = build_config(job_of(tmp_path, {"dp_shard": 2}, overrides=fsdp(strategy))).flat
        return flat["ddp.overlap_grad_reduce"], flat["ddp.overlap_param_gather"]

    assert list(map(overlapped, STRATEGIES)) == [(False, False), (True, False), (True, True)]


def test_reduction_in_float32_is_asked_for_by_its_own_key(tmp_path):
    def job(**more):
        overrides = fsdp("optim", **more)
        return job_of(tmp_path, {"dp_shard": 2}, overrides=overrides, techniques=("bf16",))

    if IS_0_16:
        assert build_config(job()).tables.ddp.grad_reduce_in_fp32
        return
    with pytest.raises(SettingError, match="grad_reduce_in_fp32: is ignored by Megatron-FSDP"):
        build_config(job())
    build_config(job(**{"ddp.grad_reduce_in_fp32": False}))
    build_config(job(**{"ddp.megatron_fsdp_main_grads_dtype": "float32"}))


def test_experts_that_no_other_rank_has_are_whole(tmp_path):
    run_on_ranks(alone_with_its_experts, 2, tmp_path)


@pytest.mark.parametrize(
    ("degrees", "overrides", "key", "says"),
    [
        ({"dp_replicate": 2}, fsdp("optim"), "ddp.use_megatron_fsdp", "set parallelism.dp_shard"),
        (
            {"dp_shard": 2, "pp": 2},
            fsdp("optim"),
            "ddp.use_megatron_fsdp",
            "no mesh with 2 pipeline stages",
        ),
        (
            {"dp_shard": 2},
            fsdp("no_shard"),
            "ddp.data_parallel_sharding_strategy",
            "'no_shard' is not one of Megatron-FSDP's that shard something",
        ),
        (
            {"dp_shard": 2},
            {"ddp.data_parallel_sharding_strategy": "optim"},
            "ddp.data_parallel_sharding_strategy",
            "is of Megatron-FSDP: set ddp.use_megatron_fsdp, too",
        ),
        (
            {"dp_shard": 2},
            fsdp("optim", **{"transformer.calculate_per_token_loss": False}),
            "ddp.gradient_reduce_div_fusion",
            "needs NCCL",
        ),
    ],
)
def test_what_megatron_fsdp_cannot_do_is_refused(tmp_path, degrees, overrides, key, says):
    job = job_of(tmp_path, degrees, overrides=overrides, pipeline_schedule="1F1B")
    with pytest.raises(SettingError) as refused:
        build_config(job)
    assert refused.value.problem.key == key
    assert says in refused.value.problem.message


def test_nccl_may_divide_while_it_reduces(tmp_path):
    overrides = fsdp("optim", **{"transformer.calculate_per_token_loss": False})
    build_config(job_of(tmp_path, {"dp_shard": 2}, overrides=overrides, device="cuda"))


def test_types_of_its_buffers_are_named(tmp_path):
    key = "ddp.megatron_fsdp_main_grads_dtype"
    overrides = fsdp("optim", **{key: "float32"})
    job = job_of(tmp_path, {"dp_shard": 2}, overrides=overrides)
    if not hasattr(build_config(job_of(tmp_path)).tables.ddp, key.removeprefix("ddp.")):
        with pytest.raises(SettingError, match="ddp has no 'megatron_fsdp_main_grads_dtype'"):
            build_config(job)
        return
    config = build_config(job)
    assert config.tables.ddp.megatron_fsdp_main_grads_dtype is torch.float32
    assert config.flat[key] == "float32"
    with pytest.raises(SettingError, match="not 'float12'"):
        build_config(job_of(tmp_path, {"dp_shard": 2}, overrides={**overrides, key: "float12"}))


def test_the_seed_checkpoint_is_not_sharded(tmp_path):
    """It is of one rank, whatever the train config says of the others."""
    sharded = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}
    job = job_of(tmp_path, {"dp_shard": 2}, role="seed checkpoint")
    config = replace(job.train_config, settings={**SETTINGS, "ddp": sharded})
    assert build_config(replace(job, role="test", train_config=config)).degrees.dp_shard == 2
    assert not build_config(replace(job, train_config=config)).tables.ddp.use_megatron_fsdp
