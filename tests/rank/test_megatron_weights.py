"""Megatron-Core by the weights of torchtitan's checkpoint: by real ranks over gloo."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
from gloo_ranks import run_on_ranks
from megatron_models import NEEDED, job_of, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import nn

import converge_harness
from converge_harness.rank import megatron
from converge_harness.rank.megatron.config import build_config
from converge_harness.rank.megatron.model import build_model
from converge_harness.rank.megatron.parameters import (
    CanonicalPart,
    fused_of,
    module_names,
    pieces_of,
    weights_of,
)
from converge_harness.rank.megatron.trainer import mask_across_documents
from converge_harness.rank.recorder.activations import _outermost
from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.grad_norm import assign_shards, trainable
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.rows import assign_rows
from converge_harness.rank.recorder.tensor_samples import TensorSampler, sum_over_ranks
from converge_harness.rank.seed_checkpoint import load_weights
from converge_harness.rank.settings import SettingError
from converge_harness.rank.start.entry import config_problems
from converge_harness.run_folder.weight_mapping import WeightMapping

# What Megatron-Core and torch warn of while it builds models is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
ATTENTION, FEED_FORWARD = "layers.*.attention", "layers.*.feed_forward"
NAMES = WeightMapping(
    {
        "embedding.word_embeddings.weight": "tok_embeddings.weight",
        "layers.*.input_layernorm.weight": "layers.*.attention_norm.weight",
        "layers.*.self_attention.linear_q.weight": f"{ATTENTION}.wq.weight",
        "layers.*.self_attention.linear_k.weight": f"{ATTENTION}.wk.weight",
        "layers.*.self_attention.linear_v.weight": f"{ATTENTION}.wv.weight",
        "layers.*.self_attention.linear_proj.weight": f"{ATTENTION}.wo.weight",
        "layers.*.pre_mlp_layernorm.weight": "layers.*.ffn_norm.weight",
        "layers.*.mlp.linear_gate.weight": f"{FEED_FORWARD}.w1.weight",
        "layers.*.mlp.linear_up.weight": f"{FEED_FORWARD}.w3.weight",
        "layers.*.mlp.linear_fc2.weight": f"{FEED_FORWARD}.w2.weight",
        "final_layernorm.weight": "norm.weight",
        "output_layer.weight": "lm_head.weight",
    },
    {"layers.*.mlp": "layers.*.feed_forward"},
    ("optimizer.*",),
    rotary_interleaved=True,
)


def checkpoint(folder):
    """torchtitan's, of the model of ``job_of``; returns its weights."""
    torch.manual_seed(1)
    layer = {
        **{f"attention.{name}": (rows, 16) for name, rows in (("wq", 16), ("wk", 8), ("wv", 8))},
        "attention.wo": (16, 16),
        **{f"feed_forward.{name}": (24, 16) for name in ("w1", "w3")},
        "feed_forward.w2": (16, 24),
        **dict.fromkeys(("attention_norm", "ffn_norm"), (16,)),
    }
    shapes = {"tok_embeddings": (32, 16), "norm": (16,), "lm_head": (32, 16)}
    for number in range(4):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    weights = {f"{name}.weight": torch.randn(shape) / 2 for name, shape in shapes.items()}
    beside = {"optimizer.state.norm.weight.exp_avg": torch.zeros(16)}
    dcp.save({**weights, **beside}, checkpoint_id=folder / "seed", no_dist=True)
    return weights


def built(job):
    """The chunks of a job's model on this rank, and their parts."""
    config = build_config(job)
    transformer = config.tables.transformer
    parallel_state.initialize_model_parallel(
        transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size
    )
    model_parallel_cuda_manual_seed(job.seed)  # attention's dropout asks for it, whatever its rate
    chunks = build_model(config, CPU)
    return chunks, tuple(CanonicalPart(chunk, job.weights) for chunk in chunks)


def sketches(named, fused):
    """What the recorder writes of parameters, by name."""
    rows = assign_rows(assign_shards(named), fused, CPU)
    after = PostStepSampler(rows, [], CPU)
    samples = TensorSampler(rows, None, CPU, after, BufferSampler([], CPU))
    (table,) = sum_over_ranks([samples.parameter_rows()])
    return dict(zip(rows.names, torch.from_numpy(table), strict=True))


