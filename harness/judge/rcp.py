"""A submission to MLPerf Training against its reference convergence points (RCPs).

MLPerf asks one thing: that a submission does not converge *faster* than the RCP by more than
chance, since it would then train something else. The rule is that of ``mlperf_logging.rcp_checker``
(github.com/mlcommons/logging, commit 7bbf792), with its default, pruned points:

* Lengths are averaged without the shortest and the longest one (of ``unet3d`` without four each);
  the spread is that of all of them.
* A point that is longer than what its neighbours give by interpolation in the batch size is left
  out, as are all below the batch size that is fastest.
* The shortest mean that is allowed lies as far below the RCP's as a one-sided Student's t of
  5% reaches, both sides having the RCP's spread, and the submission as many runs as MLPerf
  demands (:data:`SUBMISSION_RUNS`) however many more it has; of ``llama31_405b`` it lies 46,080
  samples lower.
* One run may miss its target (of ``unet3d`` four); its length counts as 1e9, which is the longest
  but of ``gpt3``, whose runs are longer: there it is the shortest.

Stricter than the checker, which counts no runs: fewer than are demanded are INVALID.

We ask the opposite question as well: that the submission converges *no later* than the RCP
by more than a margin (:func:`converge_harness.judge.compare.seeds.over_seeds`, one-sided).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from converge_harness.judge.checks.equivalence import OUTCOMES
from converge_harness.judge.checks.question import CheckResult, check, invalid, passed, skipped
from converge_harness.judge.compare.seeds import FEWEST_SEEDS, Group, over_seeds
from converge_harness.judge.compare.tost import ALPHA, Answer
from converge_harness.model import (
    Ask,
    CauseClass,
    Check,
    Convergence,
    Judgement,
    Limit,
    Outcome,
    Rcp,
    Tier,
    Verdict,
)
from converge_harness.wording import counted

SUBMISSION_RUNS = {
    "bert": 10,
    "cosmoflow": 10,
    "deepcam": 5,
    "deepseekv3_671b": 3,
    "dlrm_dcnv2": 10,
    "flux1": 10,
    "gnn": 10,
    "gpt3": 3,
    "gpt_oss_20b": 10,
    "llama2_70b_lora": 10,
    "llama31_405b": 3,
    "llama31_8b": 10,
    "maskrcnn": 5,
    "oc20": 5,
    "openfold": 10,
    "qwen35_397b_grpo": 3,
    "resnet": 5,
    "retinanet": 5,
    "rgat": 10,
    "rnnt": 10,
    "ssd": 5,
    "stable_diffusion": 10,
    "unet3d": 40,
}
"""Runs that MLPerf demands of a submission, by benchmark (mlperf_logging rcp_checker)."""

_MISSED = 1e9
"""Length of a run that missed its target, in samples or epochs (mlperf_logging rcp_checker)."""
_FURTHER_BELOW = {"llama31_405b": 46_080}
"""Samples by which the shortest mean may lie below chance (mlperf_logging rcp_checker, since
ruleset 5.0.0, which is the first with that benchmark)."""


@dataclass(frozen=True, slots=True)
class RcpAtBatchSize:
    """What a submission at one global batch size is compared with."""

    batch_size: int
    mean: float
    """Of the lengths but the shortest and longest."""
    deviation: float
    """Standard deviation of all lengths, with their number in the denominator."""
    runs: int
    """How many runs the mean is of; for an interpolated mean, as many as MLPerf assumes."""
    group: Group
    """All lengths, for the comparison that leaves none out."""
    how: str = ""
    """Where it comes from, if it is not a point of the table."""

    def fastest(self, benchmark: str) -> float:
        """The shortest mean of a submission that is allowed; in samples or epochs, as the mean."""
        theirs = SUBMISSION_RUNS[benchmark] - 2  # of unet3d, too (mlperf_logging rcp_checker)
        degrees = self.runs + theirs - 2
        reach = 0.0
        if self.deviation > 0 and degrees > 0:
            spread = math.sqrt(1 / self.runs + 1 / theirs)
            reach = float(special.stdtrit(degrees, 1 - ALPHA)) * spread
        further = _FURTHER_BELOW.get(benchmark, 0)
        return float(max(self.mean - reach * self.deviation - further, 0.0))


@dataclass(frozen=True, slots=True)
class RcpInputs:
    """The inputs of these checks."""

    points: tuple[Rcp, ...]
    runs: tuple[Convergence, ...]
    margin: float | None
    """Relative to the RCP's mean length; None: only MLPerf's rule is asked."""


def judge_submission(name: str, table: str, submission: RcpInputs) -> Verdict:
    """The verdict on a submission called ``name``, by the points of a ``table``.

    Raises ValueError without runs or points.
    """
    if not submission.runs or not submission.points:
        raise ValueError("a submission has runs, and a table has points")
    later = (rcp_no_later,) if submission.margin is not None else ()
    checks: tuple[Check, ...] = ()
    for questions in ((submission_comparable,), (target_reached,), (rcp_not_faster, *later)):
        if all(check.outcome is Outcome.PASS for check in checks):
            checks += tuple(question(submission) for question in questions)
    worst = min((check.outcome for check in checks), key=_WORST.index)
    judgement = Judgement(worst.value)
    return Verdict(
        name=name,
        control=table,
        judgement=judgement,
        cause=""
        if judgement is Judgement.PASS
        else next(check.detail for check in checks if check.outcome is worst),
        cause_class=CauseClass.UNKNOWN if judgement is Judgement.FAIL else None,
        checks=checks,
        ask=Ask.NO_WORSE,
        not_asked=() if submission.margin is not None else (rcp_no_later.name,),
    )


_WORST = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE, Outcome.PASS)


@check(Tier.INTEGRITY)
def submission_comparable(points: tuple[Rcp, ...], runs: tuple[Convergence, ...]) -> CheckResult:
    """The runs are of one benchmark and batch size, for which the table has a point.

    As many runs as MLPerf demands, or more; of a point enough for a mean without the shortest and
    the longest.
    """
    first = runs[0]
    for run in runs:
        if run.benchmark != points[0].benchmark:
            return invalid(f"{run.name} is of {run.benchmark}, the table of {points[0].benchmark}")
        if run.batch_size != first.batch_size:
            return invalid(
                f"global batch size of {run.name} is {run.batch_size}, of {first.name} "
                f"{first.batch_size}"
            )
    if few := _too_few(points, runs):
        return invalid(few)
    if _rcp_at(points, first.batch_size) is None:
        return _no_point(points, first.batch_size)
    return passed(f"{len(runs)} runs at global batch size {first.batch_size}")


@check(Tier.INTEGRITY)
def target_reached(runs: tuple[Convergence, ...]) -> CheckResult:
    """The runs reach their target, but for one (of ``unet3d`` four).

    A run that stopped otherwise, or did not stop at all, counts as one of 1e9 in MLPerf's mean.
    """
    allowed = _left_out(runs[0].benchmark)
    endless = [run.name for run in runs if not math.isfinite(run.length)]
    if len(endless) > allowed:
        return CheckResult(
            Outcome.FAIL,
            f"{len(endless)} of {len(runs)} runs miss the target ({', '.join(endless)}): MLPerf "
            f"allows {allowed}",
        )
    return passed(f"{', '.join(endless)} misses the target" if endless else "")


@check(Tier.EQUIVALENCE)
def rcp_not_faster(points: tuple[Rcp, ...], runs: tuple[Convergence, ...]) -> CheckResult:
    """MLPerf's rule: the mean length is not shorter than the RCP's beyond chance.

    A run that converges faster than its RCP by more than chance trains something else: with
    other hyperparameters, data or target.
    """
    size = runs[0].batch_size
    rcp = _rcp_at(points, size)
    if rcp is None:
        return _no_point(points, size)
    mean = _olympic(tuple(run.length for run in runs), runs[0].benchmark)
    fastest = rcp.fastest(runs[0].benchmark)
    said = (
        f"mean length {mean:,.6g}, of the RCP {rcp.mean:,.6g}{rcp.how}; at least "
        f"{fastest:,.6g} is allowed"
    )
    limit = Limit(fastest, "MLPerf's rule, at 5%")
    if mean < fastest and rcp.batch_size != size:
        return invalid(
            f"{said}; that point is of another batch size, and a faster one needs its own"
        )
    if mean < fastest:
        return CheckResult(Outcome.FAIL, f"faster than chance allows: {said}", mean, limit)
    if mean < rcp.mean:
        said += f"; MLPerf multiplies its score by {rcp.mean / mean:.4f}"
    return CheckResult(Outcome.PASS, said, mean, limit)


@check(Tier.EQUIVALENCE)
def rcp_no_later(
    points: tuple[Rcp, ...], runs: tuple[Convergence, ...], margin: float | None
) -> CheckResult:
    """The mean length of all runs is no longer than the RCP's by more than the margin.

    Welch's t on all lengths, one-sided: shorter is fine. With a run that misses its target there is
    no PASS.
    """
    rcp = _rcp_at(points, runs[0].batch_size)
    if margin is None or rcp is None:
        return skipped("no margin to compare by")
    if rcp.batch_size != runs[0].batch_size:
        return invalid(
            f"no point for global batch size {runs[0].batch_size} to be later than: the smallest "
            f"is {rcp.batch_size}"
        )
    limit = Limit(margin, "margin set in the file")
    there = np.array([run.length for run in runs if math.isfinite(run.length)])
    if there.size < FEWEST_SEEDS:
        return invalid(f"{counted(int(there.size), 'run')} at the target")
    group = Group.of(there)
    found = over_seeds(group, rcp.group, margin, one_sided=True)
    endless = len(runs) - int(there.size)
    # It is not known how long it would have trained: it can only raise the mean.
    shorter = endless and found.outcome is not Answer.DIFFERENT
    return CheckResult(
        Outcome.INCONCLUSIVE if shorter else OUTCOMES[found.outcome],
        f"mean length of {group.seeds} runs {found.difference:+.2g} ± {found.half_width:.1g}, "
        f"relative to the RCP's {rcp.group.seeds}"
        + (f"; {counted(endless, 'run')} never at the target" if endless else ""),
        measured=max(found.bound, 0.0),
        limit=limit,
        unit="relative",
    )


CHECKS = (submission_comparable, target_reached, rcp_not_faster, rcp_no_later)


def _too_few(points: Sequence[Rcp], runs: Sequence[Convergence]) -> str:
    """Which side has fewer runs than it needs, or nothing."""
    benchmark = runs[0].benchmark
    demanded = SUBMISSION_RUNS.get(benchmark)
    if demanded is None:
        return f"how many runs MLPerf demands of {benchmark} is not known"
    if len(runs) < demanded:
        ours = counted(len(runs), "run")
        return f"the submission has {ours}: MLPerf demands {demanded} of {benchmark}"
    fewest = 2 * _left_out(benchmark) + 1
    for point in points:
        if (count := len(point.lengths)) < fewest:
            return f"{point.name} has {counted(count, 'run')}: a mean needs at least {fewest}"
    return ""


def _left_out(benchmark: str) -> int:
    """Runs that a mean leaves out at either end."""
    return 4 if benchmark == "unet3d" else 1


def _olympic(lengths: Sequence[float], benchmark: str) -> float:
    cut = _left_out(benchmark)
    counted_as = sorted(each if math.isfinite(each) else _MISSED for each in lengths)
    return float(np.mean(counted_as[cut : len(lengths) - cut]))


def _of_point(point: Rcp) -> RcpAtBatchSize:
    lengths = np.array(point.lengths)
    return RcpAtBatchSize(
        point.batch_size,
        _olympic(point.lengths, point.benchmark),
        float(np.std(lengths)),
        len(point.lengths) - 2 * _left_out(point.benchmark),
        Group.of(lengths),
    )


def _between(
    low: RcpAtBatchSize, high: RcpAtBatchSize, size: int, benchmark: str
) -> RcpAtBatchSize:
    """Mean and spread by linear interpolation in the batch size, in samples."""
    share = (size - low.batch_size) / (high.batch_size - low.batch_size)

    def of(one: float, other: float) -> float:
        return one + share * (other - one)

    return RcpAtBatchSize(
        size,
        of(low.mean, high.mean),
        of(low.deviation, high.deviation),
        2 * SUBMISSION_RUNS[benchmark],
        Group(
            min(low.group.seeds, high.group.seeds),
            of(low.group.mean, high.group.mean),
            of(low.group.variance, high.group.variance),
        ),
        f" (between its points at {low.batch_size} and {high.batch_size})",
    )


def _pruned(points: Sequence[Rcp]) -> list[RcpAtBatchSize]:
    """The points that MLPerf compares submissions with, by batch size."""
    every = sorted(map(_of_point, points), key=lambda each: each.batch_size)
    fastest = min(every, key=lambda each: each.mean)
    kept = [each for each in every if each.batch_size >= fastest.batch_size]
    at = 1
    while at < len(kept) - 1:
        low, this, high = kept[at - 1 : at + 2]
        if this.mean > _between(low, high, this.batch_size, points[0].benchmark).mean:
            del kept[at]  # MLPerf's checker does not look again at the one before
        else:
            at += 1
    return kept


def _rcp_at(points: Sequence[Rcp], size: int) -> RcpAtBatchSize | None:
    """What a batch size, in samples, is compared with; None above all points of the table."""
    kept = _pruned(points)
    below = [each for each in kept if each.batch_size <= size]
    above = [each for each in kept if each.batch_size >= size]
    if not above:
        return None
    if not below:
        least = above[0]
        return replace(least, how=f" (its smallest point, at {least.batch_size})")
    low, high = below[-1], above[0]
    return low if low is high else _between(low, high, size, points[0].benchmark)


def _no_point(points: Sequence[Rcp], size: int) -> CheckResult:
    sizes = ", ".join(str(each.batch_size) for each in points)
    return invalid(
        f"the table has no point for global batch size {size}, nor a larger one (it has {sizes})"
    )
