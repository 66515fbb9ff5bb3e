"""The clipped objective of GRPO: what a rank does backward through, microbatch by microbatch.

Shapes are (batch, length) where nothing else is said; log-probabilities are in nats. The ratio and
its clipping are those of PPO (arXiv 1707.06347, equation 7), advantages of groups and the KL term
those of GRPO (arXiv 2402.03300, equations 3 and 4), the mean over all tokens that of DAPO (arXiv
2503.14476, equation 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from policy import Batch
from rollouts import Rollout

CLIP = 0.2
"""Ratios outside of 1 - CLIP to 1 + CLIP gain nothing more."""
KL = 0.05
"""Weight of the KL term."""


def clipped(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """PPO's surrogate, to be maximised: the smaller of two, so that clipping never rewards."""
    limited = ratio.clamp(1 - CLIP, 1 + CLIP)
    return torch.minimum(ratio * advantages, limited * advantages)


def k3(found: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy, reference) from samples, never negative: joschu.net/blog/kl-approx.

    ``found`` and ``ref`` are log-probabilities of the same tokens.
    """
    return (ref - found).exp() - (ref - found) - 1


def over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks. Collective."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class Grpo:
    """The right objective; each class in ``mistakes.py`` replaces a method of it.

    The losses of all microbatches of all ranks add up to ``ranks`` times the loss of the step,
    because DDP and FSDP average gradients over ranks.
    """

    def __init__(
        self, normalize: str, settings: dict[str, Any], rollouts: Sequence[Rollout]
    ) -> None:
        """Takes the generator's settings, and all rollouts that there are."""
        self.normalize = normalize
        self.temperature: float = settings["temperature"]
        self.group_size: int = settings["group_size"]
        self.rollouts = rollouts
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Count what the whole step holds, over microbatches and ranks. Collective."""
        self.microbatches = len(batches)
        self.own_tokens = sum(float(each.counted.sum()) for each in batches)
        own_sequences = sum(len(each.tokens) for each in batches)
        whole = torch.tensor((self.own_tokens, own_sequences))
        self.tokens, self.sequences = over_ranks(whole).tolist()

    def positions(self, batch: Batch) -> torch.Tensor:
        """The place of each token, for the model's position embeddings."""
        return batch.positions

    def labels(self, batch: Batch) -> torch.Tensor:
        """The tokens whose log-probabilities are taken."""
        return batch.labels

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """(batch, length, vocabulary) in float32, at the temperature that rollouts had."""
        return logits.float() / self.temperature

    def old(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities under the policy that sampled."""
        return batch.old

    def advantages(self, batch: Batch) -> torch.Tensor:
        """One for each rollout: (batch,)."""
        return batch.advantages

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """What a token adds to the objective, to be maximised."""
        return clipped(ratio, advantages)

    def penalty(self, found: torch.Tensor, batch: Batch) -> torch.Tensor:
        """KL of every token."""
        return k3(found, batch.ref)

    def weights(self, batch: Batch) -> torch.Tensor:
        """The share of every token in the loss; over the step they add up to ``ranks``."""
        counted = batch.counted
        if self.normalize == "token":
            return counted / self.tokens * self.ranks
        return counted / counted.sum(1, keepdim=True) / self.sequences * self.ranks

    def terms(self, found: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
        """What the loss is made of, in the order in which it is computed.

        ``found`` are the log-probabilities of the microbatch.
        """
        old, advantages = self.old(batch), self.advantages(batch)
        gain = self.surrogate((found - old).exp(), advantages[:, None])
        return {
            "old": old,
            "advantages": advantages,
            "gain": gain,
            "kl": self.penalty(found, batch),
        }

    def loss(self, terms: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        """A microbatch's part of the loss."""
        return ((KL * terms["kl"] - terms["gain"]) * weights).sum()
