"""Per-tensor evidence of made-up runs: the control's sketches, moved by what a bug would do."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from converge_harness.model import Disagreement, ReplicaSample, TensorRows, TensorSample

NAMES = tuple(
    sorted(
        [
            "tok_embeddings.weight",
            "norm.weight",
            "output.weight",
            *(
                f"layers.{layer}.{part}.weight"
                for layer in range(4)
                for part in (
                    *(f"attention.{linear}" for linear in ("wq", "wk", "wv", "wo")),
                    *(f"feed_forward.{linear}" for linear in ("w1", "w2", "w3")),
                    "attention_norm",
                    "ffn_norm",
                )
            ),
        ]
    )
)
STEPS = (0, 1, 2, 4)
K = 64


def sketches(key: str) -> np.ndarray:
    return np.random.default_rng(random.Random(key).getrandbits(32)).normal(size=(len(NAMES), K))


def rows(sketch: np.ndarray) -> TensorRows:
    none = np.zeros(len(NAMES), dtype=np.int64)
    return TensorRows(sketch, np.linalg.norm(sketch, axis=1), none, none)


def tensor_samples(
    run: str,
    *,
    noise: float = 0.0,
    scale: float = 1.0,
    turned: Callable[[str], bool] = lambda _: False,
    names: tuple[str, ...] = NAMES,
) -> tuple[TensorSample, ...]:
    """The control's samples with relative ``noise`` on all that moves.

    Gradients are scaled by ``scale``, and those of the ``turned`` tensors point elsewhere.
    """
    parameters, samples = sketches("initial"), []
    for step in STEPS:
        gradients = None
        if step:
            gradient, update = sketches(f"gradient {step}"), 1e-2 * sketches(f"update {step}")
            away = 1 + noise * sketches(f"{run} {step}")
            other = np.array([turned(name) for name in NAMES])[:, None]
            wrong = np.where(other, sketches(f"{run} turned {step}"), gradient)
            parameters = parameters + update * away + 3e-3 * np.where(other, wrong, 0.0)
            gradients = rows(scale * wrong * away)
        sizes = np.full(len(NAMES), 4096)
        samples.append(TensorSample(step, names, sizes, rows(parameters), gradients))
    return tuple(samples)


def replicas(*disagreements: Disagreement) -> tuple[ReplicaSample, ...]:
    kinds = {"parameter": 39, "gradient": 39, "optimizer state": 78}
    first = ReplicaSample(0, {"parameter": 39})
    return (first, *(ReplicaSample(s, kinds, disagreements, len(disagreements)) for s in STEPS[1:]))
