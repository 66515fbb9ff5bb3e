"""A tiny GPT of Megatron-Core on the CPU, for tests of rank code."""

import importlib.util
import warnings
from dataclasses import replace

NEEDED = "needs toolchain megatron-core-0.19.2"


def prepared_megatron():
    """Prepare Megatron-Core for the CPU; whether it is there.

    What third parties warn of while they are imported is theirs.
    """
    if importlib.util.find_spec("megatron") is None:
        return False
    from converge_harness.rank import megatron

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        megatron.preload("cpu")
    return True


SETTINGS = {
    "training": {"local_batch_size": 2, "global_batch_size": 4, "seq_len": 16, "steps": 2},
    "gpt": {"vocab_size": 32},
    "transformer": {
        "num_layers": 4,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "calculate_per_token_loss": True,
    },
    "ddp": {"grad_reduce_in_fp32": True},
    "optimizer": {"lr": 1e-2, "clip_grad": 0.1},
    "lr_scheduler": {"init_lr": 1e-3},
}


def job_of(folder, degrees=None, **more):
    """A job of that model; its corpus is named, and not there."""
    from converge_harness.run_folder.job import BaseConfig, Degrees, RankJob

    job = RankJob(
        name="tiny",
        role="test",
        identity="0" * 64,
        dialect="megatron_0_16",
        run_folder=folder,
        seed=1,
        steps=2,
        parallelism=Degrees(**(degrees or {})),
        train_config=BaseConfig("tiny.toml", settings=SETTINGS),
        data_folder=folder / "data",
    )
    return replace(job, **more)
