"""The script of experiments/recoverable, held at a step until it is interrupted, in a matrix."""

from pathlib import Path

from real_matrices import ROOT

TRAINERS = Path(__file__).parent / "trainers"
HELD = f"""[probe]
cadence = [0, 1, 2, 5, 8]
[trainer]
kind = "command"
command = [
    "{TRAINERS}/held_trainer.py", "--checkpoints", "{{checkpoint_dir}}", "--steps", "{{steps}}",
    "--every", "{{checkpoint_every}}", "--stop-at", "{{stop_at}}", "--seed", "{{seed}}",
    "--global-batch", "{{global_batch_size}}", "--micro-batch", "{{local_batch_size}}",
]
environment.HOLD = "{{config.hold}}"
environment.MISTAKE = "{{config.mistake}}"
environment.RESUME_FROM = "{{resume_from}}"
files = ["{ROOT}/experiments/recoverable/train.py", "{ROOT}/experiments/recoverable/mistakes.py"]
toolchain = "torchtitan-0.3.0"
[trainer.checkpoints]
name = "step-{{step}}.pt"
[trainer.config]
mistake = "none"
hold = "never"
training = {{ steps = 8, local_batch_size = 4, global_batch_size = 8 }}
[control]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
waive = ["control-is-repeated"]
[[test]]
name = "right"
parallelism = {{ dp_replicate = 2 }}
set = {{ hold = "6" }}
"""
"""What follows the tables of a cluster: the program, its control, and its first test set."""
