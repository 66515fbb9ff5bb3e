"""Simulated runs that differ by rounding alone, from laws meant to be worse than reality.

All runs of an experiment share one learning curve, batch noise included. Every run, the control
too, deviates from it by ``scale(t) x(t)`` in relative terms. ``x`` is an AR(1) process with
Student-t innovations, so that deviations persist and are occasionally large. ``scale`` grows as a
power of the step, or doubles at regular intervals as in chaotic training, until it saturates. Loss
and grad norm deviate independently; the reported ones are rounded to the trainer's format.
Gradients and updates of every parameter are sketches, with noise whose scale grows in the same way
and varies by run, step and parameter.

A test set sums in another order than any repeat. How much more it deviates than they do is not
known, so several factors are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy import signal

from converge_harness.model import Column, Evidence, Floats, Precision, TensorRows, TensorSample

PARAMETERS = 20
PROJECTIONS = 64
TESTS = 11
"""Test sets of an experiment, as in experiments/smoke.toml."""
REPEATS = ("rerun", "ulp", "ulp.2", "ulp.3", "permute", "permute.2")
"""converge's default; the rerun is bit-identical to the control."""
MOST_TENSOR = 0.4
"""Tensors of correct runs deviate by at most this share of their norm: they saturate, too."""
RUN_SPREAD = 0.3
"""Standard deviation of the logarithm of the size of a run's tensor deviations."""
TENSOR_FREEDOM = 10.0
"""Degrees of freedom of a tensor's deviation. With both, deviations vary by 0.4 in natural
logarithms, as tensors of the real repeats of benchmarks/aa.toml do (0.38 to 0.48).
"""
NORM_TO_LOSS = 5.0
"""A grad norm deviates this many times as much as a loss (as in the smoke matrix)."""


@dataclass(frozen=True, slots=True)
class Law:
    """How much correct runs deviate from the common curve. Scales are relative differences."""

    name: str
    precision: Precision
    first: float
    """Scale of the loss at step 1."""
    growth: float
    """Exponent of the power law."""
    most: float
    """Value at which the scale saturates."""
    gradient: float
    """Scale of a parameter's gradient at step 1."""
    update: float
    """Scale of a parameter's update at step 1."""
    doubling: float | None = None
    """Steps in which the scale doubles; None: only the power law."""
    correlation: float = 0.7
    """Correlation of deviations of neighbouring steps."""
    freedom: float = 4.0
    """Degrees of freedom of the Student-t innovations: 4 has infinite kurtosis."""
    mantissa: int = 24
    """Mantissa bits of the reported grad norm."""
    sharding: float = 0.0
    """Relative offset of a test set's reported grad norm, which is summed shard by shard."""

    def scale(self, steps: int) -> Floats:
        """Shape (steps,)."""
        at = np.arange(1, steps + 1, dtype=np.float64)
        grown = at**self.growth
        if self.doubling is not None:
            grown = np.maximum(grown, np.exp2(np.minimum((at - 1) / self.doubling, 64.0)))
        return np.minimum(self.first * grown, self.most)


FP32 = Law(
    "fp32",
    Precision.FP32,
    first=5e-9,
    growth=0.75,
    most=1e-6,
    gradient=4e-7,
    update=1e-4,
    sharding=3e-5,
)
FP32_CHAOTIC = replace(FP32, name="fp32, chaotic", growth=0.5, most=1e-3, doubling=12.0)
BF16 = Law(
    "bf16",
    Precision.BF16,
    first=2e-4,
    growth=0.5,
    most=7e-4,
    gradient=2e-2,
    update=1e-1,
    mantissa=8,
)
FLOAT8 = Law(
    "float8",
    Precision.FLOAT8,
    first=1e-4,
    growth=0.5,
    most=4e-4,
    gradient=3e-2,
    update=1e-1,
)
LAWS = (FP32, FP32_CHAOTIC, BF16, FLOAT8)


class Simulated(NamedTuple):
    """One experiment: a control, its repeats, and correct test sets."""

    control: Evidence
    repeats: tuple[Evidence, ...]
    tests: tuple[Evidence, ...]


def experiments(
    law: Law, steps: int, count: int, *, factor: float = 1.0, tests: int = TESTS, seed: int = 1
) -> Iterator[Simulated]:
    """Draw experiments; the test sets deviate ``factor`` times as much as the repeats do."""
    for child in np.random.SeedSequence(seed).spawn(count):
        yield experiment(law, steps, child, factor=factor, tests=tests)


def experiment(
    law: Law, steps: int, seed: np.random.SeedSequence, *, factor: float = 1.0, tests: int = TESTS
) -> Simulated:
    chance = np.random.default_rng(seed)
    world = _World(law, steps, chance)
    control = world.run("control")
    rerun = replace(control, name=REPEATS[0], source=REPEATS[0])
    return Simulated(
        control,
        (rerun, *(world.run(name) for name in REPEATS[1:])),
        tuple(world.run(f"test {i + 1}", factor, law.sharding) for i in range(tests)),
    )


