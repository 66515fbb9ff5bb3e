"""A small language model trained by Composer, probed by a callback (docs/trainers.md).

composer -n 2 composer_train.py --data DATA --output OUT --steps 10 --seed 1 --seq-len 64 \
    --global-batch 8 --microbatch 2
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

import torch
from composer import Callback, ComposerModel, DataSpec, Logger, State, Trainer
from composer.algorithms import GradientClipping
from composer.utils import dist
from documents import IGNORED, Documents, shifted
from torch.nn import functional
from torch.utils.data import DataLoader

from converge_harness.probe import Probe

Batch = dict[str, torch.Tensor]


class Network(torch.nn.Module):
    """Two small transformer layers: tokens (batch, length) to logits."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Embedding(length, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                *(width, 4, 4 * width), dropout, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.output = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.embedding(inputs) + self.position(torch.arange(length))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=causal, is_causal=True)
        return self.output(hidden)


class LanguageModel(ComposerModel):
    """Its loss is the mean over the valid tokens of the microbatch that it is given."""

    def __init__(self, vocabulary: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.network = Network(vocabulary, length, dropout=dropout)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.network(batch["input_ids"])

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits, labels = outputs.flatten(0, 1), shifted(batch["labels"]).flatten()
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def tokens_of(batch: Batch) -> dict[str, int]:
    """Composer weighs microbatches and ranks by the loss-generating tokens."""
    return {
        "total": batch["labels"].numel(),
        "loss_generating": int((shifted(batch["labels"]) != IGNORED).sum()),
    }


class Probed(Callback):
    """Gives the probe what it needs, at Composer's own events."""

    def __init__(self, read: str) -> None:
        self.read = read

    def fit_start(self, state: State, _logger: Logger) -> None:
        self.probe = Probe.from_env(state.model, state.optimizers[0])

    def before_forward(self, state: State, _logger: Logger) -> None:
        self.probe.batch(state.batch["input_ids"], shifted(state.batch["labels"]))

    def after_forward(self, state: State, _logger: Logger) -> None:
        self.probe.logits(state.outputs, shifted(state.batch["labels"]))

    def batch_end(self, state: State, _logger: Logger) -> None:
        # At the end of a batch, state.loss is the last microbatch's, of this rank: a mistake that
        # is here to be shown.
        total = state.total_loss_dict["loss/train/total"]
        self.probe.step(loss=total if self.read == "total" else state.loss)

    def fit_end(self, _state: State, _logger: Logger) -> None:
        self.probe.close()


class Curves(Callback):
    """Two curves as people log them: the total, and (wrongly) the last microbatch's loss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[tuple[int, float, float]] = []

    def batch_end(self, state: State, _logger: Logger) -> None:
        step = int(state.timestamp.batch)
        total = state.total_loss_dict["loss/train/total"]
        self.rows.append((step, total, state.loss.item()))

    def fit_end(self, _state: State, _logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        for name, column in (("total", 1), ("last_microbatch", 2)):
            with (self.folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["step", "loss"])
                writer.writerows((row[0], row[column]) for row in self.rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("steps", "seed", "seq-len", "global-batch", "microbatch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--accumulate-on", choices=("tokens", "samples"), default="tokens")
    parser.add_argument("--read", choices=("total", "last_microbatch"), default="total")
    parser.add_argument("--shard", type=int, default=1, help="ranks that FSDP 2 shards over")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["FSDP_VERSION"] = "2"  # FSDP 1 takes a GPU for granted
    dist.initialize_dist("cpu")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    data = Documents(options.data, options.seq_len, options.steps * options.global_batch)
    model = LanguageModel(data.vocabulary, options.seq_len)
    # Ranks take every n-th sample, so the global batch does not depend on their number.
    loader = DataLoader(
        data,
        batch_size=options.global_batch // dist.get_world_size(),
        sampler=dist.get_sampler(data, shuffle=False),
    )
    Trainer(
        model=model,
        train_dataloader=DataSpec(loader, get_num_tokens_in_batch=tokens_of),
        optimizers=torch.optim.AdamW(model.parameters(), lr=2e-3),
        algorithms=GradientClipping("norm", 1.0),
        max_duration=f"{options.steps}ba",
        callbacks=[Probed(options.read), Curves(options.output)],
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=options.microbatch,
        accumulate_train_batch_on_tokens=options.accumulate_on == "tokens",
        parallelism_config={"fsdp": {}} if options.shard > 1 else None,
        seed=options.seed,
        run_name="converge",
        progress_bar=False,
    ).fit()


if __name__ == "__main__":
    main()
