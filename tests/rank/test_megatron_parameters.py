"""Names and entries of Megatron-Core's parameters, whatever the layout: by real ranks over gloo."""

import math

import pytest
from gloo_ranks import run_on_ranks
from megatron_models import NEEDED, job_of, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state

from converge_harness.rank.megatron.audit import dispatchers_of
from converge_harness.rank.megatron.config import build_config
from converge_harness.rank.megatron.model import build_model, build_optimizer, wrap_model
from converge_harness.rank.megatron.parameters import (
    CanonicalPart,
    fused_of,
    pieces_of,
    trained_by,
    weights_of,
)
from converge_harness.rank.megatron.view import view_of
from converge_harness.rank.recorder.replicas import ReplicaCheck
from converge_harness.rank.seed_checkpoint import load_weights, save_weights
from converge_harness.rank.settings import SettingError

# What Megatron-Core and torch warn of while it builds models and optimizers is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")


def started(job):
    """The model of a job on this rank: config, chunks, parts."""
    config = build_config(job)
    transformer = config.tables.transformer
    parallel_state.initialize_model_parallel(
        transformer.tensor_model_parallel_size,
        transformer.pipeline_model_parallel_size,
        transformer.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=transformer.expert_model_parallel_size,
        expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.tables.ddp.num_distributed_optimizer_instances,
    )
    torch.manual_seed(job.seed + dist.get_rank())  # nothing may depend on it
    chunks = build_model(config, CPU)
    return config, chunks, tuple(map(CanonicalPart, chunks))


def whole(shards):
    """Everyone's entries as whole tensors by name: every entry once, or alike wherever it is."""
    mine = [(name, tuple(shard.shape), shard.runs, shard.local().clone()) for name, shard in shards]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {}
    for name, shape, runs, value in (each for some in everyone for each in some):
        tensor = found.setdefault(name, torch.full(shape, torch.nan))
        index = torch.meshgrid(
            *(torch.tensor([at for run in some for at in run]) for some in runs), indexing="ij"
        )
        before = tensor[index]
        assert bool((before.isnan() | (before == value)).all()), name
        tensor[index] = value
    assert not any(bool(tensor.isnan().any()) for tensor in found.values())
    return found


def save_seed(folder, overrides):
    _, _, parts = started(job_of(folder, role="seed checkpoint", overrides=overrides))
    pieces = pieces_of(parts)
    save_weights(folder / "seed", pieces, fused_of(parts))
    torch.save(dict(whole(weights_of(pieces))), folder / "whole.pt")


def load_seed(folder, degrees, more):
    _, _, parts = started(job_of(folder, degrees, **more))
    pieces = pieces_of(parts)
    load_weights(folder / "seed", pieces, fused_of(parts))
    found, wanted = whole(weights_of(pieces)), torch.load(folder / "whole.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


TIED = {"gpt.share_embeddings_and_output_weights": True}
SINKS = {"transformer.softmax_type": "learnable"}
EXPERTS = {"transformer.num_moe_experts": 4, "transformer.moe_ffn_hidden_size": 8}
SHARED = {**EXPERTS, "transformer.moe_shared_expert_intermediate_size": 12}
SOME_LAYERS = {**EXPERTS, "transformer.moe_layer_freq": [0, 1, 1, 0]}
INSTANCES = {"dp_replicate": 2, "dp_shard": 2}
SEQUENCE = {"transformer.sequence_parallel": True}
UNDIVIDED = {**SEQUENCE, "transformer.expert_tensor_parallel_size": 1}
INTERLEAVED = {"pipeline_schedule": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"overrides": SINKS}),
        ({"pp": 2}, {"pipeline_schedule": "1F1B"}),
        ({"pp": 2}, INTERLEAVED),
        ({"pp": 2}, {"pipeline_schedule": "1F1B", "overrides": TIED}),
        ({"tp": 2, "pp": 2}, {"pipeline_schedule": "1F1B"}),
        ({"dp_replicate": 2, "ep": 2}, {"overrides": EXPERTS}),
        ({"tp": 2, "ep": 2}, {"overrides": {**EXPERTS, **UNDIVIDED}}),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, {"overrides": {**SHARED, **SEQUENCE}}),
        (
            {"dp_shard": 2, "pp": 2, "ep": 2},
            {"pipeline_schedule": "1F1B", "overrides": SOME_LAYERS},
        ),
    ],
    ids=[
        *("tp2", "sinks_tp2", "pp2", "interleaved", "tied_pp2", "tp2_pp2"),
        *("ep2", "undivided_ep2_tp2", "ep2_tp2", "ep2_pp2"),
    ],
)
def test_every_layout_gets_the_weights_that_one_rank_drew(tmp_path, degrees, more):
    overrides = more.get("overrides", {})
    of_model = {key: value for key, value in overrides.items() if key not in UNDIVIDED}
    run_on_ranks(save_seed, 1, tmp_path, of_model)
    run_on_ranks(load_seed, ranks_of(degrees), tmp_path, degrees, more)


