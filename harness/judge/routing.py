"""Mixtures of experts: there rounding acts through a step function.

A token whose two best experts are near a tie goes to one or the other by the last bit of a score,
and a router's bias moves by the sign of a count. Most right runs route alike; one that does not is
off by a jump, in the router's gradient by a tenth and more, which the few repeats that happened to
be made need not have met.
"""

from __future__ import annotations

import re

from harness.model import Evidence

FIRST_JUMP = 3.0
"""Times what the repeats (or the floor) allow a tensor of a model that routes tokens at step 1,
from the same weights and biases, …"""
JUMP = 8.0
"""… and at later steps, when biases have moved by signs. Right runs (EP, TP, PP, CP, bf16 of
``benchmarks/bugs/correct_moe.toml``) reach up to 2.2 and 5.3 times what 11 repeats allow."""

_ROUTED = re.compile(r"\brouter\b|(?:\b|_)experts?\b")


def routed(test: Evidence, control: Evidence) -> bool:
    """Whether a model has experts, as far as the names of its sampled tensors tell."""
    samples = (*control.samples[:1], *test.samples[:1])
    return any(_ROUTED.search(name) for sample in samples for name in sample.names)