def load_and_look(folder, degrees, more):
    chunks, parts = built(job_of(folder, degrees, weights=NAMES, **more))
    pieces, fused = pieces_of(parts), fused_of(parts)
    load_weights(folder / "seed", pieces, fused, NAMES)
    found = sketches(weights_of(pieces), fused)
    wanted = torch.load(folder / "sketches.pt")
    assert found.keys() == wanted.keys()
    for name, row in wanted.items():
        torch.testing.assert_close(found[name], row, msg=name)
    if not degrees.get("pp"):
        tokens = torch.arange(32).view(2, 16) * 7 % 32
        positions = torch.arange(16).expand_as(tokens)
        losses = chunks[0](tokens, positions, None, labels=tokens.flip(1))
        torch.save(losses.detach(), folder / f"losses-{more.get('name', 'tiny')}.pt")


ONE_AFTER_ONE = {"pipeline_schedule": "1F1B"}
HALVES, NEIGHBOURS = (
    {"name": f"{each}", "overrides": {"transformer.rotary_interleaved": each}}
    for each in (False, True)
)


def expected(folder):
    weights = checkpoint(folder)
    model = nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})
    named = [(name.replace("/", "."), value) for name, value in trainable([model])]
    torch.save(sketches(named, {}), folder / "sketches.pt")


@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        ({}, HALVES),
        ({"tp": 2}, HALVES),
        ({"pp": 2}, ONE_AFTER_ONE),
        ({"tp": 2, "pp": 2}, ONE_AFTER_ONE),
    ],
    ids=["one_rank", "tp2", "pp2", "tp2_pp2"],
)
def test_every_layout_has_the_other_trainers_weights_under_its_names(tmp_path, degrees, more):
    expected(tmp_path)
    ranks = degrees.get("tp", 1) * degrees.get("pp", 1)
    run_on_ranks(load_and_look, ranks, tmp_path, degrees, more)


def test_models_of_both_rotary_layouts_compute_the_same(tmp_path):
    expected(tmp_path)
    for more in (HALVES, NEIGHBOURS):
        run_on_ranks(load_and_look, 1, tmp_path, {}, more)
    halves, neighbours = (torch.load(tmp_path / f"losses-{each}.pt") for each in (False, True))
    torch.testing.assert_close(halves, neighbours, rtol=1e-5, atol=1e-6)


def load_in_the_wrong_order(folder):
    names = replace(NAMES, rotary_interleaved=False)
    chunks, parts = built(job_of(folder, weights=names))
    load_weights(folder / "seed", pieces_of(parts), fused_of(parts), names)
    tokens = torch.arange(32).view(2, 16) * 7 % 32
    positions = torch.arange(16).expand_as(tokens)
    losses = chunks[0](tokens, positions, None, labels=tokens.flip(1)).detach()
    assert not torch.allclose(losses, torch.load(folder / "losses-False.pt"), atol=1e-3)


def test_rows_in_the_order_of_the_other_rotary_layout_compute_something_else(tmp_path):
    expected(tmp_path)
    run_on_ranks(load_and_look, 1, tmp_path, {}, HALVES)
    run_on_ranks(load_in_the_wrong_order, 1, tmp_path)


def refused(folder, names, more, says):
    _, parts = built(job_of(folder, weights=names, **more))
    with pytest.raises(SettingError, match=says):
        load_weights(folder / "seed", pieces_of(parts), fused_of(parts), names)


def without(name):
    return replace(NAMES, parameters={k: v for k, v in NAMES.parameters.items() if k != name})


@pytest.mark.parametrize(
    ("names", "more", "says"),
    [
        (without("final_layernorm.weight"), {}, r"lacks final_layernorm.weight of shape \(16,\)"),
        (replace(NAMES, beside=()), {}, "it has optimizer.state.norm.weight.exp_avg"),
        (
            NAMES,
            {"overrides": {"gpt.share_embeddings_and_output_weights": True}},
            "it has lm_head.weight of shape .*, which is no parameter of this model",
        ),
        (
            NAMES,
            {"overrides": {"transformer.num_query_groups": 4}},
            r"wk.weight of shape \(8, 16\), this model \(16, 16\)",
        ),
    ],
    ids=["unnamed", "left over", "tied", "heads"],
)
def test_a_mapping_that_is_not_complete_is_refused(tmp_path, names, more, says):
    checkpoint(tmp_path)
    run_on_ranks(refused, 1, tmp_path, names, more, says)