def ranks_of(degrees):
    return math.prod(degree for name, degree in degrees.items() if name != "ep")


def matrices_of_seed(folder):
    _, _, parts = started(job_of(folder, role="seed checkpoint"))
    save_weights(folder / "seed", pieces_of(parts), fused_of(parts))
    prefix = "layers.3.self_attention.linear_"
    shapes = {"q": (16, 16), "k": (8, 16), "v": (8, 16)}
    state = {f"{prefix}{name}.weight": torch.empty(shape) for name, shape in shapes.items()}
    state |= {f"layers.3.mlp.linear_{name}.weight": torch.empty(24, 16) for name in ("gate", "up")}
    dcp.load(state, checkpoint_id=folder / "seed", no_dist=True)
    layer = parts[0].layers["3"]
    fused, gated = layer.self_attention.linear_qkv.weight, layer.mlp.linear_fc1.weight
    # Two query groups, each of two heads of 4, then its key and its value.
    first, second = fused.detach().split(16)
    assert torch.equal(state[f"{prefix}q.weight"], torch.cat([first[:8], second[:8]]))
    assert torch.equal(state[f"{prefix}k.weight"], torch.cat([first[8:12], second[8:12]]))
    assert torch.equal(state[f"{prefix}v.weight"], torch.cat([first[12:], second[12:]]))
    assert torch.equal(state["layers.3.mlp.linear_gate.weight"], gated.detach()[:24])
    assert torch.equal(state["layers.3.mlp.linear_up.weight"], gated.detach()[24:])


def test_the_seed_checkpoint_has_each_matrix_of_fused_weights(tmp_path):
    run_on_ranks(matrices_of_seed, 1, tmp_path)


def with_fused_norms(folder):
    _, _, parts = started(job_of(folder, {"tp": 2}))
    layer = parts[0].layers["1"]
    # What a fused layer of Transformer Engine has beside its matrix, as Megatron-Core marks it.
    for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
        linear.layer_norm_weight = torch.nn.Parameter(torch.arange(16.0))
        linear.layer_norm_weight.sequence_parallel = True
    weights = whole(weights_of(pieces_of(parts)))
    fused = fused_of(parts)
    for name in ("layers.1.self_attention.linear_qkv", "layers.1.mlp.linear_fc1"):
        assert torch.equal(weights[f"{name}.layer_norm_weight"], torch.arange(16.0))
        assert f"{name}.weight" in fused
        assert f"{name}.layer_norm_weight" not in fused


def test_the_norm_in_a_fused_layer_has_no_rows_of_heads(tmp_path):
    run_on_ranks(with_fused_norms, 2, tmp_path)


def load_of_another_model(folder):
    _, _, parts = started(job_of(folder, overrides={"transformer.ffn_hidden_size": 32}))
    with pytest.raises(SettingError, match=r"linear_gate.weight of shape \(24, 16\)"):
        load_weights(folder / "seed", pieces_of(parts), fused_of(parts))


def test_weights_of_another_model_are_refused(tmp_path):
    run_on_ranks(save_seed, 1, tmp_path, {})
    run_on_ranks(load_of_another_model, 1, tmp_path)


def updated(folder, degrees, overrides):
    config, chunks, parts = started(job_of(folder, degrees, overrides=overrides))
    pieces = pieces_of(parts)
    load_weights(folder / "seed", pieces, fused_of(parts))
    weights = whole(weights_of(pieces))
    wrapped = wrap_model(config, chunks)
    optimizer = build_optimizer(config, wrapped)
    trained = trained_by(optimizer, pieces)
    # The runs of all data-parallel ranks are the whole, and none has all of it.
    runs = whole(trained.shards)
    assert runs.keys() == weights.keys()
    assert all(torch.equal(runs[name], weights[name]) for name in weights)
    held = sum(piece.parameter.numel() for piece in pieces)
    entries = sum(shard.entries for _, shard in trained.shards)
    assert 0 < entries < held if "dp_shard" in degrees else entries == held
    # Gradients are those that the optimizer reads, and states are of the same entries.
    for _, shard in trained.shards:
        shard.grad.local().copy_(shard.local())
    optimizer.step()
    for name, shard in trained.shards:
        kept = shard.kept()
        assert float(kept["step"]) == 1
        clipped, moment = shard.grad.local(), kept["exp_avg"].local()
        torch.testing.assert_close(moment, 0.1 * clipped, msg=name)


