"""Megatron-Core's part of an experiment file: what is refused before any toolchain is asked."""

import pytest

from converge_harness.errors import ConfigError, ToolchainError
from converge_harness.experiment import load_experiment
from converge_harness.model import Surroundings, Toolchain
from converge_harness.plan.identity import seed_identity
from converge_harness.trainers import assume_toolchain, find_toolchain
from converge_harness.trainers.megatron.trainer import MEGATRON

CONFIG = """
[converge.data]
[training]
local_batch_size = 4
global_batch_size = 8
seq_len = 16
steps = 4
[transformer]
num_layers = 4
"""
EXPERIMENT = """schema = 1
[trainer]
kind = "megatron"
train_config = "tiny.toml"
[control]
name = "dp2"
parallelism = { dp_replicate = 2 }
[[test]]
name = "changed"
"""


def load(folder, test, config=CONFIG, head=EXPERIMENT):
    (folder / "tiny.toml").write_text(config)
    (folder / "x.toml").write_text(head + test)
    return load_experiment(folder / "x.toml")


def problems(folder, test, config=CONFIG, head=EXPERIMENT):
    with pytest.raises(ConfigError) as caught:
        load(folder, test, config, head)
    return str(caught.value)


def install(root, name, **versions):
    """A toolchain as pip leaves it."""
    python = root / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o755)
    for distribution, version in versions.items():
        folder = (
            root / name / "lib/python3.11/site-packages" / f"{distribution}-{version}.dist-info"
        )
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )


def test_a_set_has_its_degrees_settings_and_techniques(tmp_path):
    experiment = load(
        tmp_path,
        'parallelism = { tp = 2 }\ntechniques = ["bf16"]\n'
        "set = { transformer.sequence_parallel = true }",
    )
    (test,) = experiment.tests
    assert test.toolchain == "megatron-core-0.19.2"
    assert test.overrides == {"transformer.sequence_parallel": True}
    assert test.train_config.own_loader


@pytest.mark.parametrize("fsdp", ["", "set = { ddp.use_megatron_fsdp = true }"])
def test_optimizers_that_shard_have_several_instances(tmp_path, fsdp):
    (test,) = load(tmp_path, f"parallelism = {{ dp_replicate = 2, dp_shard = 2 }}\n{fsdp}").tests
    assert (test.parallelism.dp_replicate, test.parallelism.dp_shard) == (2, 2)


