"""Whether rounding explains failures, and what else may be shrunk; ``converge run --explain``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from converge_harness.matrix.calibrate import calibrate_controls
from converge_harness.matrix.judge import (
    Judged,
    judge_matrix,
    may_be_rounding,
    may_shrink,
    read_evidence,
    versions_of,
)
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.run import Ran, gpu_ids
from converge_harness.model import Judgement, Outcome, Plan, Verdict
from converge_harness.plan import in_float32, select

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Explained:
    """The sets that failed in low precision, and their results in float32."""

    judged: Judged
    """The matrix in float32."""
    explanations: tuple[str, ...]
    """A sentence for every failed set."""


def explain(
    plan: Plan,
    verdicts: Sequence[Verdict],
    run: Callable[[Plan], Ran],
    slots: int | None = None,
) -> Explained | None:
    """Run sets that failed in low precision again in float32; None if none failed."""
    failed = {
        verdict.name: verdict
        for verdict in verdicts
        if verdict.judgement is Judgement.FAIL and may_be_rounding(plan.job(verdict.name), verdict)
    }
    if not failed:
        return None
    experiment = in_float32(select(plan.experiment, list(failed)))
    experiment = replace(experiment, name=f"{experiment.name} in float32")
    made = plan_experiment(experiment, on_gpu=bool(gpu_ids()), slots=slots)
    ran = run(made)
    evidences = read_evidence(made, ran.records, ran.kept)
    judged = judge_matrix(
        made,
        ran.records,
        evidences,
        calibrate_controls(made, evidences),
        versions=versions_of(made),
        entropy_floor=None,
    )
    return Explained(
        judged,
        tuple(
            explanation(failed[verdict.name], verdict)
            for verdict in judged.verdicts
            if verdict.name in failed
        ),
    )


def to_shrink(
    plan: Plan, verdicts: Sequence[Verdict], explained: Explained | None
) -> tuple[str, ...]:
    """The failed test sets with several parts that do not fail by rounding alone."""
    failed = {each.name for each in not_rounded(verdicts, explained)}
    tests = [spec.name for spec in plan.experiment.tests]
    return tuple(name for name in tests if name in failed and may_shrink(plan, plan.job(name)))


def not_rounded(verdicts: Sequence[Verdict], explained: Explained | None) -> tuple[Verdict, ...]:
    """The failed sets that do not pass in float32."""
    in_float32 = explained.judged.verdicts if explained else ()
    rounded = {each.name for each in in_float32 if each.judgement is Judgement.PASS}
    failed = (each for each in verdicts if each.judgement is Judgement.FAIL)
    return tuple(each for each in failed if each.name not in rounded)


def explanation(low: Verdict, plain: Verdict) -> str:
    """What a set's verdict in float32 means for its failure in low precision."""
    begin = f"{low.name} in float32: {plain.judgement.value}"
    if plain.judgement is Judgement.PASS:
        where = _where(low)
        return f"{begin}. It passes in float32, so the difference comes from rounding{where}"
    if plain.judgement is Judgement.FAIL:
        since = f" at step {plain.onset_step}" if plain.onset_step is not None else ""
        return f"{begin}{since}. It is not rounding: {plain.cause}"
    return f"{begin}, which says nothing about rounding: {plain.cause}"


def _where(low: Verdict) -> str:
    """The parameters that were off first, the largest difference first."""
    found = [check for check in low.checks if check.outcome is Outcome.FAIL and check.deviations]
    if not found:
        return ""
    first = min(found, key=lambda check: check.onset or 0)
    names = [each.tensor for each in first.deviations[:_NAMED]]
    more = len(first.deviations) - len(names)
    others = f" and {more} more" if more else ""
    return f" in {', '.join(names)}{others}, from step {first.onset} on"
