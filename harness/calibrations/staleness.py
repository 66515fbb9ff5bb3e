"""Whether a calibration is that of a control, and what has changed since if it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.calibrations.files import Learnt

DIGESTS = frozenset({"rank_code", "data", "inject"})
"""Facts that are hashes of content."""
LONGEST_SHOWN = 60
"""Characters of a value in a sentence on what has changed."""


def find_calibration(learnt: Sequence[Learnt], identity: str | None) -> Learnt | None:
    """The calibration of the control with that identity; None when there is none."""
    return next((each for each in learnt if each.calibration.identity == identity), None)


def what_changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Clauses on what differs between the facts of two controls, in the order of ``now``."""
    before, after = dict(_flat(then)), dict(_flat(now))
    return tuple(
        _change(key, before.get(key), after.get(key))
        for key in dict.fromkeys((*after, *before))
        if after.get(key) != before.get(key)
    )


def _change(key: str, before: object, after: object) -> str:
    """One clause; of digests only that they differ, because they tell nobody anything."""
    if key in DIGESTS and before is not None and after is not None:
        return f"{key} has changed"
    return f"{key} is {_show(after)}, was {_show(before)}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in json.loads(json.dumps(dict(facts))).items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _show(value: object) -> str:
    text = "not there" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
