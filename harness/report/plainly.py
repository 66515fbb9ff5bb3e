"""Errors and verdicts in words that are safe to print: names and messages come from anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.model import Check, Deviation, Limit, RankError, Verdict
from harness.report.text import from_here, plain, plain_block


def plain_error(error: RankError | None) -> RankError | None:
    """An error whose message and traceback are safe to print."""
    if error is None:
        return None
    return RankError(error.rank, plain(error.message), plain_block(error.traceback))


def plain_verdict(verdict: Verdict, here: Path | None) -> Verdict:
    """A verdict whose words are safe to print; paths below ``here`` are written as from there."""
    return replace(
        verdict,
        name=plain(verdict.name),
        control=plain(verdict.control),
        cause=plain(verdict.cause),
        look_at=plain(verdict.look_at),
        next_command=from_here(verdict.next_command, here),
        checks=tuple(_plain_check(check) for check in verdict.checks),
    )


def _plain_check(check: Check) -> Check:
    limit = check.limit and Limit(check.limit.value, plain(check.limit.origin))
    return replace(
        check,
        name=plain(check.name),
        title=plain(check.title),
        limit=limit,
        unit=plain(check.unit),
        detail=plain(check.detail),
        deviations=tuple(_plain_deviation(each) for each in check.deviations),
    )


def _plain_deviation(deviation: Deviation) -> Deviation:
    return replace(deviation, tensor=plain(deviation.tensor))
