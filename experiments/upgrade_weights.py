"""Initial weights for ``upgrade.toml``: one checkpoint that two releases of torchtitan can load.

torchtitan 0.2 and 0.3 draw other random numbers for the same seed, and call some parameters by
other names. This writes a distributed checkpoint that has every tensor by both names; a release
loads those that it knows. Run it by the Python of a toolchain::

    .toolchains/torchtitan-0.3.0-torch-2.13/bin/python experiments/upgrade_weights.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY = 96, 4, 4, 2, 256, 512
"""``[converge.model]`` of both train configs, and what both releases make of it."""


def weights() -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Names in 0.2 and 0.3, and the tensor, initialised as torchtitan's Llama 3 is."""
    yield ("tok_embeddings.weight",), torch.randn(VOCABULARY, DIM)
    for layer in range(LAYERS):
        here = f"layers.{layer}"
        deep = 0.02 / (2 * (layer + 1)) ** 0.5
        kept = DIM * KV_HEADS // HEADS
        for name, rows in (("wq", DIM), ("wk", kept), ("wv", kept)):
            old, new = f"{here}.attention.{name}", f"{here}.attention.qkv_linear.{name}"
            yield (f"{old}.weight", f"{new}.weight"), normal(0.02, rows, DIM)
        yield (f"{here}.attention.wo.weight",), normal(deep, DIM, DIM)
        yield (f"{here}.feed_forward.w1.weight",), normal(0.02, HIDDEN, DIM)
        yield (f"{here}.feed_forward.w2.weight",), normal(deep, DIM, HIDDEN)
        yield (f"{here}.feed_forward.w3.weight",), normal(deep, HIDDEN, DIM)
        yield (f"{here}.attention_norm.weight",), torch.ones(DIM)
        yield (f"{here}.ffn_norm.weight",), torch.ones(DIM)
    yield ("norm.weight",), torch.ones(DIM)
    yield ("output.weight", "lm_head.weight"), normal(DIM**-0.5, VOCABULARY, DIM)


def normal(std: float, *shape: int) -> Tensor:
    """Normal numbers, cut off at three standard deviations."""
    return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-3 * std, b=3 * std)


def main(folder: Path) -> None:
    torch.manual_seed(42)
    state = {name: tensor for names, tensor in weights() for name in names}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
