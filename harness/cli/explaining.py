"""``--explain``: whether a failure of low precision is made by rounding, or is there in float32."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.cli import matrix
from harness.cli.running import gpu_ids, run_jobs
from harness.cli.shared import say
from harness.model import Judgement, Outcome, Plan, Verdict
from harness.plan import in_float32, select
from harness.store import Store

FOLDER = "float32"
"""Of the report in float32, in that of the matrix."""
_NAMED = 3


def explain(
    console: Console,
    plan: Plan,
    verdicts: Sequence[Verdict],
    folder: Path,
    *,
    store: Store,
    arguments: argparse.Namespace,
) -> None:
    """Run what failed in low precision again in float32, and say what follows from that."""
    failed = {
        verdict.name: verdict
        for verdict in verdicts
        if matrix.may_be_rounding(plan.job(verdict.name), verdict)
    }
    if not failed:
        say(console, "nothing failed in low precision: there is nothing to explain in float32")
        return
    experiment = in_float32(select(plan.experiment, list(failed)))
    experiment = replace(experiment, name=f"{experiment.name} in float32")
    made = matrix.plan_experiment(experiment, on_gpu=bool(gpu_ids()), slots=arguments.slots)
    ran = run_jobs(made, store, arguments, console)
    evidences = matrix.read_evidence(made, ran.records)
    judged = matrix.judge_matrix(
        made,
        ran.records,
        evidences,
        matrix.calibrate_controls(made, evidences),
        versions=matrix.versions_of(made),
        entropy_floor=None,
    )
    from harness.report import write_reports  # noqa: PLC0415 - a plan draws nothing

    paths = write_reports(judged.view, folder / FOLDER)
    console.print()
    for verdict in judged.verdicts:
        if verdict.name in failed:
            say(console, explanation(failed[verdict.name], verdict))
    say(console, f"report in float32: {paths[0]}")


def explanation(low: Verdict, plain: Verdict) -> str:
    """What a set's verdict in float32 means for its failure in low precision."""
    begin = f"{low.name} in float32: {plain.judgement.value}"
    if plain.judgement is Judgement.PASS:
        where = _where(low)
        return f"{begin}. It is right in float32; the difference is made by rounding{where}"
    if plain.judgement is Judgement.FAIL:
        since = f" at step {plain.onset_step}" if plain.onset_step is not None else ""
        return f"{begin}{since}. It is no rounding: {plain.cause}"
    return f"{begin}, which tells nothing of rounding: {plain.cause}"


def _where(low: Verdict) -> str:
    """The parameters that were off first, the furthest first."""
    found = [check for check in low.checks if check.outcome is Outcome.FAIL and check.deviations]
    if not found:
        return ""
    first = min(found, key=lambda check: check.onset or 0)
    names = [each.tensor for each in first.deviations[:_NAMED]]
    more = len(first.deviations) - len(names)
    others = f" and {more} more" if more else ""
    return f" in {', '.join(names)}{others}, from step {first.onset} on"
