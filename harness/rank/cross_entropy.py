"""The loss again, in float64, from the logits and labels that the trainer's loss saw.

With tensor parallelism the logits are vocabulary shards. Each rank then keeps two numbers per
token, the log-sum-exp of its shard and the target's logit if its shard has it, and all of a
step's tokens are combined in one gather at the end: no collective happens in the middle of a
pipeline schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

IGNORE_INDEX = -100
"""The label that both torchtitan and this project's loader give to positions without a target."""

_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Logits converted to float64 at a time: 1 MiB on a CPU, where a block should fit a cache, 128 MiB
on a GPU, where a launch should pay."""


@dataclass(slots=True)
class CrossEntropySum:
    """Summed cross entropy of one step's tokens on one rank."""

    vocab_size: int
    tp_group: dist.ProcessGroup | None = None
    _whole: list[torch.Tensor] = field(default_factory=list)
    """One float64 per call, left on the device: to fetch it there would stop the device."""
    _shards: list[torch.Tensor] = field(default_factory=list)
    """(tokens, 2) float64 each: log-sum-exp of this rank's shard, target logit or -inf."""
    _shard_group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the tokens of one call of the loss function.

        logits has shape (..., vocabulary or a shard of it), labels the leading shape with global
        token ids; either may be a DTensor. Labels of IGNORE_INDEX count nothing.
        """
        group = self._vocabulary_group(logits)
        first = 0
        if group is not None:
            # DTensor and torchtitan both cut the vocabulary like torch.chunk: all shards but the
            # last are ceil(vocabulary / ranks) wide.
            width = -(-self.vocab_size // dist.get_world_size(group))
            first = width * dist.get_rank(group)
        scores = local_part(logits).detach().flatten(0, -2)
        targets = local_part(labels).detach().flatten()
        kept = targets != IGNORE_INDEX
        lse, target = _lse_and_target(scores, targets - first)
        if group is None:
            self._whole.append(torch.where(kept, lse - target, 0).sum())
        else:
            self._shard_group = group
            self._shards.append(torch.stack([lse[kept], target[kept]], dim=1))

    @torch.no_grad()
    def take(self) -> float:
        """The step's sum in nats; starts the next step. Collective over the vocabulary's ranks."""
        total = math.fsum(torch.stack(self._whole).tolist()) if self._whole else 0.0
        self._whole.clear()
        if self._shards:
            total += _combine(torch.cat(self._shards), self._shard_group)
            self._shards.clear()
        return total

    def _vocabulary_group(self, logits: torch.Tensor) -> dist.ProcessGroup | None:
        """The ranks that share these logits' vocabulary; None when each has all of it."""
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
    """This rank's shard of a DTensor; a plain tensor itself. Without autograd or communication."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _lse_and_target(
    scores: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float64 per token: log-sum-exp over the columns, and the target's logit.

    A target outside the columns gives -inf.
    """
    width = scores.shape[-1]
    column = targets.clamp(0, width - 1)
    target = scores.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(torch.float64)
    target.masked_fill_(column != targets, -torch.inf)
    # The largest logit is subtracted before exp, so that nothing overflows; infinities stay.
    largest = scores.amax(dim=-1).to(torch.float64)
    largest.masked_fill_(~largest.isfinite(), 0)
    rows = max(1, _BLOCK_ELEMENTS.get(scores.device.type, _BLOCK_ELEMENTS["cuda"]) // width)
    memory = largest.new_empty(min(rows, len(scores)), width)
    lse = torch.empty_like(largest)
    for start in range(0, len(scores), rows):
        block = slice(start, start + rows)
        wide = memory[: len(lse[block])].copy_(scores[block])
        torch.sum(wide.sub_(largest[block, None]).exp_(), dim=-1, out=lse[block])
    return lse.log_().add_(largest), target


def _combine(mine: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Sum over tokens of log-sum-exp minus target logit, from every rank's shard."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine.contiguous(), group=group)
    shards = torch.stack(everyone)
    lse = torch.logsumexp(shards[:, :, 0], dim=0)
    target = shards[:, :, 1].amax(dim=0)
    return float((lse - target).sum())