def refused_by_all(folder):
    job = job_of(folder, {"pp": 2}, weights=without("output_layer.weight"), **ONE_AFTER_ONE)
    _, parts = built(job)
    with pytest.raises(SettingError, match="it lacks output_layer"):
        load_weights(folder / "seed", pieces_of(parts), fused_of(parts), job.weights)


def test_all_stages_end_alike_if_one_lacks_a_parameter(tmp_path):
    checkpoint(tmp_path)
    run_on_ranks(refused_by_all, 2, tmp_path)


def unreadable(folder):
    _, parts = built(job_of(folder, weights=NAMES))
    with pytest.raises(SettingError, match="if a newer torch wrote it, train its control in"):
        load_weights(folder / "seed", pieces_of(parts), fused_of(parts), NAMES)


def test_a_checkpoint_that_this_torch_cannot_read_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / ".metadata").write_bytes(b"newer")
    run_on_ranks(unreadable, 1, tmp_path)


def names_of_modules(folder):
    _, parts = built(job_of(folder, weights=NAMES))
    assert module_names(parts) == {
        f"layers.{number}.mlp": f"layers.{number}.feed_forward" for number in range(4)
    }


def test_modules_that_compute_the_same_have_the_other_name(tmp_path):
    run_on_ranks(names_of_modules, 1, tmp_path)


def known_names():
    """``PARAMETERS`` and ``MODULES`` of converge, whose module needs more than ranks have."""
    path = Path(converge_harness.__file__).parent / "trainers" / "megatron" / "mapping.py"
    names = ("_LAYER", "_MATRICES", "PARAMETERS", "MODULES")
    values = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id in names:
            exec(compile(ast.Module([node], []), str(path), "exec"), values)  # noqa: S102 - ours
    return set(values["PARAMETERS"]), set(values["MODULES"])


def all_names(folder, transformer, gpt):
    overrides = {f"transformer.{key}": value for key, value in transformer.items()}
    overrides |= {f"gpt.{key}": value for key, value in gpt.items()}
    _, parts = built(job_of(folder, overrides=overrides))
    parameters, modules = known_names()
    named = {name for part in parts for name, _ in part.parameters_by_name()}
    fused = fused_of(parts)
    named = {name for name in named if name not in fused}
    named |= {each for one in fused.values() for each in one.names}
    assert {re.sub(r"layers\.\d+", "layers.*", name) for name in named} <= parameters
    recorded = {
        re.sub(r"layers\.\d+", "layers.*", name): module
        for part in parts
        for name, module in _outermost(part)
    }
    # Modules without parameters (dropout, identities) have no other name; the list of layers is
    # never called.
    named = {
        name for name, module in recorded.items() if next(module.parameters(), None) is not None
    }
    assert named - {"layers"} <= modules
    found = set(recorded)
    assert modules - found <= {f"layers.*.mlp.linear_{each}" for each in ("gate", "up")} | {
        f"layers.*.self_attention.linear_{each}" for each in "qkv"
    } | {"embedding.position_embeddings"}


@pytest.mark.parametrize(
    ("transformer", "gpt"),
    [
        ({}, {}),
        (
            {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True},
            {"position_embedding_type": "learned_absolute"},
        ),
    ],
)
def test_the_harness_knows_the_names_of_all_parameters(tmp_path, transformer, gpt):
    run_on_ranks(all_names, 1, tmp_path, transformer, gpt)


@pytest.mark.parametrize(
    ("key", "value"), [("transformer.qk_layernorm", True), ("transformer.num_moe_experts", 4)]
)
def test_norms_of_queries_and_keys_and_experts_cannot_be_mapped(tmp_path, key, value):
    overrides = {key: value}
    (problem,) = config_problems(megatron, job_of(tmp_path, weights=NAMES, overrides=overrides))
    assert problem.key == key
    assert config_problems(megatron, job_of(tmp_path, overrides=overrides)) == []


def test_a_token_attends_to_its_own_document_and_to_nothing_later():
    masked = mask_across_documents(torch.tensor([[0, 1, 0, 1, 2]]))
    attends = [[j for j in range(5) if not masked[0, 0, i, j]] for i in range(5)]
    assert attends == [[0], [0, 1], [2], [2, 3], [2, 3, 4]]