def untrained(folder):
    config, chunks, parts = started(job_of(folder))
    last = parts[0].final_layernorm.weight
    pieces = pieces_of(parts)
    wrapped = wrap_model(config, chunks)
    last.requires_grad_(False)  # unseen by the optimizer
    optimizer = build_optimizer(config, wrapped)
    with pytest.raises(SettingError, match=r"no optimizer has final_layernorm.weight, so"):
        trained_by(optimizer, pieces)
    # What is frozen has no place in the optimizer, and need not have one.
    frozen = pieces_of(parts)
    assert {name for name, _ in trained_by(optimizer, frozen).shards} == {
        piece.name for piece in pieces if piece.parameter is not last
    }


def test_a_parameter_that_no_optimizer_has_is_refused(tmp_path):
    run_on_ranks(untrained, 1, tmp_path)


def dispatched(folder):
    _, _, parts = started(job_of(folder, overrides=EXPERTS))
    assert dispatchers_of(parts) == ("allgather",)
    mlp = parts[0].layers["1"].mlp

    class Unknown(type(mlp.token_dispatcher)):
        pass

    mlp.token_dispatcher.__class__ = Unknown
    assert dispatchers_of(parts) == ("Unknown", "allgather")


def test_dispatchers_of_tokens_are_those_of_all_layers(tmp_path):
    run_on_ranks(dispatched, 1, tmp_path)


@pytest.mark.parametrize(
    ("degrees", "overrides"),
    [
        ({"dp_shard": 2}, {}),
        ({"dp_shard": 2, "tp": 2}, {}),
        ({"dp_shard": 2, "ep": 2}, EXPERTS),
        ({"dp_replicate": 2, "ep": 2}, EXPERTS),
        (INSTANCES, {}),
        ({**INSTANCES, "ep": 2}, EXPERTS),
    ],
    ids=["dp2", "dp2_tp2", "dp2_ep2", "ep2_without_shards", "instances", "instances_ep2"],
)
def test_what_the_optimizers_of_all_ranks_update_is_the_whole(tmp_path, degrees, overrides):
    run_on_ranks(save_seed, 1, tmp_path, overrides)
    run_on_ranks(updated, ranks_of(degrees), tmp_path, degrees, overrides)


def compared(folder, degrees, groups):
    """Gradients, then states, then a weight that only was gathered are made to differ."""
    config, chunks, parts = started(job_of(folder, degrees))
    pieces = pieces_of(parts)
    for piece in pieces:
        piece.parameter.data.fill_(1.0)
    optimizer = build_optimizer(config, wrap_model(config, chunks))
    optimizer.reload_model_params()
    trained = trained_by(optimizer, pieces)
    check = ReplicaCheck(view_of(parts, trained, optimizer, 32, CPU))

    def changed(change):
        for name, shard in trained.shards:
            shard.grad.local().fill_(1.0)
            if change and name == "final_layernorm.weight" and dist.get_rank() in groups[1]:
                change(shard)
        check.gradients()
        found = check.finish(1)
        return found["compared"], [
            (each["kind"], each["tensor"], each["groups"]) for each in found["disagreements"]
        ]

    optimizer.step()
    kinds, found = changed(None)
    assert found == []
    assert min(kinds[kind] for kind in ("parameter", "gradient", "optimizer state")) > 0
    name = "final_layernorm.weight"
    _, found = changed(lambda shard: shard.grad.local().add_(1.0))
    assert found == [("gradient", name, groups)]
    _, found = changed(lambda shard: shard.kept()["exp_avg"].local().add_(1.0))
    assert found == [("optimizer state", name, groups)]
    if dist.get_rank() == 3:  # which has no run of it
        parts[0].final_layernorm.weight.data.add_(1.0)
    _, found = changed(None)
    assert ("parameter", name, [[0, 1, 2], [3]]) in found


@pytest.mark.parametrize(
    ("degrees", "groups"),
    [(INSTANCES, [[0], [2]]), ({"dp_shard": 2, "tp": 2}, [[0], [1]])],
    ids=["instances", "tp2"],
)
def test_copies_of_what_the_distributed_optimizer_reads_are_compared(tmp_path, degrees, groups):
    run_on_ranks(compared, 4, tmp_path, degrees, groups)
