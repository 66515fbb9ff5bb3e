"""Experiment files of many sets, for a cluster of small nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = f"""\
schema = 1
name = "many sets"
launcher = "slurm"
repeats = ["ulp"]
[cluster]
ranks_per_node = 4
device = "cpu"
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
startup_timeout_s = 3600
progress_timeout_s = 3600
[trainer.set]
"training.steps" = 100_000
"training.local_batch_size" = 4
"training.global_batch_size" = 8
[control]
name = "fsdp2"
parallelism = {{ dp_shard = 2 }}
"""
KINDS = (
    "parallelism = { dp_shard = 2, tp = 2 }",
    'parallelism = { dp_shard = 2, pp = 2 }\npipeline_schedule = "Interleaved1F1B"',
    "parallelism = { dp_shard = 2, cp = 2 }",
    'parallelism = { dp_replicate = 2 }\ntechniques = ["compile"]',
    'parallelism = { dp_shard = 2, tp = 2 }\ntechniques = ["compile", "float8"]',
    """\
kind = "fault"
parallelism = { dp_shard = 2 }
checkpoint_every = 4
restarts = "torchrun"
faults = [{ kind = "kill", step = 6, rank = 1 }]""",
    """\
kind = "elastic"
segments = [{ until = 50_000, dp_shard = 2 }, { until = 100_000, dp_shard = 1 }]""",
)
"""Kinds of test sets, used in turn."""


def write_experiment(folder: Path, tests: int, kinds: Sequence[str] = KINDS) -> Path:
    """An experiment file in which every test set has its own setting, and so its own identity."""
    tables = (
        f'[[test]]\nname = "set_{index:05}"\n{kinds[index % len(kinds)]}\n'
        f'set = {{ "lr_scheduler.min_lr_factor" = {index / (2 * tests)} }}\n'
        for index in range(tests)
    )
    file = folder / f"{tests}_sets.toml"
    file.write_text("\n".join([HEAD, *tables]))
    return file
