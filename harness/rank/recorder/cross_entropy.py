"""Recomputes the loss from the logits and labels that the trainer's loss function got.

Exponentials are computed in float32 (for float64 logits in float64); sums of exponentials, their
logarithm, and the sum over tokens in float64. On 1024 tokens of 512 logits with a standard
deviation of 3, a token's loss is off by at most 2e-8 nats and the mean by a relative 3e-11, far
less than the error of the trainer's own float32 loss, in half the time of float64 exponentials.

A CUDA graph calls the loss function once, while it is captured, and repeats its operations at every
replay, ours among them. So what is kept of the captured call is read again after each replay
(``capture``, ``replayed``). In between, a mark is put there that no replay leaves.

With tensor parallelism the logits are vocabulary shards. Each rank then keeps two numbers per
token, the log-sum-exp of its shard and the target's logit if its shard has it, and all of a
step's tokens are combined in one gather at the end: no collective happens in the middle of a
pipeline schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from converge_harness.rank.recorder.fetched_shard import FetchedShard
from converge_harness.run_folder.metrics import Unmeasured

IGNORE_INDEX = -100
"""The label of positions without a target, in torchtitan and in this project's loader."""

_BLOCK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Logits processed at a time, in float32 and for their sum in float64: 768 KiB on a CPU, where a
block should fit in the cache, 192 MiB on a GPU, where launches should be few."""


_STALE = -1.0
"""Put in the place of sums of exponentials, which are never negative, once they have been read."""


class _Tokens(NamedTuple):
    """The stored values of one call's tokens; on the device, since a transfer would block."""

    label: torch.Tensor
    """Shape (tokens,), integer."""
    target: torch.Tensor
    """The label's logit: shape (tokens,), dtype of the logits; -inf outside the columns."""
    largest: torch.Tensor
    """The largest logit, clamped to finite numbers: shape (tokens, 1), dtype of the logits."""
    exps: torch.Tensor
    """Sum over the columns of exp(logit - largest): shape (tokens,), float64."""


class _Call(NamedTuple):
    """One call of the loss function."""

    tokens: _Tokens
    group: dist.ProcessGroup | None
    """The ranks that share the vocabulary; None where each has all of it."""


