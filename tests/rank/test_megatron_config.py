"""A job as Megatron-Core's dataclasses, and what of it is refused."""

import pytest
from megatron_models import NEEDED, job_of, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import subprocess
import sys
from importlib import metadata

import megatron.core as megatron_core
import torch

from converge_harness.rank import megatron
from converge_harness.rank.megatron.config import build_config
from converge_harness.rank.megatron.model import device_and_backend
from converge_harness.rank.megatron.view import _version
from converge_harness.rank.settings import SettingError
from converge_harness.rank.start.entry import config_problems
from converge_harness.run_folder.layout import GPU_OF_RANK

# What Megatron-Core and torch warn of while it builds models and optimizers is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def with_experts(**transformer):
    settings = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, **transformer}
    return {"overrides": {f"transformer.{key}": value for key, value in settings.items()}}


EXPERTS = with_experts()


def problem_of(folder, degrees=None, **more):
    (problem,) = config_problems(megatron, job_of(folder, degrees, **more))
    return problem


def test_degrees_and_settings_reach_megatrons_own_classes(tmp_path):
    degrees = {"tp": 2, "pp": 2, "dp_shard": 2}
    overrides = {"transformer.sequence_parallel": True, "training.local_batch_size": 1}
    job = job_of(tmp_path, degrees, overrides=overrides, pipeline_schedule="1F1B")
    config = build_config(job)
    transformer = config.tables.transformer
    assert (transformer.tensor_model_parallel_size, transformer.pipeline_model_parallel_size) == (
        2,
        2,
    )
    assert transformer.sequence_parallel
    assert config.tables.ddp.use_distributed_optimizer
    assert config.tables.optimizer.use_distributed_optimizer
    assert config.microbatches == 2
    assert transformer.num_query_groups == 2
    assert transformer.activation_func is torch.nn.functional.silu
    assert config.flat["transformer.activation_func"] == "silu"
    assert set(overrides) <= set(config.declared)


def test_the_seed_checkpoint_is_of_one_rank_whatever_its_users_are(tmp_path):
    job = job_of(tmp_path, role="seed checkpoint", techniques=("bf16",))
    config = build_config(job)
    assert config.dtype is torch.float32
    assert config.tables.transformer.tensor_model_parallel_size == 1


