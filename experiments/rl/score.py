"""Scores the frozen rollouts' tokens in several layouts, to compare them as curves (docs/rl.md).

python score.py --rollouts rollouts.jsonl --sha256 DIGEST --out scores

Each layout becomes a file of lines ``token,nll``: the number of a response token, counted over all
rollouts, and its negative log-probability in nats. Weights and tokens are the same in all of them.
Under torchrun with several ranks, one layout is scored: the policy split over them.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from mistakes import CoarseScores, NoPositions, NoTemperature
from objective import Grpo
from policy import HEADS, LAYERS, Policy, batch_of, log_probs, policy_of
from rollouts import Rollout, load_rollouts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from converge_harness.probe.leaving import wait_at_exit

Scores = Iterator[list[float]]
"""Log-probabilities of each rollout's response, in nats."""


class Scorer:
    """The policy, the frozen rollouts, and how they are scored."""

    def __init__(self, policy: Policy, rollouts: Sequence[Rollout], objective: Grpo) -> None:
        self.policy, self.rollouts, self.objective = policy, rollouts, objective

    def _some(self, size: int) -> Iterator[Sequence[Rollout]]:
        starts = range(0, len(self.rollouts), size)
        return (self.rollouts[start : start + size] for start in starts)

    def in_batches(self, size: int, pad: str = "right", *, masked: bool = True) -> Scores:
        """As training does: rollouts in batches, padded to the longest of each."""
        for some in self._some(size):
            batch = batch_of(some, pad)
            allowed = batch.allowed if masked else None
            logits = self.policy(batch.tokens, self.objective.positions(batch), allowed)
            found = log_probs(self.objective.scores(logits), batch.labels)
            for row, counted in zip(found, batch.counted, strict=True):
                yield row[counted > 0].tolist()

    def packed(self, size: int, *, masked: bool = True) -> Scores:
        """Several rollouts one after another in a row, without padding."""
        for some in self._some(size):
            alone = [batch_of([each]) for each in some]
            tokens, labels, positions = (
                torch.cat([getattr(each, name) for each in alone], 1)
                for name in ("tokens", "labels", "positions")
            )
            lengths = [each.tokens.shape[1] for each in alone]
            own = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
            allowed = own.tril()[None, None] if masked else None
            logits = self.policy(tokens, positions, allowed)
            found = log_probs(self.objective.scores(logits), labels)[0]
            for row, label in zip(found.split(lengths), labels[0].split(lengths), strict=True):
                yield row[label >= 0].tolist()

    def by_engine(self) -> Scores:
        """As an inference engine does: another implementation, token by token with a cache."""
        for rollout in self.rollouts:
            batch, cache = batch_of([rollout]), []
            logits = torch.cat(
                [
                    next_logits(self.policy, token, place, cache)
                    for place, token in enumerate(batch.tokens[0])
                ]
            )
            found = log_probs(self.objective.scores(logits[None]), batch.labels)
            yield found[batch.counted > 0].tolist()


def next_logits(
    policy: Policy, token: torch.Tensor, place: int, cache: list[list[torch.Tensor]]
) -> torch.Tensor:
    """(1, vocabulary) after one more token; ``cache`` has each layer's keys and values."""
    x = policy.tok_embeddings.weight[token] + policy.positions.weight[place]
    for number, layer in enumerate(policy.layers):
        attention, normed = layer.attention, layer.attention_norm(x)
        query, key, value = (
            (each.weight @ normed).view(HEADS, 1, -1)
            for each in (attention.wq, attention.wk, attention.wv)
        )
        if number == len(cache):
            cache.append([key, value])
        else:
            old_keys, old_values = cache[number]
            cache[number] = [torch.cat((old_keys, key), 1), torch.cat((old_values, value), 1)]
        keys, values = cache[number]
        chances = (query @ keys.mT / math.sqrt(keys.shape[-1])).softmax(-1)
        x = x + attention.wo.weight @ (chances @ values).flatten()
        x = x + layer.feed_forward(layer.ffn_norm(x))
    return (policy.output.weight @ policy.norm(x))[None]


