"""Options of released Megatron-Core that its GPTModel has no argument for, for megatron_bugs.toml.

Each function gets the trainer (``converge_harness.rank.megatron.trainer.MegatronTrainer``) of a
rank, before training. Controls and test sets call them alike: nothing of Megatron-Core is replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import tensor_parallel


def smooth_labels(_trainer: Any) -> None:
    """Take the cross entropy with ``label_smoothing = 0.1``."""
    tensor_parallel.vocab_parallel_cross_entropy = partial(
        tensor_parallel.vocab_parallel_cross_entropy, label_smoothing=0.1
    )