def test_bf16_is_named_by_the_technique_or_by_the_data_type(tmp_path):
    named = build_config(job_of(tmp_path, techniques=("bf16",)))
    types = {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
    written = build_config(job_of(tmp_path, overrides=types))
    assert named.dtype is written.dtype is torch.bfloat16
    assert named.tables.optimizer.bf16
    assert written.tables.optimizer.bf16
    mixed = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
    with pytest.raises(SettingError, match="Megatron-Core computes in their type"):
        build_config(job_of(tmp_path, overrides=mixed))


def test_the_version_is_that_of_the_megatron_that_is_imported(monkeypatch, tmp_path):
    assert _version() == metadata.version("megatron-core")
    checkout = tmp_path / "megatron" / "core" / "__init__.py"  # first on the path
    monkeypatch.setattr(megatron_core, "__file__", str(checkout))
    monkeypatch.setattr(megatron_core, "__version__", "0.20.0+of.a.checkout")
    assert _version() == "0.20.0+of.a.checkout"


def test_keys_of_what_is_refused_are_no_evidence_unless_a_job_sets_them(tmp_path):
    """Between releases their defaults differ (``cuda_graph_scope``, ``muon_tp_mode``)."""
    key = "transformer.cuda_graph_impl"
    silent, said = (
        build_config(job_of(tmp_path)),
        build_config(job_of(tmp_path, overrides={key: "none"})),
    )
    assert not any(
        each.startswith(("transformer.cuda_graph_", "optimizer.muon_")) for each in silent.flat
    )
    assert (said.flat[key], said.declared[-1]) == ("none", key)
    assert silent.flat.keys() | {key} == said.flat.keys()


def test_a_key_that_no_class_has_is_refused_with_the_nearest(tmp_path):
    found = problem_of(tmp_path, overrides={"transformer.sequence_paralel": True})
    assert (found.key, found.valid[0]) == (
        "transformer.sequence_paralel",
        "transformer.sequence_parallel",
    )
    found = problem_of(tmp_path, overrides={"transformer.hidden_size": "big"})
    assert "takes int, not 'big'" in found.message
    found = problem_of(tmp_path, overrides={"transformer.activation_func": "swish"})
    assert "'silu'" in found.valid


@pytest.mark.parametrize(
    ("degrees", "more", "key", "says"),
    [
        ({"tp": 3}, {}, "gpt.vocab_size", "32 is not a multiple of tp 3"),
        ({"pp": 3}, {"pipeline_schedule": "1F1B"}, "transformer.num_layers", "pp x chunks 3"),
        ({"pp": 2}, {"pipeline_schedule": "GPipe"}, "pipeline_schedule", "no schedule 'GPipe'"),
        (
            {"pp": 2},
            {
                "pipeline_schedule": "Interleaved1F1B",
                "overrides": {"training.global_batch_size": 6},
            },
            "training.local_batch_size",
            "3 microbatches are not a multiple of pp 2",
        ),
        ({}, {"overrides": {"transformer.num_layers": 0}}, "transformer.num_layers", "at least 1"),
        ({}, {"overrides": {"transformer.hidden_dropout": 0.1}}, "transformer.hidden_dropout", "0"),
        (
            {},
            {"overrides": {"transformer.masked_softmax_fusion": True}},
            "transformer.masked_softmax_fusion",
            "is not supported",
        ),
        (
            {},
            {"overrides": {"transformer.activation_func": 3}},
            "transformer.activation_func",
            "no function 3",
        ),
        (
            {},
            {"overrides": {"transformer.init_method": "x"}},
            "transformer.init_method",
            "is a function",
        ),
        (
            {},
            {"overrides": {"training.mixed_precision_param": "int8"}},
            "training.mixed_precision_param",
            "'int8' is not trained",
        ),
        ({}, {"overrides": {"training.dtype": ["float32"]}}, "training.dtype", "is not trained"),
        ({}, {"overrides": {"optimizer.optimizer": "sgd"}}, "optimizer.optimizer", "not tested"),
        ({}, {"overrides": {"transformer.sequence_parallel": True}}, "", "refuses the config"),
        ({"dp_replicate": 2, "ep": 2}, {}, "parallelism.ep", "2 needs a model with experts: set"),
        ({"dp_replicate": 3, "ep": 3}, EXPERTS, "transformer.num_moe_experts", "multiple of ep 3"),
        ({"ep": 2}, EXPERTS, "parallelism.ep", "does not divide the 1 ranks"),
        ({"tp": 2}, EXPERTS, "transformer.sequence_parallel", "needed by experts under tensor"),
        ({}, with_experts(moe_grouped_gemm=True), "transformer.moe_grouped_gemm", "not supp"),
        (
            {},
            with_experts(moe_token_dispatcher_type="flex"),
            "transformer.moe_token_dispatcher_type",
            "'flex' needs DeepEP, which no toolchain has",
        ),
        (
            {},
            with_experts(moe_router_load_balancing_type="sinkhorn"),
            "transformer.moe_router_load_balancing_type",
            "'sinkhorn' is not tested",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_its_key(tmp_path, degrees, more, key, says):
    if degrees == {"tp": 3}:
        more = {"overrides": {"transformer.num_attention_heads": 6, **more}}
        more["overrides"] |= {"transformer.num_query_groups": 3}
    found = problem_of(tmp_path, degrees, **more)
    assert found.key == key
    assert says in found.message


def test_a_job_computes_on_the_device_of_its_rank(tmp_path, monkeypatch):
    monkeypatch.delenv(GPU_OF_RANK, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    on_gpu, on_cpu = job_of(tmp_path, device="cuda"), job_of(tmp_path)
    assert device_and_backend(on_gpu) == (torch.device("cuda", 3), "nccl")
    assert device_and_backend(on_cpu) == (torch.device("cpu"), "gloo")
    monkeypatch.setenv(GPU_OF_RANK, "0,0,1,1")  # four ranks share two GPUs, and each sees one
    assert device_and_backend(on_gpu) == (torch.device("cuda", 0), "nccl")


def test_on_a_gpu_nothing_stands_in(tmp_path):
    """In a process of its own: this one is prepared for the CPU."""
    program = (
        "import sys, torch\n"
        "ours = lambda: (torch.cuda.current_device, torch.Tensor.cuda, torch.ones)\n"
        "before = ours()\n"
        "from converge_harness.rank import megatron\n"
        "megatron.preload({device!r})\n"
        "from megatron.core.transformer.torch_norm import WrappedTorchNorm\n"
        "print('converge_harness.rank.megatron.cpu' in sys.modules, before == ours(),\n"
        "      WrappedTorchNorm.__new__.__module__.startswith('megatron.core'))"
    )

    def found(device):
        command = [sys.executable, "-W", "ignore", "-c", program.format(device=device)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    assert found("cuda") == "False True True"
    assert found("cpu") == "True False False"


@pytest.mark.parametrize(
    ("key", "takes"),
    [
        ("transformer.bias_dropout_fusion", True),
        ("ddp.average_in_collective", True),
        ("transformer.moe_shared_expert_overlap", False),
        ("transformer.masked_softmax_fusion", False),
        ("optimizer.optimizer_cpu_offload", False),
    ],
)
def test_what_only_a_cpu_lacks_is_refused_there_alone(tmp_path, key, takes):
    # Without per-token losses collectives may average.
    overrides = {"transformer.calculate_per_token_loss": False, key: True}
    on_cpu = "needs a GPU" if takes else "is not supported"
    assert on_cpu in problem_of(tmp_path, overrides=overrides).message
    on_gpu = job_of(tmp_path, overrides=overrides, device="cuda")
    if takes:
        assert build_config(on_gpu).flat[key] is True
        return
    with pytest.raises(SettingError, match="is not supported by converge's rank code") as refused:
        build_config(on_gpu)
    assert refused.value.problem.key == key


def test_sequence_parallelism_on_a_gpu_needs_norms_of_apex(tmp_path, monkeypatch):
    overrides = {"transformer.sequence_parallel": True}
    build_config(job_of(tmp_path, {"tp": 2}, overrides=overrides))
    found = problem_of(tmp_path, {"tp": 2}, overrides=overrides, device="cuda")
    assert (found.key, "LayerNorm of Apex" in found.message) == (
        "transformer.sequence_parallel",
        True,
    )
    monkeypatch.setitem(sys.modules, "apex", torch)  # anything that can be found
    layer_norm = {**overrides, "transformer.normalization": "LayerNorm"}
    build_config(job_of(tmp_path, {"tp": 2}, overrides=layer_norm, device="cuda"))
    found = problem_of(tmp_path, {"tp": 2}, overrides=overrides, device="cuda")
    assert found.key == "transformer.sequence_parallel"  # Apex's LayerNorm is no RMSNorm
