"""What the history page shows: test sets with their trends, and level changes worth a look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

import numpy as np

from converge_harness.history.database import History
from converge_harness.history.query import SetNight
from converge_harness.history.trend import StepChange, Trend, trends
from converge_harness.model import Judgement


@dataclass(frozen=True, slots=True)
class Move:
    """Signals of a test set that changed their level in the same night."""

    steps: tuple[StepChange, ...]
    """At least one; the largest change first."""

    @property
    def lead(self) -> StepChange:
        return self.steps[0]


@dataclass(frozen=True, slots=True)
class SetHistory:
    """One test set over the nights."""

    experiment: str
    name: str
    nights: tuple[SetNight, ...]
    """Oldest first, at least one."""
    trends: tuple[Trend, ...]
    moves: tuple[Move, ...]
    """Newest first."""

    @property
    def verdict(self) -> Judgement:
        """Of the newest night."""
        return self.nights[-1].verdict

    @property
    def verdict_since(self) -> datetime:
        """The first night of the latest uninterrupted run of the newest verdict."""
        since = self.nights[-1]
        for night in reversed(self.nights):
            if night.verdict is not self.verdict:
                break
            since = night
        return since.finished


def overview(
    history: History,
    *,
    experiment: str | None = None,
    test_set: str | None = None,
    since: datetime | None = None,
    newest: int | None = None,
) -> tuple[SetHistory, ...]:
    """The test sets of one or all experiments, each with its newest nights.

    Raises:
        HistoryError: the file cannot be read.
    """
    found = []
    for name in [experiment] if experiment else history.experiments():
        for each in history.test_sets(name):
            if test_set is None or each == test_set:
                nights = history.nights(name, each, newest)
                nights = tuple(night for night in nights if not since or night.finished >= since)
                if nights:
                    found.append(_set_history(history, name, each, nights))
    return tuple(found)


def _set_history(
    history: History, experiment: str, name: str, nights: tuple[SetNight, ...]
) -> SetHistory:
    found = trends(nights, history.series(experiment, name, nights[0].number))
    return SetHistory(
        experiment=experiment,
        name=name,
        nights=nights,
        trends=tuple(sorted(found, key=lambda trend: not trend.steps)),
        moves=_moves(step for trend in found for step in trend.steps),
    )


def _moves(steps: Iterable[StepChange]) -> tuple[Move, ...]:
    by_night = sorted(steps, key=lambda step: (-step.first_after.number, -_length(step)))
    grouped = groupby(by_night, key=lambda step: step.first_after.number)
    return tuple(Move(tuple(group)) for _, group in grouped)


def _length(step: StepChange) -> float:
    """Size of a step in decades; infinite from or to zero or infinity."""
    with np.errstate(divide="ignore", invalid="ignore"):
        far = abs(float(np.log10(step.after) - np.log10(step.before)))
    return far if np.isfinite(far) else np.inf
