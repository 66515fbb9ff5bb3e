"""Which keys of ``[cluster]`` a scheduler's refusal is about. Pure."""

from __future__ import annotations

import re

from harness.model import Cluster

_GPUS = ("gpus_per_node", "gres")
_OF_A_NODE = ("ranks_per_node", *_GPUS, "cpus_per_rank", "memory_per_node", "constraint")
_LIMITS = ("time", "qos", "account")
_TABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"account or account/partition|InvalidAccount|AccountNotAllowed", ("account", "partition")),
    (r"\bQOS (specification|not permitted)|InvalidQOS|QOSNotAllowed", ("qos",)),
    (r"invalid (generic resource|gres)|\bTRES\b", _GPUS),
    (r"time limit|--time|PartitionTimeLimit|DeadLine", ("time",)),
    (r"feature specification", ("constraint",)),
    (r"accounting/QOS policy|(Assoc|QOS)M(ax|in)", _LIMITS),
    (r"not permitted to use this partition|partition", ("partition",)),
    (r"memory specification|MaxMemPerLimit", ("memory_per_node",)),
    (r"CPU count|more processors", ("ranks_per_node", "cpus_per_rank")),
    (r"node configuration|BadConstraints", _OF_A_NODE),
)
"""What Slurm says (its ``slurm_errno.c``, and its reasons of pending jobs), and the keys that may
be behind it; the first line that fits counts."""


def keys_behind(words: str, cluster: Cluster) -> str:
    """The keys as a person finds them, ``[cluster] partition``; empty where nothing is known.

    Keys that the cluster does not set are left out: they cannot be wrong.
    """
    for pattern, keys in _TABLE:
        if re.search(pattern, words, re.IGNORECASE):
            written = [key for key in keys if getattr(cluster, key) not in (None, False)]
            return f"[cluster] {', '.join(written)}" if written else ""
    return ""


def with_keys(words: str, cluster: Cluster) -> str:
    """A refusal, and the keys behind it: ``Invalid qos specification ([cluster] qos)``."""
    keys = keys_behind(words, cluster)
    return f"{words} ({keys})" if keys else words