@dataclass(slots=True)
class CrossEntropySum:
    """Summed cross entropy of one step's tokens on one rank."""

    vocab_size: int
    tp_group: dist.ProcessGroup | None = None
    problems: list[Unmeasured] = field(default_factory=list)
    """Why the last sum is NaN, if the logits are not the reason."""
    _whole: list[_Tokens] = field(default_factory=list)
    _shards: list[_Tokens] = field(default_factory=list)
    _shard_group: dist.ProcessGroup | None = None
    _captured: list[_Call] = field(default_factory=list)
    """Calls of the graph that replays; a replay writes to the same memory."""

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the tokens of one call of the loss function.

        logits has shape (..., vocabulary or a shard of it), labels the leading shape with global
        token ids; either may be a DTensor. Labels equal to IGNORE_INDEX do not count.
        """
        self._keep(self._call(logits, labels))

    def capture(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """The same of a call that a CUDA graph captures: each replay counts it anew."""
        self._captured.append(self._call(logits, labels))

    def forget_captured(self) -> None:
        """Another graph is about to be captured."""
        self._captured.clear()

    @torch.no_grad()
    def replayed(self) -> None:
        """Count what the captured calls saw in the latest replay of their graph."""
        for call in self._captured:
            now = _Tokens(*(each.clone() for each in call.tokens))
            self._keep(_Call(now, call.group))
            call.tokens.exps.fill_(_STALE)

    @torch.no_grad()
    def _call(self, logits: torch.Tensor, labels: torch.Tensor) -> _Call:
        group = self._vocabulary_group(logits)
        scores = local_part(logits).detach().flatten(0, -2)
        label = local_part(labels).detach().flatten()
        if group is None:
            return _Call(_tokens(scores, label, 0), None)
        # DTensor and torchtitan both cut the vocabulary like torch.chunk: all shards but the last
        # are ceil(vocabulary / ranks) wide.
        width = -(-self.vocab_size // dist.get_world_size(group))
        return _Call(_tokens(scores, label, width * dist.get_rank(group)), group)

    def _keep(self, call: _Call) -> None:
        if call.group is None:
            self._whole.append(call.tokens)
        else:
            self._shard_group = call.group
            self._shards.append(call.tokens)

    @torch.no_grad()
    def take(self) -> float:
        """The step's sum in nats; starts the next step. Collective over the vocabulary's ranks.

        NaN, with a sentence in ``problems``, if ranks with shards of the same logits had different
        labels.
        """
        total = 0.0
        self.problems.clear()
        calls = [*self._whole, *self._shards] if self._captured else []
        if any(bool((tokens.exps < 0).any()) for tokens in calls):
            self.problems.append(
                Unmeasured(
                    "the loss cannot be recomputed: a CUDA graph was replayed and left nothing "
                    "where its loss function was captured"
                )
            )
            total = math.nan
        if self._whole:
            label, lse, target = _lse_and_target(self._whole)
            kept = label != IGNORE_INDEX
            total += float((lse - target)[kept].sum())
            self._whole.clear()
        if self._shards:
            mine = torch.stack(_lse_and_target(self._shards), dim=1)
            of_shards = _combine(mine, self._shard_group)
            if of_shards is None:
                self.problems.append(
                    Unmeasured(
                        "the loss cannot be recomputed: ranks that share a vocabulary had "
                        "different labels"
                    )
                )
            total += math.nan if of_shards is None else of_shards
            self._shards.clear()
        return total

    def _vocabulary_group(self, logits: torch.Tensor) -> dist.ProcessGroup | None:
        """The ranks that share these logits' vocabulary; None if each has all of it."""
        if isinstance(logits, DTensor):
            for dim, placement in enumerate(logits.placements):
                if isinstance(placement, Shard) and placement.dim == logits.ndim - 1:
                    if logits.device_mesh.size(dim) == 1:
                        return None
                    return logits.device_mesh.get_group(dim)
            return None
        if logits.shape[-1] < self.vocab_size:
            return self.tp_group
        return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor or fetched shard; a plain tensor unchanged."""
    if isinstance(tensor, FetchedShard):
        return tensor.local()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _tokens(scores: torch.Tensor, label: torch.Tensor, first: int) -> _Tokens:
    """Count tokens whose logits, from vocabulary entry ``first`` on, have shape (tokens, columns).

    It uses few operations, because on a CPU each costs as much as the exponentials of some tokens.
    """
    width = scores.shape[-1]
    wanted = label - first if first else label
    column = wanted.clamp(0, width - 1)
    target = scores.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    target.masked_fill_(column != wanted, -torch.inf)
    # The largest logit is subtracted before exp to avoid overflow, unless it is infinite: infinity
    # minus infinity is NaN.
    bounds = torch.finfo(scores.dtype)
    largest = scores.amax(dim=-1, keepdim=True).clamp_(bounds.min, bounds.max)
    exps = torch.empty(len(scores), dtype=torch.float64, device=scores.device)
    rows = max(1, _BLOCK_ELEMENTS.get(scores.device.type, _BLOCK_ELEMENTS["cuda"]) // width)
    for start in range(0, len(scores), rows):
        block = slice(start, start + rows)
        wide = scores[block]
        if wide.dtype.itemsize < torch.float32.itemsize:
            wide = wide.float()
        torch.sum((wide - largest[block]).exp_(), -1, dtype=torch.float64, out=exps[block])
    return _Tokens(label.clone(), target, largest, exps)


def _lse_and_target(calls: Sequence[_Tokens]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three float64 per token: its label, log-sum-exp over columns, the target's logit."""
    label, target, largest, exps = (torch.cat(parts) for parts in zip(*calls, strict=True))
    lse = exps.log_().add_(largest.squeeze(-1))
    return label.to(torch.float64), lse, target.to(torch.float64)


def _combine(mine: torch.Tensor, group: dist.ProcessGroup | None) -> float | None:
    """Sum over tokens of log-sum-exp minus target logit, from every rank's shard.

    Ignored tokens are gathered too: ranks that got different batches by a bug ignore different
    numbers of them, and a gather of different sizes aborts. None if the ranks' labels differ.
    """
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine.contiguous(), group=group)
    shards = torch.stack(everyone)
    label = shards[0, :, 0]
    if not bool((shards[:, :, 0] == label).all()):
        return None
    lse = torch.logsumexp(shards[:, :, 1], dim=0)
    target = shards[:, :, 2].amax(dim=0)
    return float((lse - target)[label != IGNORE_INDEX].sum())
