"""From repeats to limits: how many times the calibrated scale a correct run may reach.

**The false-alarm budget.** A limit is exceeded by chance sooner or later if one looks at enough
steps, signals and tensors. So the false-alarm probability of a test set is fixed beforehand and
spent: every look gets a share, and the shares add up to the whole (a union bound, Bonferroni with
weights). That holds however the looks depend on each other, however long the run goes on, and
whenever somebody looks: the rule is anytime-valid in the sense of Ramdas, Grunwald, Vovk and
Shafer, "Game-theoretic statistics and safe anytime-valid inference" (2023), where it is the
simplest case. It has little power against a small bias that lasts; the equivalence tier is for
that.

**Which repeats count** (:func:`applicable`): those that distribute samples to ranks as the test set
does. A repeat that distributes the samples of a batch differently changes the order of sums, as
another data-parallel degree does. In low precision it changes more than that: the entries of one
tensor share a scale, so other samples beside a token change its rounding (gradients of Float8
layers with tensorwise scaling differ by 4% on a debug model, a hundred times as much as after an
ulp on every weight). A test set that distributes samples as its control does must not differ that
much.

**Mixtures of experts** (:func:`routed`): there rounding acts through a step function. A token whose
two best experts are near a tie goes to one or the other by the last bit of a score, and a router's
bias moves by the sign of a count. Most correct runs route alike; one that does not is off by a
jump, in the router's gradient by a tenth and more, which the few repeats may not have shown.
"""

from __future__ import annotations

import re

import numpy as np
from scipy import special

from converge_harness.model import (
    Calibration,
    Evidence,
    Flags,
    Floats,
    InForce,
    Integers,
    Limit,
    Precision,
    RepeatKind,
)

SIGNAL_ALARMS = 5e-5
"""False-alarm probability of one signal of one test set over all of its steps."""
TENSOR_ALARMS = 2e-4
"""The same of all gradients and updates of all parameters of one test set, over all samples."""
MEAN_ALARMS = 2e-4
"""The same of the mean difference of one test set."""
USUAL = 5e-2
"""How often the mean loss of a correct run is further off than is usual among repeats. A smaller
difference shows nothing in a short run, see :mod:`converge_harness.judge.checks.equivalence`; the
level was chosen by measurement, see "Short runs" in docs/operating-characteristics.md."""
CEILING_ALARMS = 1e-2
"""How often a correct run may be above a ceiling that is lower than the limit of its repeats; above
this rate the ceiling is not used."""
FEWEST_REPEATS = 3
"""With fewer repeats than these, Student's t would accept anything; then only the ceilings of
:mod:`converge_harness.judge.compare.floors` hold."""
LEAST_SPREAD = 0.4
"""A few repeats may vary less than repeats usually do: all tensors of a run deviate together."""
WIDER_SPREAD = 1.5
"""Multiple of the spread of tensors between repeats: a few entries near zero whose update AdamW
flips make its tail heavier than a lognormal's (of 70,000 looks at real repeats 70 were above 4
scales, and one at 39: benchmarks/aa.toml)."""
IMPLEMENTATION_FACTOR = 2.0
"""A test set sums in an order that no repeat of the control has (other shards, other kernels): its
rounding may be this many times theirs. Measured on the smoke matrix: see
docs/operating-characteristics.md."""


class HasLimits:
    """A limit for each of several numbers, as its dataclass has them, and where each comes from."""

    __slots__ = ()

    limit: Floats
    learnt: Flags
    """Where repeats of the control decide the limit, and not a floor."""
    floor_origin: str
    learnt_origin: str

    def limit_at(self, index: int) -> Limit:
        origin = self.learnt_origin if self.learnt[index] else self.floor_origin
        return Limit(float(self.limit[index]), origin)


def shares(count: int) -> Floats:
    """Shape (count,): the shares of looks number 1, 2, 3 … in a budget of one.

    Looks 2**j to 2**(j+1)-1 share 1 / ((j+1) (j+2)), so that all shares add up to one over an
    endless run, and a late look is not much less sensitive than an early one.
    """
    return _share_in(_epoch_of(np.arange(1, count + 1)))


def multiples(looks: Integers, alarms: float, repeats: int) -> Floats:
    """How many scales a difference may reach at each look.

    Args:
        looks: shape (n,), which look each is, from 1.
        alarms: false-alarm probability of all looks together.
        repeats: how many repeats the scale was learnt from: a root mean square of so few numbers
            is itself uncertain, and the ratio of one more such number to it follows Student's t
            with as many degrees of freedom (for normal noise; for heavier tails t is heavy, too).

    Returns:
        Shape (n,), the implementation factor included.
    """
    epoch = _epoch_of(looks)
    # All looks of an epoch have the same share: one quantile each.
    share = _share_in(np.arange(int(epoch.max(initial=0)) + 1))
    quantile = _student(alarms * share / 2, repeats)
    return np.asarray(IMPLEMENTATION_FACTOR * quantile[epoch], dtype=np.float64)


def tensor_multiple(tensors: int, sample: int, repeats: int, spread: float | None = None) -> float:
    """The same for one tensor of ``tensors``, at sample number ``sample`` (from 1).

    A tensor's relative difference is a norm over many entries and varies much less from repeat to
    repeat than one number does; how much less, all tensors together show: ``spread`` is the scale
    of the logarithm of one repeat over the others (``TensorScale.gradient_spread``), and the
    multiple is a quantile of a lognormal of that scale. Never more than Student's t allows.
    """
    share = float(shares(sample)[-1])
    alarms = TENSOR_ALARMS * share / (2 * max(tensors, 1))  # gradients and updates
    student = float(_student(np.array(alarms / 2), repeats))
    if spread is None or not np.isfinite(spread):
        return IMPLEMENTATION_FACTOR * student
    wide = WIDER_SPREAD * max(spread, LEAST_SPREAD)
    lognormal = float(np.exp(min(normal(alarms) * wide, 700.0)))
    return IMPLEMENTATION_FACTOR * min(student, lognormal)