def biased(run: Evidence, bias: float, start: int) -> Evidence:
    """The run with its loss off by ``bias`` (relative) from step ``start`` on."""
    off = np.where(run.steps >= start, 1.0 + bias, 1.0)
    changed = {
        name: Column(run.signals[name].values * off, run.signals[name].present)
        for name in ("loss", "loss_recomputed")
    }
    return replace(run, signals={**run.signals, **changed})


class _World:
    """What all runs of an experiment share."""

    def __init__(self, law: Law, steps: int, chance: np.random.Generator) -> None:
        self.law, self.steps, self.chance = law, steps, chance
        at = np.arange(1, steps + 1, dtype=np.float64)
        batches = chance.standard_normal((2, steps))
        self.loss = (2.0 + 6.0 * at**-0.15) * (1 + 0.02 * batches[0])
        self.norm = 0.9 * np.exp(0.2 * batches[1])
        self.scale = law.scale(steps)
        powers = 2 ** np.arange(int(np.log2(steps)) + 1)
        self.sampled = (0, *powers.tolist())
        self.gradients = {step: self._sketch() for step in self.sampled[1:]}
        self.updates = {step: self._sketch() for step in self.sampled[1:]}
        self.initial = 10.0 * self._sketch()

    def run(self, name: str, factor: float = 1.0, sharding: float = 0.0) -> Evidence:
        loss = self.loss * (1 + factor * self._deviation())
        norm = self.norm * (1 + NORM_TO_LOSS * factor * self._deviation())
        return Evidence(
            name=name,
            source=name,
            steps=np.arange(1, self.steps + 1),
            signals={
                "loss": rounded(loss, 24),
                "grad_norm": rounded(norm * (1 + sharding), self.law.mantissa),
                "loss_recomputed": loss,
                "grad_norm_recomputed": norm,
            },
            expected_steps=self.steps,
            precision=self.law.precision,
            samples=self._samples(factor),
        )

    def _deviation(self) -> Floats:
        """Shape (steps,): AR(1) of unit variance, times the scale."""
        law, burn_in = self.law, 50
        shocks = self.chance.standard_t(law.freedom, self.steps + burn_in)
        shocks *= np.sqrt((1 - law.correlation**2) * (law.freedom - 2) / law.freedom)
        lasting = signal.lfilter([1.0], [1.0, -law.correlation], shocks)[burn_in:]
        return np.asarray(self.scale * lasting, dtype=np.float64)

    def _sketch(self) -> Floats:
        """Sketches of tensors with norm one."""
        return self.chance.standard_normal((PARAMETERS, PROJECTIONS)) / np.sqrt(PROJECTIONS)

    def _noise(self, scale: float, step: int) -> Floats:
        """Sketch of the rounding errors of tensors with norm one: Student-t."""
        grown = scale * self.scale[step - 1] / self.scale[0]
        of_run = np.exp(RUN_SPREAD * self.chance.standard_normal())
        drawn = self.chance.chisquare(TENSOR_FREEDOM, (PARAMETERS, 1))
        of_parameter = np.sqrt(TENSOR_FREEDOM / drawn)
        size = np.minimum(grown * of_run * of_parameter, MOST_TENSOR)
        return np.asarray(size * self._sketch(), dtype=np.float64)

    def _samples(self, factor: float) -> tuple[TensorSample, ...]:
        parameters = self.initial
        samples = [self._sample(0, parameters, None)]
        for step in self.sampled[1:]:
            update = self.updates[step] + self._noise(factor * self.law.update, step)
            parameters = parameters + update
            gradients = self.gradients[step] + self._noise(factor * self.law.gradient, step)
            samples.append(self._sample(step, parameters, gradients))
        return tuple(samples)

    def _sample(self, step: int, parameters: Floats, gradients: Floats | None) -> TensorSample:
        return TensorSample(
            step=step,
            names=tuple(f"layers.{index:02d}.weight" for index in range(PARAMETERS)),
            sizes=np.full(PARAMETERS, 4096),
            parameters=_rows(parameters),
            gradients=None if gradients is None else _rows(gradients),
        )


def rounded(values: Floats, mantissa: int) -> Floats:
    """Values rounded to a floating-point format with that many mantissa bits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(fraction, mantissa)), exponent - mantissa)


def _rows(sketch: Floats) -> TensorRows:
    nothing = np.zeros(PARAMETERS, dtype=np.int64)
    return TensorRows(sketch, np.linalg.norm(sketch, axis=1), nothing, nothing)
