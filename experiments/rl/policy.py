"""A tiny decoder, batches of rollouts for it, and the log-probabilities of their tokens.

Position t of a row scores the token at t + 1: ``labels``, ``old`` and ``ref`` are shifted by one
against ``tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rollouts import LONGEST, PAD, VOCABULARY, Rollout
from torch import nn
from torch.nn import functional

IGNORED = -100
WIDTH, HEADS, LAYERS = 32, 4, 2


class Attention(nn.Module):
    """Causal attention with one projection each for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        heads = (
            each(x)
            .unflatten(-1, (-1, WIDTH // HEADS))
            .transpose(1, 2)  # under TP some of the heads
            for each in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(
            *heads, attn_mask=allowed, is_causal=allowed is None
        )
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), allowed)
        return x + self.feed_forward(self.ffn_norm(x))


class Policy(nn.Module):
    """A decoder with learnt absolute positions: (batch, length) tokens to logits, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.output.weight, std=0.3)  # some tokens are likelier than others

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``positions`` like ``tokens``; ``allowed`` (batch, 1, query, key), else causal."""
        x = self.tok_embeddings(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.output(self.norm(x))


def policy_of(seed: int) -> Policy:
    """The policy that a seed stands for, the same on every rank."""
    torch.manual_seed(seed)
    return Policy()


@dataclass(frozen=True)
class Batch:
    """Rollouts as one padded tensor each; shapes are (batch, length) unless stated otherwise."""

    tokens: torch.Tensor
    """int64; PAD at padding."""
    real: torch.Tensor
    """bool; false at padding."""
    labels: torch.Tensor
    """int64: the response token that a position scores, else IGNORED."""
    old: torch.Tensor
    """float32: its recorded log-probability; 0 where there is no label. ``ref`` is alike."""
    ref: torch.Tensor
    advantages: torch.Tensor
    """float32, (batch,); ``rewards`` is alike."""
    rewards: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        """float32: 1 where a response token is scored, else 0."""
        return (self.labels != IGNORED).float()

    @property
    def positions(self) -> torch.Tensor:
        """int64: the place of each token in its own rollout, wherever padding is."""
        return (self.real.cumsum(1) - 1).clamp(min=0)

    @property
    def allowed(self) -> torch.Tensor | None:
        """bool, (batch, 1, query, key): causal and no padding; None where padding is last."""
        if bool(self.real[:, 0].all()):
            return None
        length = self.real.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        own = torch.eye(length, dtype=torch.bool)  # a row without any key would be NaN
        return ((causal & self.real[:, None, :]) | own)[:, None]

    @property
    def evidence(self) -> torch.Tensor:
        """float32, (batch, length, 5): all that is frozen, for a digest of the samples."""
        rows = torch.stack((self.advantages, self.rewards), 1)[:, None].expand(
            *self.tokens.shape, 2
        )
        return torch.cat((torch.stack((self.tokens.float(), self.old, self.ref), 2), rows), 2)


def batch_of(rollouts: Sequence[Rollout], pad: str = "right", to: str = "longest") -> Batch:
    """Pad rollouts on the given side: to the ``longest`` of them, or all ``alike`` to LONGEST."""
    own = max(len(each.prompt) + len(each.response) for each in rollouts)
    longest = LONGEST if to == "alike" else own

    def padded(values: list[Any], filling: float, dtype: torch.dtype) -> torch.Tensor:
        gap = [filling] * (longest - len(values))
        return torch.tensor(gap + values if pad == "left" else values + gap, dtype=dtype)

    def stacked(rows: list[list[Any]], filling: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([padded(row, filling, dtype) for row in rows])

    before = [len(each.prompt) - 1 for each in rollouts]  # positions that score a prompt token
    tokens = [each.prompt + each.response for each in rollouts]
    whole = list(zip(rollouts, before, strict=True))
    return Batch(
        tokens=stacked(tokens, PAD, torch.int64),
        real=stacked([[1] * len(each) for each in tokens], 0, torch.bool),
        labels=stacked(
            [[IGNORED] * n + each.response + [IGNORED] for each, n in whole], IGNORED, torch.int64
        ),
        old=stacked([[0.0] * n + each.old + [0.0] for each, n in whole], 0.0, torch.float32),
        ref=stacked([[0.0] * n + each.ref + [0.0] for each, n in whole], 0.0, torch.float32),
        advantages=torch.tensor([each.advantage for each in rollouts]),
        rewards=torch.tensor([each.reward for each in rollouts]),
    )


def log_probs(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(batch, length) in nats, of labels under (batch, length, vocabulary); PAD's if ignored."""
    chosen = labels.clamp(min=PAD)[..., None]
    return functional.log_softmax(scores, -1).gather(-1, chosen).squeeze(-1)
