"""A small model trained in bf16 by plain torch; writes the curves of a control and of others.

    bf16_program.py FOLDER          FOLDER/NAME.csv of each of ``RUNS``

It reads tokens of counting sequences, a quarter of which are noise.
"""

import csv
import sys
from pathlib import Path

import torch
from torch.nn import functional

STEPS, SAMPLES, LENGTH, TOKENS, WIDTH = 200, 16, 16, 61, 48
RUNS = {
    "control": {},
    "repeat1": {"ulp": 1},
    "repeat2": {"ulp": 2},
    "repeat3": {"ulp": 3},
    "microbatches": {"microbatches": 2},
    "rate": {"rate": 1.02},
}


class Model(torch.nn.Module):
    """Predicts a token from the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Embedding(TOKENS, WIDTH)
        self.before = torch.nn.Embedding(TOKENS, WIDTH)
        self.hidden = torch.nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.norm = torch.nn.LayerNorm(4 * WIDTH)
        self.out = torch.nn.Linear(4 * WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
        both = torch.cat([self.last(tokens), self.before(before)], dim=-1)
        return self.out(self.norm(functional.gelu(self.hidden(both))))


def batch(step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(TOKENS, (SAMPLES, 1), generator=draw)
    stride = torch.randint(1, 5, (SAMPLES, 1), generator=draw)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % TOKENS
    noise = torch.randint(TOKENS, tokens.shape, generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < 0.25, noise, tokens)


@torch.no_grad()
def move_by_one_ulp(model: torch.nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=draw) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf)
        weight.copy_(torch.nextafter(weight, towards))


def train(path: Path, ulp: int = 0, microbatches: int = 1, rate: float = 1.0) -> None:
    torch.manual_seed(1)
    model = Model()
    if ulp:
        move_by_one_ulp(model, ulp)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(("step", "loss", "grad_norm"))
        for step in range(1, STEPS + 1):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * rate * min(1.0, step / 20)
            total = 0.0
            for samples in batch(step).split(SAMPLES // microbatches):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(samples[:, :-1])
                loss = functional.cross_entropy(
                    logits.float().flatten(0, 1), samples[:, 1:].flatten()
                )
                (loss / microbatches).backward()
                total += loss.item() / microbatches
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            rows.writerow((step, total, norm))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, changes in RUNS.items():
        train(Path(sys.argv[1], f"{name}.csv"), **changes)
