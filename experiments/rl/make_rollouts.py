"""Samples the rollouts of rl.toml and freezes them.

python make_rollouts.py > rollouts.jsonl

The policies that sampled and that KL pulls to are the initial policy with some noise on its
weights, so that the first update is off-policy and some ratios are clipped. The last digits depend
on hardware and on the number of threads, so what counts is the file, not this script.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable

import torch
from policy import Policy, batch_of, log_probs, policy_of
from rollouts import EOS, LONGEST, VOCABULARY, Rollout, group_advantages, share_of_even

SEED = 7
TEMPERATURE = 0.7
GROUP_SIZE = 4
GROUPS = 16


def rounded(values: Iterable[float]) -> list[float]:
    """To the digits of a float32."""
    return [float(f"{value:.9g}") for value in values]


def moved(policy: Policy, dice: torch.Generator, by: float) -> Policy:
    """A copy with noise of ``by`` times each weight's size."""
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(by * weight.abs().mean() * torch.randn(weight.shape, generator=dice))
    return other


@torch.no_grad()
def sampled(policy: Policy, prompt: list[int], dice: torch.Generator) -> list[int]:
    """A response that ends with EOS or at the longest length."""
    tokens = list(prompt)
    while len(tokens) < LONGEST and (tokens[-1] != EOS or len(tokens) == len(prompt)):
        logits = policy(torch.tensor([tokens]), torch.arange(len(tokens))[None])[0, -1]
        chances = torch.softmax(logits / TEMPERATURE, -1)
        tokens.append(int(torch.multinomial(chances, 1, generator=dice)))
    return tokens[len(prompt) :]


@torch.no_grad()
def scored(policy: Policy, rollout: Rollout) -> list[float]:
    """Log-probabilities of the response's tokens, at the sampling temperature."""
    batch = batch_of([rollout])
    logits = policy(batch.tokens, batch.positions)
    found = log_probs(logits / TEMPERATURE, batch.labels)[batch.counted > 0]
    return rounded(found.tolist())


def policies(dice: torch.Generator) -> tuple[Policy, Policy]:
    """The policy that samples, and the one that KL pulls to."""
    initial = policy_of(SEED)
    return moved(initial, dice, 0.05), moved(initial, dice, 0.15)


def rollouts() -> list[Rollout]:
    """All rollouts, the groups in order."""
    dice = torch.Generator().manual_seed(SEED)
    behind, reference = policies(dice)
    made = []
    for group in range(GROUPS):
        length = int(torch.randint(2, 8, (), generator=dice))
        prompt = torch.randint(EOS + 1, VOCABULARY, (length,), generator=dice).tolist()
        responses = [sampled(behind, prompt, dice) for _ in range(GROUP_SIZE)]
        rewards = rounded(share_of_even(tokens) for tokens in responses)
        for response, reward, advantage in zip(
            responses, rewards, rounded(group_advantages(rewards)), strict=True
        ):
            nothing = [0.0] * len(response)
            bare = Rollout(group, prompt, response, nothing, nothing, reward, advantage)
            old, ref = scored(behind, bare), scored(reference, bare)
            made.append(Rollout(group, prompt, response, old, ref, reward, advantage))
    return made


def main() -> None:
    header = {"policy_seed": SEED, "temperature": TEMPERATURE, "group_size": GROUP_SIZE}
    for row in (header, *(vars(each) for each in rollouts())):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