def widest_scale(ceiling: float, repeats: int) -> float:
    """The largest scale of repeats at which a ceiling separates correct runs from wrong ones.

    At a larger one more than one correct run in 100 would be above the ceiling by chance.
    """
    return ceiling / (
        IMPLEMENTATION_FACTOR * float(_student(np.array(CEILING_ALARMS / 2), repeats))
    )


def mean_multiple(repeats: int) -> float:
    """How many times the repeats' mean difference a correct run's may be: one look."""
    return IMPLEMENTATION_FACTOR * float(_student(np.array(MEAN_ALARMS / 2), repeats))


def usual_multiple(repeats: int, level: float = USUAL) -> float:
    """The multiple of the repeats' mean difference that correct runs exceed at this probability.

    For a run that deviates as repeats do: the implementation factor only applies where a run FAILs.
    """
    return float(_student(np.array(level / 2), repeats))


def normal(tail: float) -> float:
    """The value that a standard normal number exceeds with this probability."""
    return float(-special.ndtri(tail))


def student(tail: Floats, degrees: int) -> Floats:
    """The values that Student's t with these degrees of freedom exceeds at these probabilities."""
    # scipy.stats takes 50 times as long for the same number, and a model has many tensors.
    return np.asarray(-special.stdtrit(max(degrees, 1), tail), dtype=np.float64)


def _epoch_of(looks: Integers) -> Integers:
    return np.floor(np.log2(np.maximum(looks, 1))).astype(np.int64)


def _share_in(epoch: Integers) -> Floats:
    """The share of each look of an epoch; see :func:`shares`."""
    return np.asarray(1.0 / ((epoch + 1.0) * (epoch + 2.0) * 2.0**epoch), dtype=np.float64)


def _student(tail: Floats, repeats: int) -> Floats:
    """The same for a scale that was learnt from repeats."""
    return student(tail, max(repeats, FEWEST_REPEATS))


def applicable(
    calibration: Calibration | None, test: Evidence, control: Evidence
) -> Calibration | None:
    """The part of a calibration that applies to this pair; all of it when in doubt."""
    if calibration is None or calibration.alike is None or not same_sample_layout(test, control):
        return calibration
    return calibration.alike


def same_sample_layout(test: Evidence, control: Evidence) -> bool:
    """Whether the ranks of both runs get the same tokens, by what was in force."""
    if test.in_force is None or control.in_force is None:
        return False
    if RepeatKind.PERMUTE in (test.repeat, control.repeat):
        return False
    expected = _sample_layout(control.in_force)
    passes = [each.in_force for each in test.passes if each.in_force is not None]
    return all(_sample_layout(ran) == expected for ran in (test.in_force, *passes))


def _sample_layout(ran: InForce) -> tuple[int | None, ...]:
    """What decides which tokens are in one tensor."""
    return (
        ran.dp,
        ran.degrees.get("cp") or 1,
        ran.local_batch_size,
        ran.global_batch_size,
        ran.seq_len,
        ran.gradient_accumulation_steps,
        ran.pipeline_microbatches,
    )


JUMP = 8.0
"""Multiple of what the repeats (or the floor) allow, for a model that routes tokens, after step 1,
when biases have moved by signs; not in float32 if repeats show how experts round. Correct runs (EP,
TP, PP, CP, bf16 of ``benchmarks/bugs/correct_moe.toml``) reached 5.3 times what 11 repeats allow.
"""
FIRST_JUMP = 3.0
"""The same for tensors at step 1, from the same weights and biases; correct runs reached 2.2."""
_SHOWN = 3e-5
"""Median over all tensors of the repeats' relative difference of gradients at step 1, in float32,
from which on repeats show bfloat16 rounding of experts: 2e-4 to 4e-4 with it, 1e-6 and
less without (``moe_debug.toml``). Then correct runs reach 0.3 times what repeats allow."""

_ROUTED = re.compile(r"\brouter\b|(?:\b|_)experts?\b")


def jumps(
    steps: Integers,
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None,
    first: float,
) -> Floats:
    """Shape (steps,): by how much limits are wider because a model routes tokens.

    ``first`` is the multiple at step 1.
    """
    as_shown = test.precision is Precision.FP32 and rounding_of_experts(control, calibration)
    if not routed(test, control) or as_shown:
        return np.ones(steps.shape)
    return np.where(steps > 1, JUMP, first)


def rounding_of_experts(control: Evidence, calibration: Calibration | None) -> bool:
    """Whether repeats of a float32 control show how its experts round in bfloat16."""
    first = calibration.tensors.get(1) if calibration else None
    if first is None or first.gradient is None or not experts_round(control):
        return False
    return float(np.median(first.gradient)) > _SHOWN


def experts_round(control: Evidence) -> bool:
    """Whether results of a float32 control may be rounded to bfloat16: experts of torchtitan are.

    Only ``ulp`` repeats show it. Megatron-Core's experts compute in float32, but evidence does not
    say so, and their limits are wider than need be.
    """
    return control.precision is Precision.FP32 and routed(control, control)


def routed(test: Evidence, control: Evidence) -> bool:
    """Whether a model has experts, as far as the names of its sampled tensors show."""
    samples = (*control.samples[:1], *test.samples[:1])
    return any(_ROUTED.search(name) for sample in samples for name in sample.names)
