"""Dropout with random numbers that a checkpoint keeps: right by itself, and a place for bugs."""

from __future__ import annotations

from typing import Any

import torch

PROBABILITY = 0.1
SEED = 1234
STATE = "dropout_rng"
"""The name of its generator's state in a checkpoint."""


class GeneratorState:
    """A generator as a part of a checkpoint."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.set_state(state_dict["state"])


def dropout(trainer: Any) -> torch.Generator:
    """Drop outputs of every feed-forward block; one mask for all samples of a step.

    The mask has the shape (1, sequence, dim) and is the same on every rank, so that a permuted
    order of samples is no other run.
    """
    generator = torch.Generator(trainer.device).manual_seed(SEED)
    trainer.checkpointer.states[STATE] = GeneratorState(generator)

    def drop(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(output.shape[1:], generator=generator, device=output.device)
        return output * (kept >= PROBABILITY) / (1 - PROBABILITY)

    for model in trainer.model_parts:
        for name, module in model.named_modules():
            if name.endswith("feed_forward"):
                module.register_forward_hook(drop)
    return generator
