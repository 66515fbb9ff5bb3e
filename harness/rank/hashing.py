"""A counter-based 64-bit hash of integers, on any device."""

from __future__ import annotations

import torch

_INCREMENT = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mixed(counter: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64 of an int64 tensor: the value of each counter in the sequence of a 64-bit key.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). The 64 bits
    come as signed numbers, for int64 arithmetic wraps as unsigned arithmetic does.
    """
    bits = counter * _signed(_INCREMENT)
    bits += _signed(key)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    bits ^= _shifted(bits, 31)
    return bits


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right: int64 tensors only have the arithmetic one."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed number that int64 tensors hold."""
    return value - (1 << 64) if value >= 1 << 63 else value
