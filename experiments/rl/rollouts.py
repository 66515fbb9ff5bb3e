"""Rollouts that were sampled once and are frozen on disk, with what was recorded of them.

A rollout is a prompt and a response from an older policy than the one that is trained.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD, EOS, VOCABULARY = 0, 1, 16
LONGEST = 32
"""Tokens of a prompt and its response, at most."""


@dataclass(frozen=True)
class Rollout:
    """One response and what was recorded when it was sampled; each list has one entry a token."""

    group: int
    """The prompt's number: rollouts of one prompt are a group."""
    prompt: list[int]
    response: list[int]
    """Ends with EOS, unless it was cut."""
    old: list[float]
    """Log-probabilities of the response under the policy that sampled it, in nats."""
    ref: list[float]
    """The same under the reference policy, to which KL pulls."""
    reward: float
    advantage: float
    """The reward, standardised within its group."""


def load_rollouts(path: Path, sha256: str) -> tuple[dict[str, Any], list[Rollout]]:
    """Settings of the generator, and the rollouts; ValueError if the file is not the frozen one."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has the digest {found}, and the experiment names {sha256}")
    header, *rows = map(json.loads, content.splitlines())
    return header, [Rollout(**row) for row in rows]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one prompt's rollouts, standardised: GRPO, arXiv 2402.03300, section 4.1.2."""
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (spread + 1e-4) for reward in rewards]


def share_of_even(tokens: Sequence[int]) -> float:
    """The reward of a response: a rule, so that nothing has to be learnt for it."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
