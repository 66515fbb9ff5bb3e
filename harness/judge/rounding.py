"""Errors of low precision, measured from a reference in float32, at the initial weights.

Whether a gradient in bfloat16 is right, its distance from another implementation's in bfloat16
hardly tells: both are a percent from the truth. Suites of kernel tests ask something else: is the
new implementation's error against higher precision at most a small multiple of the old one's
(FlashAttention's tests, for instance)? Sketches carry that to whole training steps: for every
parameter, whatever its sharding, the error of a test set against the float32 reference is compared
with that of a run of the same precision, its matched control. Squares are averaged over the frozen
batches first: an error of one batch varies, their mean hardly.

A factor shows more sharply than an error does, for rounding hardly changes a gradient's length:
exact norms are compared for it, not sketches.

**A set that draws other random numbers than its control** (dropout under another parallelism,
stochastic rounding) has other gradients in every batch, and may. What it draws has no direction
that lasts, so the *mean* of its errors over the batches is compared beside their size, and limits
have room for what drawing leaves of each. How far drawing moves a gradient, a second pass over the
first batch shows. Such a set may compute in float32 as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.judge.chance import normal, student
from harness.judge.soundness import Flaw, unfinished
from harness.judge.storage import spacing
from harness.model import (
    FEWEST_DRAWN,
    Evidence,
    Flags,
    Floats,
    FrozenSamples,
    Integers,
    TensorSample,
)

ALARMS = 2e-4
"""False-alarm probability of each of the checks here, over all parameters of a test set."""
IMPLEMENTATION_SPREAD = 0.1
"""Standard deviation of the logarithm of two right implementations' errors over each other, once
squares are averaged over batches. Measured on right sets of debug models: at most 0.13 for any
parameter (TP 2), see docs/operating-characteristics.md."""
SCALE_SPREAD = 0.1
"""Standard deviation of the logarithm of two right implementations' norms over each other, in
relative errors of the parameter's gradient: how much of an error lies along the gradient. Measured
at most 0.07 (0.2 for embeddings that are added up in other batches)."""
LASTING_SPREAD = 1.0
"""The same of the mean difference of two right losses, in the root mean square of the matched
control's error: rounding the same weights shifts all batches alike, so a mean need not vanish."""
MEAN_SCALE_SPREAD, BATCH_SCALE_SPREAD = 0.01, 0.025
"""The same of the mean over all parameters, in errors of the median parameter: over all batches,
and batch by batch. Measured at most 0.02 and 0.05 (TP 2, of a mixture of experts)."""
ROUNDED_ONCE = 0.2
"""Root mean square of a rounding's relative error, in spacings: 1 / sqrt(12) of the numbers between
two powers of two, which are 1.44 times the lower one on average."""
MOST_SCALED = 0.5
"""Where only some parameters are scaled, the middle one is scaled by less than this of the mean."""
DRAWING_SPREAD = 0.15
"""Standard deviation of the logarithm of what drawing leaves of a mean over batches, over what the
second pass says that it leaves: one pair of passes, as two sketches see it, stands for all batches.
Measured over the 39 parameters of a set: at most 0.14, and the largest of all 1.3 times what the
passes say (dropout of 0.1 in fp32: TP 2, HSDP 2x2, accumulation by 2, one device)."""
MOST_DRAWN = 0.9
"""Of a squared norm; where a gradient is all noise its length is not known any better."""
SUMS = 64
"""Of a sketch: its squared length has the relative variance 2 / SUMS."""
EMBEDDING = "embed"
"""Names of embeddings hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class Measure:
    """The runs by which errors of a test set are judged."""

    matched: Evidence
    """Of the test set's own precision: its errors are the measure."""
    reference: Evidence
    """In float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """A test set and its matched control against the reference; parameters in the names' order."""

    names: tuple[str, ...]
    frozen: bool
    """Whether these are frozen batches, and not the first step alone."""
    draws: bool
    """Whether the test set rightly draws other random numbers than its control."""
    test: Floats
    """Shape (parameters,): relative error of the gradient, root mean square over the batches; of a
    set that draws, the norm of their mean where that shows more."""
    matched: Floats
    """The same of the matched control; for a set that draws, with what drawing leaves of it."""
    multiple: Floats
    """Shape (parameters,): how many times the matched control's error is allowed."""
    scale: Floats
    """Shape (batches, parameters): logarithm of the norm over the matched control's."""
    loss: Floats
    """Shape (batches,): relative difference of the loss to the matched control's, signed."""
    loss_error: float
    """Root mean square of the matched control's relative difference to the reference."""
    longer: float = 0.0
    """Logarithm of how much longer drawing makes gradients than the matched control's, in the mean
    over parameters: what is drawn has no direction, and adds to every norm."""

    @property
    def batches(self) -> int:
        return len(self.scale)

    @property
    def ratio(self) -> Floats:
        """Shape (parameters,): errors over the matched control's; 1 where both are 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self.test / self.matched
        return np.where((self.test == 0) & (self.matched == 0), 1.0, ratio)

    @property
    def beyond(self) -> Flags:
        """Shape (parameters,): whose error is larger than rounding makes it, or not a number."""
        return ~(self.ratio <= self.multiple)

    @property
    def error(self) -> float:
        """The matched control's error, of the median parameter."""
        return float(np.median(self.matched))

    @property
    def scales(self) -> Floats:
        """Shape (parameters,): mean of the logarithm of the scale over the batches."""
        return np.asarray(self.scale.mean(axis=0), dtype=np.float64)

    @property
    def scale_limits(self) -> Floats:
        """Shape (parameters,): how large these may be."""
        return self.matched * self.multiple * SCALE_SPREAD * normal(ALARMS / len(self.names) / 2)

    @property
    def scales_of_all(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Of the logarithm averaged over all parameters: its mean over the batches and its limit.

        Then the same of its root mean square, for a factor that varies from batch to batch.
        """
        of_batch, per_error = self.scale.mean(axis=1), self.error * normal(ALARMS / 4)
        mean, size = abs(float(of_batch.mean())), float(np.sqrt(np.mean(of_batch**2)))
        lasting, varying = MEAN_SCALE_SPREAD * per_error, BATCH_SCALE_SPREAD * per_error
        if self.draws:  # what is drawn moves the norms of every batch anew
            t = float(student(np.array(ALARMS / 4), self.batches - 1))
            chance = t * float(of_batch.std(ddof=1)) / math.sqrt(self.batches)
            lasting = math.hypot(lasting, chance) + self.longer
            varying = math.inf
        return (mean, lasting), (size, varying)

    @property
    def all_scaled(self) -> bool:
        """Whether these are beyond their limits, and not by a few parameters alone."""
        if not self._mean_is_off:
            return False
        middle, mean = np.abs(np.median(self.scale, axis=1)), np.abs(self.scale.mean(axis=1))
        return bool(np.median(middle) >= MOST_SCALED * np.median(mean))

    @property
    def scale_excess(self) -> Floats:
        """Shape (parameters,): how many times its limit every scale is; 0 where there is none."""
        size = np.abs(self.scales)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(size == 0, 0.0, size / self.scale_limits)

    @property
    def scaled(self) -> Integers:
        """Indices of the parameters that are scaled, the furthest beyond their limits first.

        Where only the mean of all is off, and not all are: those that make it so.
        """
        size, excess = np.abs(self.scales), self.scale_excess
        off = ~(excess <= 1)
        if not off.any() and self._mean_is_off:
            off = ~(size < MOST_SCALED * size.max())
        found = np.flatnonzero(off)
        return found[np.argsort(-np.nan_to_num(excess[found], nan=np.inf), kind="stable")]

    @property
    def _mean_is_off(self) -> bool:
        return not all(measured <= limit for measured, limit in self.scales_of_all)


def drawn(run: Evidence) -> Floats | None:
    """Shape (parameters,): how far drawing random numbers moves gradients of the first batch.

    The relative distance of two passes over it, over sqrt(2): that of one pass from the mean of
    many. All 0 for a run that draws none; None where no second pass was made.
    """
    samples = run.frozen
    if samples is None or samples.again is None or not len(samples.sketch):
        return None
    squares = np.sum((samples.again - samples.sketch[0]) ** 2, axis=-1) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(squares == 0, 0.0, squares / samples.norm[0] ** 2)
    return np.asarray(np.sqrt(relative), dtype=np.float64)


def measure_errors(test: Evidence, measure: Measure, *, draws: bool = False) -> Errors | None:
    """Compare the frozen batches, or without any the first step; None where neither can be.

    ``draws`` says that the test set rightly draws other random numbers than its control: then
    there are no errors without frozen batches and a second pass over the first of them.
    """
    runs = test, measure.matched, measure.reference
    frozen = [run.frozen for run in runs]
    if all(each is not None for each in frozen):
        ours, like, truth = (each for each in frozen if each is not None)
    elif any(run.frozen_steps for run in runs):
        return None
    else:
        first = [_first_step(run) for run in runs]
        if any(each is None for each in first):
            return None
        ours, like, truth = (each for each in first if each is not None)
    if not ours.names == like.names == truth.names:
        return None
    if not ours.sketch.shape == like.sketch.shape == truth.sketch.shape:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.log(ours.norm / like.norm)
        loss, loss_error = ours.loss / like.loss - 1, like.loss / truth.loss - 1
    error, matched = _error(ours, truth), _error(like, truth)
    of_loss = float(np.sqrt(np.mean(loss_error**2)))
    spread = math.hypot(IMPLEMENTATION_SPREAD, 1 / math.sqrt(SUMS * len(ours.norm)))
    longer = 0.0
    if draws:
        moved = [each for run in runs if (each := drawn(run)) is not None]
        if len(moved) < len(runs) or not moved[0].any() or len(loss) < FEWEST_DRAWN:
            return None
        by_test, by_matched, by_truth = moved
        of_batch = by_test**2 + by_truth**2
        single = np.sqrt(matched**2 + of_batch)
        lasting = np.sqrt(matched**2 + of_batch / len(loss))
        mean = _mean_error(ours, truth)
        # A fault is the same in every batch, and then in the mean, or as other as gradients are.
        in_the_mean = mean * single >= error * lasting
        error, matched = np.where(in_the_mean, (mean, lasting), (error, single))
        longer = abs(float(np.mean(_drawn_length(by_test) - _drawn_length(by_matched))))
        of_loss = math.hypot(of_loss, float(loss.std(ddof=1)))
        spread = math.hypot(spread, DRAWING_SPREAD)
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.hypot(1.0, _of_additions(test, measure.matched) / matched)
    multiple = _multiples(test, measure.matched, ours.names, spread)
    return Errors(
        names=ours.names,
        frozen=frozen[0] is not None,
        draws=draws,
        test=error,
        matched=matched,
        multiple=multiple * np.where(matched > 0, more, 1.0),
        scale=np.where((ours.norm == 0) & (like.norm == 0), 0.0, scale),
        loss=loss,
        loss_error=of_loss,
        longer=longer,
    )


def flaw_of(test: Evidence, measure: Measure) -> Flaw | None:
    """Why errors cannot be measured: in the runs that are the measure, or in frozen steps."""
    for run, what in ((measure.reference, "reference"), (measure.matched, "matched control")):
        flaw = unfinished(run)
        if flaw:
            return Flaw(f"the {what} {run.name} {flaw.what}", flaw.step)
    runs = measure.reference, measure.matched, test
    if len({run.frozen_steps for run in runs}) > 1:
        return Flaw("the test set, its matched control and the reference made other frozen steps")
    return next((flaw for run in runs if (flaw := _frozen_flaw(run, measure.reference))), None)


def _frozen_flaw(run: Evidence, reference: Evidence) -> Flaw | None:
    """What is wrong with the frozen steps of one of the runs."""
    left, theirs = run.frozen, reference.frozen
    if not run.frozen_steps:
        return None
    if left is None or theirs is None or len(left.loss) != run.frozen_steps:
        count = len(left.loss) if left is not None else 0
        return Flaw(f"{run.name} left {count} of {run.frozen_steps} frozen steps")
    if left.problems:
        return Flaw(f"{run.name} could not be measured in full: {left.problems[0]}")
    if left.batch_digests != theirs.batch_digests:
        return Flaw(f"{run.name} took other samples in its frozen steps than {reference.name}")
    return None


def _first_step(run: Evidence) -> FrozenSamples | None:
    """The first step in the form of one frozen batch."""
    sample: TensorSample | None = next((each for each in run.samples if each.step == 1), None)
    loss = run.signals.get("loss_recomputed")
    if sample is None or sample.gradients is None or loss is None or not run.steps.size:
        return None
    order = np.argsort(np.array(sample.names))
    return FrozenSamples(
        names=tuple(sample.names[index] for index in order),
        sizes=sample.sizes[order],
        sketch=sample.gradients.sketch[None, order],
        norm=sample.gradients.norm[None, order],
        loss=loss.values[:1],
        batch_digests=tuple(each or "" for each in run.batch_digests[:1]),
    )


def _error(run: FrozenSamples, truth: FrozenSamples) -> Floats:
    """Shape (parameters,): relative, root mean square over the batches."""
    squares = np.sum((run.sketch - truth.sketch) ** 2, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(squares == 0, 0.0, squares / truth.norm**2)
    return np.asarray(np.sqrt(relative.mean(axis=0)), dtype=np.float64)


def _drawn_length(moved: Floats) -> Floats:
    """Shape (parameters,): logarithm of how much longer norms are by what is drawn."""
    return np.asarray(-np.log1p(-np.minimum(moved**2, MOST_DRAWN)) / 2, dtype=np.float64)


def _mean_error(run: FrozenSamples, truth: FrozenSamples) -> Floats:
    """Shape (parameters,): the norm of the relative errors' mean over the batches."""
    difference = run.sketch - truth.sketch
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(difference == 0, 0.0, difference / truth.norm[..., None])
    return np.asarray(np.linalg.norm(relative.mean(axis=0), axis=-1), dtype=np.float64)


def _multiples(test: Evidence, matched: Evidence, names: tuple[str, ...], spread: float) -> Floats:
    """What errors over each other exceed with the probability of an alarm, per parameter.

    Rounding of implementations, noise of sketches and what is drawn, all taken for lognormal:
    ``spread`` is the standard deviation of the logarithm. A row of an embedding is added up token
    by token in the precision of activations: with more tokens in a batch its error grows as fast.
    """
    multiple = float(np.exp(spread * normal(ALARMS / len(names))))
    more = max(1.0, _tokens_at_once(test) / _tokens_at_once(matched))
    return np.array([multiple * (more if EMBEDDING in name else 1.0) for name in names])


def _of_additions(test: Evidence, matched: Evidence) -> float:
    """Relative error of a gradient that is kept in low precision, and added up in more parts.

    Each microbatch is added to what there is, and the sum is rounded. A sum of n parts is rounded
    at 1/n, 2/n … of its size: n / 3 times, in squares, the error of one rounding.
    """
    extra = max(0, _additions(test) - _additions(matched))
    once = spacing(test, 0.0) * ROUNDED_ONCE
    return float(once * np.sqrt(extra / 3))


def _additions(run: Evidence) -> int:
    """Microbatches of a step on a rank."""
    ran = run.in_force or {}
    parts = ("gradient_accumulation_steps", "pipeline_microbatches")
    return math.prod(int(ran.get(part) or 1) for part in parts)


def _tokens_at_once(run: Evidence) -> float:
    """Tokens that a rank takes in one forward pass."""
    ran = run.in_force or {}
    cp = (ran.get("degrees") or {}).get("cp") or 1
    return float(ran.get("local_batch_size") or 1) * float(ran.get("seq_len") or 1) / cp