def shifted(scores: Scores) -> Scores:
    """Each token has the log-probability of the one before it: MaxText issue 2103."""
    return ([row[0], *row[:-1]] for row in scores)


def end_zeroed(scores: Scores) -> Scores:
    """The last token's is 0, as where it is masked: DeepSpeedExamples issue 888."""
    return ([*row[:-1], 0.0] for row in scores)


def end_dropped(scores: Scores) -> Scores:
    """The last token is not scored at all."""
    return (row[:-1] for row in scores)


def layouts(
    policy: Policy, settings: dict[str, float], rollouts: Sequence[Rollout]
) -> dict[str, Callable[[], Scores]]:
    """What is compared: the control, its repeats, correct set-ups, and wrong ones."""

    def scorer(kind: type[Grpo] = Grpo) -> Scorer:
        return Scorer(policy, rollouts, kind("token", settings, rollouts))

    return {
        "control": lambda: scorer().in_batches(1),
        "repeat_batches_of_2": lambda: scorer().in_batches(2),
        "repeat_batches_of_4": lambda: scorer().in_batches(4),
        "repeat_batches_of_16": lambda: scorer().in_batches(16),
        "repeat_batches_of_64": lambda: scorer().in_batches(64),
        "right_batches_of_8": lambda: scorer().in_batches(8),
        "right_left_padded": lambda: scorer().in_batches(8, "left"),
        "right_packed": lambda: scorer().packed(4),
        "right_engine": lambda: scorer().by_engine(),
        "wrong_shifted": lambda: shifted(scorer().in_batches(8)),
        "wrong_temperature": lambda: scorer(NoTemperature).in_batches(8),
        "wrong_bf16_scores": lambda: scorer(CoarseScores).in_batches(8),
        "wrong_positions": lambda: scorer(NoPositions).in_batches(8, "left"),
        "wrong_padding_attended": lambda: scorer().in_batches(8, "left", masked=False),
        "wrong_packed_unmasked": lambda: scorer().packed(4, masked=False),
        "wrong_end_zeroed": lambda: end_zeroed(scorer().in_batches(8)),
        "wrong_end_dropped": lambda: end_dropped(scorer().in_batches(8)),
    }


def split(policy: Policy) -> Policy:
    """The policy under tensor parallelism over all ranks: heads, features, the vocabulary."""
    plan: dict[str, ParallelStyle] = {"output": ColwiseParallel(output_layouts=Replicate())}
    for number in range(LAYERS):
        layer = f"layers.{number}"
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.0"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.2"):
            plan[f"{layer}.{name}"] = RowwiseParallel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(policy, mesh, plan)


def write(path: Path, rollouts: Sequence[Rollout], scores: Iterable[list[float]]) -> None:
    """A curve with a line per token; tokens that were not scored have none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = itertools.accumulate((len(each.response) for each in rollouts), initial=1)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("token", "nll"))
        for start, row in zip(starts, scores, strict=False):  # one start more than rollouts
            lines.writerows((token, -value) for token, value in enumerate(row, start))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--sha256", required=True, help="digest of the file with the rollouts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings, rollouts = load_rollouts(options.rollouts, options.sha256)
    policy = policy_of(settings["policy_seed"])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        scorer = Scorer(split(policy), rollouts, Grpo("token", settings, rollouts))
        scores = list(scorer.in_batches(8))
        if dist.get_rank() == 0:
            write(options.out / "right_tensor_parallel.csv", rollouts, scores)
        dist.destroy_process_group()
        wait_at_exit(scorer)  # a thread of gloo may still hold tensors: pytorch PR 179291
        return
    for name, score in layouts(policy, settings, rollouts).items():
        write(options.out / f"{name}.csv", rollouts, score())


if __name__ == "__main__":
    main()
