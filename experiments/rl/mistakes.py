"""Published mistakes of policy-gradient trainers, each as one changed method (docs/rl.md).

None of them raises an error, and the code is ours: only the mistake is that of its source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from objective import CLIP, Grpo, k3, over_ranks
from policy import IGNORED, Batch
from rollouts import PAD


class MicrobatchMean(Grpo):
    """Means over each microbatch's tokens, averaged. verl issue 5625, TRL issue 3021."""

    def weights(self, batch: Batch) -> torch.Tensor:
        return batch.counted / batch.counted.sum() / self.microbatches


class RankMean(Grpo):
    """Divided by this rank's tokens, then averaged over ranks. TRL pull request 3231."""

    def weights(self, batch: Batch) -> torch.Tensor:
        return batch.counted / self.own_tokens


class NotTimesRanks(Grpo):
    """Divided by all ranks' tokens, though gradients are averaged too. verl pull request 5366."""

    def weights(self, batch: Batch) -> torch.Tensor:
        return super().weights(batch) / self.ranks


class GenerationTokens(Grpo):
    """Divided by the tokens of all rollouts that were generated. TRL pull request 6024."""

    def weights(self, batch: Batch) -> torch.Tensor:
        tokens = sum(len(each.response) for each in self.rollouts)
        return batch.counted / tokens * self.ranks


class PaddedLength(Grpo):
    """Sequences are divided by their padded length. verl pull request 5366 (loss_scale_factor)."""

    def weights(self, batch: Batch) -> torch.Tensor:
        return batch.counted / batch.counted.shape[1] / self.sequences * self.ranks


class PaddingCounted(Grpo):
    """Padding after a response counts as its tokens. MemGen pull request 33."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        super().begin_step(batches)
        counts = torch.stack([self._counted(each).sum() for each in batches])
        self.tokens = float(over_ranks(counts.sum()))

    def labels(self, batch: Batch) -> torch.Tensor:
        return torch.where(self._counted(batch) > 0, batch.labels.clamp(min=PAD), IGNORED)

    def weights(self, batch: Batch) -> torch.Tensor:
        return self._counted(batch) / self.tokens * self.ranks

    def _counted(self, batch: Batch) -> torch.Tensor:
        return (batch.counted.cumsum(1) > 0).float()


class EosNotCounted(Grpo):
    """The end of a response is not trained. DeepSpeedExamples issue 888."""

    def weights(self, batch: Batch) -> torch.Tensor:
        later = batch.counted.flip(1).cumsum(1).flip(1)  # scored tokens from here on
        return super().weights(batch) * (later > 1)


class ShiftedOld(Grpo):
    """Old log-probabilities are those of the token before. MaxText issue 2103."""

    def old(self, batch: Batch) -> torch.Tensor:
        return batch.old.roll(1, dims=1)


class NoTemperature(Grpo):
    """Sampled at one temperature and scored at 1. TRL pull request 3029."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float()


class CoarseScores(Grpo):
    """The softmax in bfloat16, and the old one in float32. minimind pull request 814."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return super().scores(logits).bfloat16()


class NoPositions(Grpo):
    """Padding on the left counts as places. OpenRLHF issue 217, TRL issue 6800."""

    def positions(self, batch: Batch) -> torch.Tensor:
        return torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)


class MicrobatchAdvantages(Grpo):
    """Rewards standardised over the microbatch, not over a prompt's group. grpo-flat issue 2."""

    def advantages(self, batch: Batch) -> torch.Tensor:
        return (batch.rewards - batch.rewards.mean()) / (batch.rewards.std() + 1e-4)


class OtherGroups(Grpo):
    """Rows in another order than the groups that are cut from them. R1-V issue 67."""

    def advantages(self, batch: Batch) -> torch.Tensor:
        groups = batch.rewards.view(-1, self.group_size)
        own = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return own.flatten()


class TurnedClip(Grpo):
    """The larger of the two, as if it were a loss. Practical_RL issue 248."""

    def surrogate(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return torch.maximum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


class TwiceNegated(Grpo):
    """The loss is negated twice, so rewards are minimised. flash-linear-attention pull 1076."""

    def loss(self, terms: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        return -super().loss(terms, weights)


class KlWithoutGradient(Grpo):
    """KL is added to the loss without a gradient. open-instruct issue 530."""

    def penalty(self, found: torch.Tensor, batch: Batch) -> torch.Tensor:
        return k3(found.detach(), batch.ref)


MISTAKES: dict[str, type[Grpo]] = {
    "microbatch_mean": MicrobatchMean,
    "rank_mean": RankMean,
    "not_times_ranks": NotTimesRanks,
    "generation_tokens": GenerationTokens,
    "padded_length": PaddedLength,
    "padding_counted": PaddingCounted,
    "eos_not_counted": EosNotCounted,
    "shifted_old": ShiftedOld,
    "no_temperature": NoTemperature,
    "coarse_scores": CoarseScores,
    "no_positions": NoPositions,
    "microbatch_advantages": MicrobatchAdvantages,
    "other_groups": OtherGroups,
    "turned_clip": TurnedClip,
    "twice_negated": TwiceNegated,
    "kl_without_gradient": KlWithoutGradient,
}
