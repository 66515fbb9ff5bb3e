"""One line of ``metrics.jsonl`` from what every rank saw of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from harness.rank.digest import combine
from harness.rank.grad_norm import global_norm


class Row(NamedTuple):
    """What one rank saw of a step. All float64, so that one gather carries it."""

    dp_rank: float
    first_of_dp: float
    digest_high: float
    digest_low: float
    samples: float
    tokens: float
    loss_sum: float
    saw_logits: float
    saw_gradients: float
    problems: float
    memory: float
    reports: float
    reported: float


def measured(
    rows: Sequence[Row],
    squares: Sequence[Sequence[float]],
    problems: Sequence[str],
    names: Sequence[str],
    *,
    logits_optional: bool,
) -> dict[str, Any]:
    """The part of the line that the probe measured; None for what could not be.

    Args:
        rows: every rank's, in rank order.
        squares: per rank, of each parameter, the sum of squares of the gradient that it counts.
        problems: what any rank could not count, in sentences.
        names: canonical names of the parameters.
        logits_optional: whether it is no fault that no rank saw logits.
    """
    speakers = [row for row in rows if row.first_of_dp]
    tokens = int(sum(row.tokens for row in speakers))
    loss_sum = math.fsum(row.loss_sum for row in rows)
    unknown = not tokens or (bool(problems) and math.isnan(loss_sum))
    unknown |= logits_optional and not any(row.saw_logits for row in rows)
    counted = all(row.saw_gradients for row in rows) and not problems
    missing = _without_gradient(names, squares) if counted else []
    line: dict[str, Any] = {
        "loss_recomputed": None if unknown else loss_sum / tokens,
        "grad_norm_recomputed": global_norm(squares) if counted else None,
        "tokens": tokens,
        "batch_digest": combine(
            (int(row.digest_high), int(row.digest_low), int(row.samples)) for row in speakers
        ),
        "batch_agrees": _agree(rows),
        "grads_missing": len(missing) if counted else None,
        "memory_bytes": int(max(row.memory for row in rows)),
    }
    if missing:
        line["grads_missing_names"] = missing
    if problems:
        line["problems"] = list(problems)
    return line


def mean_loss(rows: Iterable[Row]) -> float | None:
    """Of what the ranks that speak report, each over its tokens or all the same; None: nobody."""
    given = [(row.reported, row.tokens) for row in rows if row.reports and row.first_of_dp]
    if not given:
        return None
    losses = {loss for loss, _ in given}
    tokens = sum(count for _, count in given)
    if len(losses) == 1 or not tokens:
        return given[0][0]
    return math.fsum(loss * count for loss, count in given) / tokens


def _without_gradient(names: Sequence[str], squares: Sequence[Sequence[float]]) -> list[str]:
    """Trainable parameters whose whole gradient is absent or zero."""
    return [
        name
        for name, column in zip(names, zip(*squares, strict=True), strict=True)
        if not any(column)
    ]


def _agree(rows: Sequence[Row]) -> bool:
    """Whether all ranks of each data-parallel coordinate saw the same samples."""
    seen = {(row.dp_rank, row.digest_high, row.digest_low, row.samples) for row in rows}
    return len(seen) == len({row.dp_rank for row in rows})
