"""Which key of an experiment an error speaks of that torchtitan raises while it builds a job."""

from __future__ import annotations

import re

_SPEAKS_OF = (
    # A stage without layers, in torchtitan 0.3.0: as 4 layers over 4 stages with CP.
    (r"list index out of range.*apply_cp_to_forward", "parallelism.pp"),
    (r"n_(kv_)?heads|num_(kv_)?heads|attention heads", "parallelism.tp"),
    (r"seq(uence)?[ _]len", "training.seq_len"),
    (r"global.batch.size", "training.global_batch_size"),
    (r"micro-?batch|local.batch.size|\bbatch size", "training.local_batch_size"),
    (r"stages?\b|layers_per_stage|pipeline", "parallelism.pp"),
    (r"context.parallel|\bCP\b|load balancer", "parallelism.cp"),
    (r"expert", "parallelism.ep"),
    (r"float8", "techniques"),
    (r"tensor.parallel|\bTP\b|\btp\b", "parallelism.tp"),
    (r"parallel dims|WORLD_SIZE", "parallelism"),
)


def key_of(message: str) -> str:
    """The dotted key that a message is about; empty when it names none that we know."""
    for pattern, key in _SPEAKS_OF:
        if re.search(pattern, message, re.IGNORECASE if pattern.islower() else 0):
            return key
    return ""
