"""Experiment files of ``test_resumed_runs.py``: those of ``experiments/`` cut down."""

from real_matrices import INJECTIONS

RESUMED = """
schema = 1
repeats = ["rerun", "ulp", "ulp.2"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 6
"training.local_batch_size" = 4
"training.global_batch_size" = 8
[probe]
cadence = [1, 2, 3, 5, 6]
[control]
name = "fsdp2"
parallelism.dp_shard = 2

[[test]]
kind = "elastic"
name = "resized"
segments = [
  { until = 2, dp_shard = 2 },
  { until = 4, dp_shard = 1 },
  { until = 6, dp_shard = 2, tp = 2 },
]
[[test]]
kind = "elastic"
name = "without_optimizer"
segments = [{ until = 2, dp_shard = 2 }, { until = 6, dp_shard = 1 }]
set = { "checkpoint.exclude_from_loading" = ["optimizer"] }
[[test]]
kind = "elastic"
name = "without_schedule"
segments = [{ until = 2, dp_shard = 2 }, { until = 6, dp_shard = 1 }]
set = { "checkpoint.exclude_from_loading" = ["lr_scheduler"], "checkpoint.async_mode" = "async" }

[[test]]
kind = "fault"
name = "killed"
parallelism.dp_shard = 2
checkpoint_every = 2
restarts = "torchrun"
recover_within_s = 240
faults = [{ kind = "kill", step = 6, rank = 1 }]
set = { "checkpoint.async_mode" = "async" }
[[test]]
kind = "fault"
name = "torn"
parallelism.dp_shard = 2
checkpoint_every = 2
recover_within_s = 240
faults = [{ kind = "ckpt_torn", step = 4, torn = "truncated" }]
[[test]]
kind = "fault"
name = "too_late"
parallelism.dp_shard = 2
checkpoint_every = 2
recover_within_s = 1
faults = [{ kind = "preempt", step = 3 }]

[[test]]
kind = "space_time"
name = "st"
product = 2
"""
RESUMED += f"""
[[test]]
kind = "fault"
name = "writes_later_weights"
inject = "{INJECTIONS}:writes_later_weights"
parallelism.dp_shard = 2
checkpoint_every = 2
restarts = "torchrun"
recover_within_s = 240
faults = [{{ kind = "kill", step = 5, rank = 1 }}]
set = {{ "checkpoint.async_mode" = "async" }}
"""

STOCK = """
schema = 1
repeats = ["rerun", "ulp"]
[trainer]
train_config = "train_configs/llama3_debug_stock.toml"
[trainer.set]
"training.steps" = 4
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
kind = "elastic"
name = "same_degree"
segments = [{ until = 2, dp_shard = 2 }, { until = 4, dp_replicate = 2 }]
[[test]]
kind = "elastic"
name = "data_started_over"
waive = ["same-dp-degree"]
segments = [{ until = 2, dp_shard = 2 }, { until = 4, dp_shard = 1 }]
set = { "checkpoint.exclude_from_loading" = ["dataloader"] }
[[test]]
kind = "elastic"
name = "other_degree"
waive = ["same-dp-degree"]
segments = [{ until = 2, dp_shard = 2 }, { until = 4, dp_shard = 1 }]
"""