@pytest.mark.parametrize(
    ("test", "says"),
    [
        (
            "parallelism = { dp_shard = 2 }\nset = { ddp.num_distributed_optimizer_instances = 2 }",
            "parallelism.dp_replicate beside dp_shard",
        ),
        ("parallelism = { cp = 2 }", "context parallelism needs Transformer Engine"),
        ('parallelism = { tp = 2 }\ntechniques = ["float8"]', "has no technique 'float8'"),
        (
            'parallelism = { tp = 2 }\nset = { transformer.fp8 = "hybrid" }',
            "set.transformer.fp8 of 'changed': needs Transformer Engine",
        ),
        (
            "parallelism = { tp = 2 }\nset = { transformer.fp16 = true }",
            "set.transformer.fp16 of 'changed': is not supported by converge's rank code",
        ),
        ('parallelism = { tp = 2 }\ntechniques = ["fp16"]', "'fp16'"),
        (
            "parallelism = { tp = 2 }\nset = { transformer.transformer_impl = 'x' }",
            "set.transformer.transformer_impl of 'changed': needs Transformer Engine",
        ),
        (
            "parallelism = { tp = 2 }\nset = { transformer.moe_router_fusion = true }",
            "set.transformer.moe_router_fusion of 'changed': needs Transformer Engine",
        ),
        (
            "parallelism = { tp = 2 }\nset = { transformer.moe_input_jitter_eps = 0.1 }",
            "draws random numbers, which differ in every layout",
        ),
        (
            "parallelism = { tp = 2 }\nset = { transformer.moe_z_loss_coeff = 0.001 }",
            "set.transformer.moe_z_loss_coeff of 'changed': is not supported by converge's rank",
        ),
        (
            "parallelism = { tp = 2 }\nset = { ddp.use_distributed_optimizer = true }",
            "parallelism.dp_shard",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(tmp_path, test, says):
    assert says in problems(tmp_path, test)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (CONFIG.replace("[converge.data]", ""), "converge.data: is missing"),
        (CONFIG + "tensor_model_parallel_size = 2", "say it there: parallelism.tp"),
        (CONFIG + "multi_latent_attention = true", "is another model than the GPT"),
    ],
)
def test_a_train_config_is_refused_with_the_key(tmp_path, config, says):
    assert says in problems(tmp_path, "parallelism = { tp = 2 }", config)


def test_repeats_that_its_rank_code_cannot_make_are_refused(tmp_path):
    head = EXPERIMENT.replace("schema = 1\n", 'schema = 1\nrepeats = ["permute", "rounding"]\n')
    found = problems(tmp_path, "parallelism = { tp = 2 }", head=head)
    assert "'rounding' is not possible: this megatron trainer cannot round results" in found
    assert "permute" not in found
    balanced = (
        "set = { transformer.num_moe_experts = 4, transformer.moe_aux_loss_coeff = 0.1 }\n[[test]]"
    )
    found = problems(
        tmp_path,
        "parallelism = { tp = 2 }",
        head=head.replace(', "rounding"', "").replace("[[test]]", balanced),
    )
    assert "'permute' is not possible for 'dp2': its auxiliary loss is per microbatch" in found


def test_what_is_switched_off_is_not_refused(tmp_path):
    off = 'ddp.use_custom_fsdp = false, transformer.cuda_graph_impl = "none"'
    load(tmp_path, f"parallelism = {{ tp = 2 }}\nset = {{ {off} }}")


@pytest.mark.parametrize(
    ("setting", "off"),
    [
        ("transformer.moe_router_force_biased = 0.0", None),
        ("transformer.mlp_chunks_for_training = 2", "transformer.mlp_chunks_for_training = 1"),
        ("transformer.gtp_weight_remat_size = 2", "transformer.gtp_weight_remat_size = 1"),
        ("transformer.use_mup = true", "transformer.use_mup = false"),
        (
            'ddp.outer_dp_sharding_strategy = "optim"',
            'ddp.outer_dp_sharding_strategy = "no_shard"',
        ),
        ("ddp.preserve_fp32_weights = false", "ddp.preserve_fp32_weights = true"),
        ("ddp.megatron_fsdp_version = 2", "ddp.megatron_fsdp_version = 1"),
        ("optimizer.grad_norm_skip_threshold = 10.0", None),
        ('ddp.param_name_patterns_for_fp32_local_accumulation = ["router"]', None),
    ],
)
def test_what_newer_releases_brought_is_refused_unless_it_is_off(tmp_path, setting, off):
    key = setting.partition(" ")[0]
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, f"parallelism = {{ tp = 2 }}\nset = {{ {setting} }}")
    if off:
        load(tmp_path, f"parallelism = {{ tp = 2 }}\nset = {{ {off} }}")


def test_only_what_makes_the_model_makes_other_initial_weights(tmp_path):
    surroundings = Surroundings(hardware="cpu", rank_code="r", data={}, injected={}, sources={})
    toolchain = Toolchain("megatron-core-0.16.1", tmp_path / "python", "megatron_0_16", {})

    def seed(settings):
        experiment = load(tmp_path, f"parallelism = {{ tp = 2 }}\nset = {{ {settings} }}")
        return seed_identity(experiment.tests[0], toolchain, 1, surroundings)

    same = seed("training.local_batch_size = 2")
    assert seed("transformer.sequence_parallel = true") == same
    assert seed("gpt.parallel_output = false") == same
    assert seed('transformer.softmax_type = "learnable"') != same
    assert seed("gpt.share_embeddings_and_output_weights = true") != same
    assert seed("transformer.embedding_init_method_std = 1.0") != same
    assert seed("transformer.num_moe_experts = 4") != same
    assert seed('transformer.moe_token_dispatcher_type = "alltoall"') == same


def test_a_toolchain_without_a_fitting_megatron_is_refused(tmp_path):
    install(tmp_path, "none", torch="2.13.0")
    install(tmp_path, "old", torch="2.13.0", megatron_core="0.12.0")
    install(tmp_path, "good", torch="2.13.0", megatron_core="0.16.1")
    with pytest.raises(ToolchainError, match="has no megatron-core"):
        find_toolchain("none", tmp_path, MEGATRON)
    install(tmp_path, "newer", torch="2.13.0", megatron_core="0.21.0")
    install(tmp_path, "main", torch="2.13.0", megatron_core="0.20.0+d98e8a64d")
    for name in ("old", "newer"):
        with pytest.raises(
            ToolchainError, match=r"megatron-core 0.\d+.0; .* for 0.16 to 0.19 and main"
        ):
            find_toolchain(name, tmp_path, MEGATRON)
    for name in ("good", "main"):
        assert find_toolchain(name, tmp_path, MEGATRON).dialect == "megatron_0_16"
    assert assume_toolchain("megatron-core-0.16.1", tmp_path, MEGATRON).versions == {}
