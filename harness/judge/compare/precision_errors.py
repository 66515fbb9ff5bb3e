"""Errors of low precision, measured from a reference in float32, at the initial weights.

The distance of two implementations' gradients in bfloat16 hardly shows whether one of them is
correct: both are a percent from the truth. Kernel tests ask something else: is the new
implementation's error against higher precision at most a small multiple of the old one's
(FlashAttention's tests, for instance)? Sketches extend that to whole training steps: for every
parameter, whatever its sharding, the error of a test set against the float32 reference is compared
with that of a run of the same precision, its matched control. Squares are averaged over the frozen
batches first: the error of one batch varies, their mean hardly does.

A factor shows more clearly than an error does, because rounding hardly changes a gradient's norm:
for it exact norms are compared, not sketches.

**A set that draws other random numbers than its control**, as dropout does under another
parallelism, may have other gradients in every batch
(:mod:`converge_harness.judge.compare.random_numbers`). Random numbers have no lasting direction, so
the *mean* of its errors over the batches is compared as well as their size, and limits include the
contribution of random numbers to each. A second pass over the first batch shows how much random
numbers move a gradient. Such a set may compute in float32 as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from converge_harness.judge.compare.floors import spacing
from converge_harness.judge.compare.limits import normal
from converge_harness.judge.compare.random_numbers import (
    FLOAT32_ROUNDING,
    Drawing,
    by_chance,
    drawing_of,
    furthest,
    mean_by_chance,
)
from converge_harness.judge.compare.random_numbers import SPREAD as DRAWING_SPREAD
from converge_harness.judge.soundness import Flaw, unfinished
from converge_harness.model import (
    FEWEST_DRAWN,
    Evidence,
    Flags,
    Floats,
    FrozenSamples,
    InForce,
    Integers,
    TensorSample,
)

ALARMS = 2e-4
"""False-alarm probability of each of the checks here, over all parameters of a test set."""
IMPLEMENTATION_SPREAD = 0.1
"""Standard deviation of the logarithm of the ratio of two correct implementations' errors, once
squares are averaged over batches. Measured on correct set-ups of debug models: at most 0.13 for any
parameter (TP 2), see docs/operating-characteristics.md."""
SCALE_SPREAD = 0.1
"""Standard deviation of the logarithm of the ratio of two correct implementations' norms, in
relative errors of the parameter's gradient: how much of an error is parallel to the gradient.
Measured at most 0.07 (0.2 for embeddings that are summed in other batches)."""
LASTING_SPREAD = 1.0
"""The same of the mean difference of two correct losses, in root mean squares of the matched
control's error: rounding the same weights shifts all batches alike, so a mean need not vanish."""
MEAN_SCALE_SPREAD, BATCH_SCALE_SPREAD = 0.01, 0.025
"""The same of the mean over all parameters, in errors of the median parameter: over all batches,
and batch by batch. Measured at most 0.02 and 0.05 (TP 2, of a mixture of experts)."""
ROUNDED_ONCE = 0.2
"""Root mean square of a rounding's relative error, in spacings: 1 / sqrt(12) of the numbers between
two powers of two, which are 1.44 times the lower one on average."""
MOST_SCALED = 0.5
"""Where only some parameters are scaled, the median scale is below this share of the mean."""
FEWEST_SCALED = 8
"""Where other gradients are zero and fewer are left than these, the mean of their scales spreads as
that of so many independent ones. (In torchtitan's Muse Glimmer, whose output projection starts at
zero, one parameter has a gradient at the initial weights.)"""
OUTLYING = 5.0
"""A length in the matched control is out of line if it is off by this many times as much as that of
the median parameter: 3.4 standard deviations of a normal one."""
ROUNDED_ALIKE = 0.25
"""Most by which one rounding changes the length of a whole gradient, in spacings. Numbers of few
digits times a factor just above a power of two are all rounded up: 8 binary digits times 1 + 1/256
become 0.22 spacings longer on average (0.0018 was measured)."""
LOSS_ROUNDING = 2.0**-24
"""Relative error of a loss, which is computed in float32: half a unit in the last place. Where
every logit is zero, losses differ by no more, whatever the precision of the logits."""
EMBEDDING = "embed"
"""Names of embeddings hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionRuns:
    """The runs that errors of a test set are measured against."""

    matched: Evidence
    """Of the test set's own precision: its errors are the yardstick."""
    reference: Evidence
    """In float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """A test set and its matched control against the reference; parameters in the names' order."""

    names: tuple[str, ...]
    frozen: bool
    """Whether these are frozen batches, and not only the first step."""
    test: Floats
    """Shape (parameters,): relative error of the gradient, root mean square over the batches. For a
    set that draws random numbers it is the norm of the errors' mean over the batches, if that
    exceeds the contribution of the random numbers by more."""
    matched: Floats
    """The same of the matched control; for a set that draws, with the contribution of that."""
    multiple: Floats
    """Shape (parameters,): how many times the matched control's error is allowed."""
    scale: Floats
    """Shape (batches, parameters): logarithm of the norm over the matched control's; where that is
    far from the reference's, only what is beyond both."""
    loss: Floats
    """Shape (batches,): relative difference of the loss to the matched control's, signed."""
    loss_error: float
    """Root mean square of the matched control's relative difference to the reference."""
    rounded_alike: float = 0.0
    """By how much a rounding that the matched control does not make may scale all gradients."""
    drawing: Drawing | None = None
    """The random numbers of a set that is meant to draw others than its control."""

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
        """Shape (parameters,): whose error is larger than rounding makes it, or NaN."""
        return ~(self.ratio <= self.multiple)

    @property
    def rounded(self) -> Flags:
        """Shape (parameters,): whose gradient is rounded at all; one that is zero is not."""
        off = np.any(self.scale != 0, axis=0)
        return np.asarray((self.test != 0) | (self.matched != 0) | off, dtype=np.bool_)

    @property
    def scale_of_rounded(self) -> Floats:
        """Shape (batches, rounded parameters): their scales."""
        return np.asarray(self.scale[:, self.rounded], dtype=np.float64)

    @property
    def error(self) -> float:
        """The matched control's error, of the median parameter that is rounded."""
        matched = self.matched[self.rounded]
        return float(np.median(matched)) if matched.size else 0.0

    @property
    def scales(self) -> Floats:
        """Shape (parameters,): mean of the logarithm of the scale over the batches."""
        return np.asarray(self.scale.mean(axis=0), dtype=np.float64)

    @property
    def scale_limits(self) -> Floats:
        """Shape (parameters,): how large these may be."""
        times = normal(ALARMS / len(self.names) / 2)
        limits = self.matched * self.multiple * SCALE_SPREAD * times
        if self.drawing is None:
            return limits
        return np.asarray(np.hypot(limits, times * self.drawing.uncertainty), dtype=np.float64)

    @property
    def scales_of_all(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Of the logarithm averaged over the rounded parameters: mean over the batches, and limit.

        Then the same of its root mean square, for a factor that varies from batch to batch.
        """
        scale = self.scale_of_rounded
        count = scale.shape[1]
        if not count:
            return (0.0, 0.0), (0.0, 0.0)
        of_batch, per_error = scale.mean(axis=1), self.error * normal(ALARMS / 4)
        mean, size = abs(float(of_batch.mean())), float(np.sqrt(np.mean(of_batch**2)))
        few = count < min(FEWEST_SCALED, len(self.names))
        wider = SCALE_SPREAD / math.sqrt(count) / MEAN_SCALE_SPREAD if few else 1.0
        lasting = wider * MEAN_SCALE_SPREAD * per_error + self.rounded_alike
        varying = wider * BATCH_SCALE_SPREAD * per_error + self.rounded_alike
        if self.drawing is not None:  # random numbers move the norms of each batch differently
            of_all = float(np.linalg.norm(self.drawing.uncertainty[self.rounded])) / count
            chance = mean_by_chance(of_batch, ALARMS / 4)
            lasting = math.hypot(lasting, chance, normal(ALARMS / 4) * of_all)
            size, varying = furthest(of_batch), varying + by_chance(of_batch)
        return (mean, lasting), (size, varying)

    @property
    def all_scaled(self) -> bool:
        """Whether these are beyond their limits, and not because of a few parameters."""
        if not self._mean_is_off:
            return False
        scale = self.scale_of_rounded
        middle, mean = np.abs(np.median(scale, axis=1)), np.abs(scale.mean(axis=1))
        return bool(np.median(middle) >= MOST_SCALED * np.median(mean))

    @property
    def scale_excess(self) -> Floats:
        """Shape (parameters,): every scale over its limit; 0 where there is none."""
        size = np.abs(self.scales)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(size == 0, 0.0, size / self.scale_limits)

    @property
    def scaled(self) -> Integers:
        """Indices of the parameters that are scaled, the largest excess first.

        Where only the mean of all is off, and not all are: those that cause it.
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


def measure_errors(test: Evidence, measure: PrecisionRuns, *, draws: bool = False) -> Errors | None:
    """Compare the frozen batches, or without any the first step; None where neither can be.

    ``draws`` says that the test set is meant to draw other random numbers than its control: then
    None is also returned where these cannot be judged (:func:`precision_flaw` says why).
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
        shortened = np.log(like.norm / truth.norm)
        loss, loss_error = ours.loss / like.loss - 1, like.loss / truth.loss - 1
    errors = _errors(ours, truth)
    error, matched = _size_of(errors), _size_of(_errors(like, truth))
    # The squared norm of a sketch of k projections has the relative variance 2 / k.
    projections = ours.sketch.shape[-1] * len(ours.norm)
    spread = math.hypot(IMPLEMENTATION_SPREAD, 1 / math.sqrt(projections))
    drawing = None
    if draws:
        found = drawing_of(test, measure.matched, measure.reference, matched)
        if isinstance(found, Flaw) or len(loss) < FEWEST_DRAWN:
            return None
        drawing = found
        rounding = matched**2 + FLOAT32_ROUNDING**2
        single = np.sqrt(rounding + drawing.variance)
        lasting = np.sqrt(rounding + drawing.variance / len(loss))
        mean = np.linalg.norm(errors.mean(axis=0), axis=-1)
        # A fault that is the same in every batch shows in the mean, any other in the size.
        in_the_mean = mean / lasting >= error / single
        error, matched = np.where(in_the_mean, (mean, lasting), (error, single))
        scale = scale - drawing.longer
        spread = math.hypot(spread, DRAWING_SPREAD)
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.hypot(1.0, _of_additions(test, measure.matched) / matched)
    multiple = _multiples(test, measure.matched, ours.names, spread)
    measured = Errors(
        names=ours.names,
        frozen=frozen[0] is not None,
        test=error,
        matched=matched,
        multiple=multiple * np.where(matched > 0, more, 1.0),
        scale=np.where((ours.norm == 0) & (like.norm == 0), 0.0, scale),
        loss=loss,
        loss_error=math.hypot(float(np.sqrt(np.mean(loss_error**2))), LOSS_ROUNDING),
        rounded_alike=_rounded_alike(test, measure.matched),
        drawing=drawing,
    )
    return measured if draws else _beyond_both(measured, shortened)


def _beyond_both(errors: Errors, shortened: Floats) -> Errors:
    """The errors, with scales of some parameters counted from the reference's norm.

    They are those whose norm in the matched control is itself further from the reference's than
    the limit of a scale, or out of line with other parameters: its rounding changes lengths, so a
    length between the two is right. (torch adds up the gradient of a bfloat16 LayerNorm's bias in
    bfloat16 on a CPU, where a sum stops growing at 256 times what is added: 13% too short at 512
    tokens, and less on ranks that have fewer. One that is 1% short hardly exceeds its own limit,
    but moves the mean of all parameters by more than that of a common factor.)

    Args:
        shortened: shape (batches, parameters), logarithm of the matched control's norm over the
            reference's.
    """
    own = shortened.mean(axis=0)
    off = np.abs(own[np.isfinite(own) & (own != 0)])
    usual = float(np.median(off)) if off.size else 0.0
    least = np.minimum(errors.scale_limits, OUTLYING * usual)
    known = np.isfinite(own) & (np.abs(own) > least)
    if not known.any():
        return errors
    back = np.sign(errors.scale) == -np.sign(shortened)
    beyond = np.sign(errors.scale) * np.maximum(np.abs(errors.scale) - np.abs(shortened), 0.0)
    return replace(errors, scale=np.where(known & back, beyond, errors.scale))


def precision_flaw(test: Evidence, measure: PrecisionRuns, *, draws: bool = False) -> Flaw | None:
    """Why errors cannot be measured: a flaw of the measuring runs, or of frozen steps.

    For a set that ``draws`` random numbers of its own also why these cannot be judged.
    """
    for run, what in ((measure.reference, "reference"), (measure.matched, "matched control")):
        flaw = unfinished(run)
        if flaw:
            return Flaw(f"the {what} {run.name} {flaw.what}", flaw.step)
    runs = measure.reference, measure.matched, test
    if len({run.frozen_steps for run in runs}) > 1:
        return Flaw("the test set, its matched control and the reference made other frozen steps")
    broken = next((flaw for run in runs if (flaw := _frozen_flaw(run, measure.reference))), None)
    if broken or not draws:
        return broken
    like, truth = measure.matched.frozen, measure.reference.frozen
    if like is None or truth is None or like.sketch.shape != truth.sketch.shape:
        return Flaw(f"{measure.matched.name} and {measure.reference.name} left no frozen steps")
    rounding = _size_of(_errors(like, truth))
    found = drawing_of(test, measure.matched, measure.reference, rounding)
    return found if isinstance(found, Flaw) else None


def _frozen_flaw(run: Evidence, reference: Evidence) -> Flaw | None:
    """A clause on what is wrong with the frozen steps of one of the runs."""
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


def _errors(run: FrozenSamples, truth: FrozenSamples) -> Floats:
    """Shape (batches, parameters, k): sketches of the gradients' relative errors."""
    difference = run.sketch - truth.sketch
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(difference == 0, 0.0, difference / truth.norm[..., None])
    return np.asarray(relative, dtype=np.float64)


def _size_of(errors: Floats) -> Floats:
    """Shape (parameters,): of such sketches, root mean square over the batches."""
    return np.asarray(np.sqrt(np.sum(errors**2, axis=-1).mean(axis=0)), dtype=np.float64)


def _multiples(test: Evidence, matched: Evidence, names: tuple[str, ...], spread: float) -> Floats:
    """What the ratio of two errors exceeds with the probability of an alarm, per parameter.

    Rounding of implementations, noise of sketches and random numbers, all assumed lognormal:
    ``spread`` is the standard deviation of the logarithm. A row of an embedding is summed token by
    token in the precision of activations: its error grows as fast as the tokens in a batch.
    """
    multiple = float(np.exp(spread * normal(ALARMS / len(names))))
    more = max(1.0, _tokens_at_once(test) / _tokens_at_once(matched))
    return np.array([multiple * (more if EMBEDDING in name else 1.0) for name in names])


def _of_additions(test: Evidence, matched: Evidence) -> float:
    """Relative error of a gradient that is kept in low precision, and summed in more parts.

    Each microbatch is added to the sum so far, and the sum is rounded. A sum of n parts is rounded
    at 1/n, 2/n … of its size: n / 3 times, in squares, the error of one rounding.
    """
    extra = max(0, _additions(test) - _additions(matched))
    once = _spacing_of_gradients(test) * ROUNDED_ONCE
    return float(once * np.sqrt(extra / 3))


def _rounded_alike(test: Evidence, matched: Evidence) -> float:
    """The largest common factor of a test set that keeps its gradients in a coarser type."""
    own = _spacing_of_gradients(test)
    return own * ROUNDED_ALIKE if own > _spacing_of_gradients(matched) else 0.0


def _spacing_of_gradients(run: Evidence) -> float:
    """Of the type in which a run adds up gradients: that of its parameters, or float32 (0)."""
    ran = run.in_force or InForce()
    return 0.0 if ran.config.get(run.keys.gradients_in_float32) is True else spacing(run, 0.0)


def _additions(run: Evidence) -> int:
    """How many microbatches a step has on a rank."""
    ran = run.in_force or InForce()
    return (ran.gradient_accumulation_steps or 1) * (ran.pipeline_microbatches or 1)


def _tokens_at_once(run: Evidence) -> float:
    """Tokens that a rank takes in one forward pass."""
    ran = run.in_force or InForce()
    cp = ran.degrees.get("cp") or 1
    return (ran.local_batch_size or 1) * (ran.seq_len or 1) / cp
