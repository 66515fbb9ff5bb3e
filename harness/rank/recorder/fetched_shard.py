"""Shards that are not tensors themselves: their entries are fetched from a trainer's own buffers.

Frameworks without DTensors keep parameters, gradients and optimizer states in buffers of their own,
and replace them at times. A fetched shard stands for one parameter's entries on this rank wherever
the rank code expects a tensor, like a DTensor: ``shape`` is the whole tensor's, ``grad`` the same
entries of its gradient, and ``placement.local_shard`` returns the entries, fetched anew each time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch


class FetchedShardError(Exception):
    """The fetched entries do not match the shard."""


class FetchedShard(ABC):
    """Some entries of a whole tensor, and how to fetch them."""

    def __init__(
        self,
        whole: Iterable[int],
        value: Callable[[], torch.Tensor],
        gradient: Callable[[], torch.Tensor | None] = lambda: None,
        states: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Set how the entries are fetched.

        Args:
            whole: shape of the whole tensor.
            value: returns a plain tensor with the entries held.
            gradient: returns the same entries of the gradient; None while there is none.
            states: returns the optimizer states of these entries by name (``exp_avg``, ``step``):
            plain tensors with as many entries, and numbers.

        These functions must not call collectives or change anything.
        """
        self.shape = torch.Size(whole)
        self._value = value
        self._gradient = gradient
        self._states = states

    def numel(self) -> int:
        """Entries of the whole tensor."""
        return math.prod(self.shape)

    @property
    @abstractmethod
    def entries(self) -> int:
        """Entries held."""

    @property
    @abstractmethod
    def place(self) -> tuple[tuple[str, int], ...]:
        """Equal exactly on the ranks that hold the same entries; empty for the whole tensor."""

    @property
    def is_whole(self) -> bool:
        return self.entries == self.numel()

    @abstractmethod
    def local(self) -> torch.Tensor:
        """The entries, sharing their memory, without autograd.

        Raises FetchedShardError when there are fewer or more.
        """

    @abstractmethod
    def _alike(self, value: torch.Tensor) -> Self:
        """The same entries of another tensor of the whole's shape."""

    @property
    def grad(self) -> Self | None:
        """The same entries of the gradient."""
        gradient = self._gradient()
        return None if gradient is None else self._alike(gradient)

    def kept(self) -> dict[str, Any]:
        """The optimizer states: tensors with as many entries as shards, others unchanged."""
        return {
            name: self._alike(value)
            if isinstance(value, torch.Tensor) and value.numel() == self.entries and value.ndim > 0
            else value
            for name, value in self._states().items()
        }


class FetchedStates:
    """The optimizer states of fetched shards, for code that expects an optimizer."""

    def __init__(self, shards: Iterable[FetchedShard]) -> None:
        self._shards = tuple(shards)

    @property
    def state(self) -> dict[FetchedShard, dict[str, Any]]:
        """The current states."""
        return {shard: shard.kept() for shard in self._shards}
