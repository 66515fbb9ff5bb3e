"""Runs of a small model with every kind of tensor, and ways to break them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from judge_examples import FSDP2, SAMPLE_STEPS, in_force, judge, rows, run, with_signals

from converge_harness.model import Evidence, Judgement, Parallelism, TensorSample, Verdict

LAYERS = 4
BLOCK = {
    "attention.wq.weight": 64,
    "attention.wk.weight": 32,
    "attention.wv.weight": 32,
    "attention.wo.weight": 64,
    "attention_norm.weight": 8,
    "feed_forward.w1.weight": 96,
    "feed_forward.w2.weight": 96,
    "ffn_norm.weight": 8,
}
MODEL = {
    "tok_embeddings.weight": 128,
    **{f"layers.{layer}.{name}": size for layer in range(LAYERS) for name, size in BLOCK.items()},
    "norm.weight": 8,
    "output.weight": 128,
}
"""Canonical name to number of entries."""
LR = 1e-3
BOTH_NORMS = ("grad_norm", "grad_norm_recomputed")
BOTH_LOSSES = ("loss", "loss_recomputed")

Change = Callable[[int, str, np.ndarray], np.ndarray]


def other(name: str, step: int, what: str, spread: float = 1.0) -> np.ndarray:
    """Numbers of a tensor: any, always the same, and others for every ``what``."""
    seed = [step, len(what), *what.encode(), *name.encode()]
    return spread * np.random.default_rng(seed).standard_normal(MODEL[name])


def model_samples(
    gradient: Change = lambda step, name, values: values,
    update: Change = lambda step, name, values: values,
    weights: dict[str, np.ndarray] | None = None,
    noise: float = 0.0,
) -> tuple[TensorSample, ...]:
    """Per-tensor evidence of a run; the functions change what the control did.

    ``noise`` is what rounding does to every tensor, relative to its norm.
    """
    weights = weights or initial_weights()
    found = []
    for step in SAMPLE_STEPS:
        if step:
            weights = {
                name: values
                + LR * update(step, name, other(name, step, "update"))
                + LR * noise * other(name, step, "update rounding")
                for name, values in weights.items()
            }
        gradients = {
            name: rounded(gradient(step, name, other(name, step, "gradient")), name, step, noise)
            for name in MODEL
        }
        found.append(
            TensorSample(
                step=step,
                names=tuple(MODEL),
                sizes=np.array(list(MODEL.values())),
                parameters=rows(weights),
                gradients=rows(gradients) if step else None,
            )
        )
    return tuple(found)


def rounded(values: np.ndarray, name: str, step: int, noise: float) -> np.ndarray:
    size = np.linalg.norm(values) / np.sqrt(values.size)
    return values + noise * size * other(name, step, "rounding")


def initial_weights() -> dict[str, np.ndarray]:
    return {name: other(name, 0, "weights") for name in MODEL}


CONTROL = run(samples=model_samples())


def broken(parallelism: Parallelism = FSDP2, **changes: Any) -> Evidence:
    """A test set of the model: with the control's samples, but for the changes of them."""
    kinds = ("gradient", "update", "weights", "noise")
    of_samples = {kind: changes.pop(kind) for kind in kinds if kind in changes}
    return run("t", parallelism, samples=model_samples(**of_samples), **changes)


def scaled(factor: float, where: Callable[[str], bool] = lambda name: True) -> Change:
    return lambda step, name, values: values * (factor if where(name) else 1.0)


def turned(where: Callable[[str], bool], share: float = 1.0) -> Change:
    return lambda step, name, values: values + share * where(name) * other(name, step, "wrong")


def since(first: int, change: Change) -> Change:
    return lambda step, name, values: change(step, name, values) if step >= first else values


def changed(test: Evidence, change: Callable[[int, float], float], *signals: str) -> Evidence:
    return with_signals(test, **dict.fromkeys(signals, change))


def verdict_of(test: Evidence, control: Evidence = CONTROL, **more: Any) -> Verdict:
    """The verdict of a test set that fails, which always has a cause, a class and a command."""
    verdict = judge(test, control, **more)
    assert verdict.judgement is Judgement.FAIL, verdict.cause
    assert verdict.cause
    assert verdict.cause_class
    assert verdict.next_command
    return verdict


def with_tokens(test: Evidence, **ran: Any) -> Evidence:
    """The run with other numbers in its ``in_force.json``."""
    return replace(test, in_force=replace(test.in_force or in_force(), **ran))
