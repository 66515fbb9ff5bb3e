"""A counter-based 64-bit hash of integers, on any device."""

from __future__ import annotations

import torch

from harness.rank.bits import _GOLDEN, _signed, mix_


def mixed(counter: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64 of an int64 tensor: the value of each counter in the sequence of a 64-bit key.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). The 64 bits
    come as signed numbers, for int64 arithmetic wraps as unsigned arithmetic does.
    """
    return mix_((counter * _GOLDEN).add_(_signed(key)))
