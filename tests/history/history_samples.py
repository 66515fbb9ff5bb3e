"""Nights as `converge run` would leave them, and histories made of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np

from converge_harness.history import Measurement, Night, Result
from converge_harness.model import CauseClass, Judgement, Outcome, Tier

START = datetime(2026, 3, 1, 3, 0, tzinfo=UTC)
VERSIONS = {"torch": "2.12.0", "torchtitan": "0.3.0", "commit": "a" * 40, "driver": "570.1"}
LIMIT = 2e-6


def result(test_set="tp2", verdict=Judgement.PASS, **options) -> Result:
    failed = verdict is Judgement.FAIL
    usual = {
        "test_set": test_set,
        "control": "fsdp2",
        "verdict": verdict,
        "cause_class": CauseClass.UPDATE if failed else None,
        "cause": "The update is wrong." if failed else "",
        "onset": 3 if failed else None,
        "wall_s": 12.5,
        "reused": False,
        "definition": "d" * 64,
        "measurements": (deviation("loss-envelope", 1e-7),),
    }
    return Result(**(usual | options))


def deviation(check: str, measured: float | None, limit: float | None = LIMIT) -> Measurement:
    outside = measured is not None and limit is not None and not measured <= limit
    outcome = Outcome.FAIL if outside else Outcome.PASS
    return Measurement(check, Tier.ENVELOPE, outcome, measured, limit, "relative")


def night(day: float = 0, *results: Result, **options) -> Night:
    usual = {
        "experiment": "nightly",
        "source": "/lab/experiments/nightly.toml",
        "finished": START + timedelta(days=day),
        "circumstances": VERSIONS,
        "runs": "r" * 64,
        "wall_s": 60.0,
        "report": "/lab/reports/nightly",
        "results": results or (result(),),
    }
    return Night(**(usual | options))


def nights_with_a_step(days: int, at: int, *, seed: int = 1, factor: float = 100.0) -> list[Night]:
    """Deviations of one set scatter around 1e-7, and around ``factor`` of it from night ``at``.

    torch is a newer one from that night on, the commit another one every night.
    """
    chance = np.random.default_rng(seed)
    found = []
    for day in range(days):
        size = (factor if day >= at else 1.0) * 1e-7 * 10 ** (0.2 * chance.standard_normal())
        one = result(
            verdict=Judgement.FAIL if size > LIMIT else Judgement.PASS,
            measurements=(
                deviation("loss-envelope", size),
                deviation("grad-norm-envelope", 1e-7 * 10 ** (0.2 * chance.standard_normal())),
            ),
        )
        told = VERSIONS | {"torch": "2.13.0" if day >= at else "2.12.0", "commit": f"{day:040x}"}
        found.append(night(day, one, circumstances=told))
    return found


def other_experiment(one: Night, name: str) -> Night:
    return replace(one, experiment=name, source=f"/lab/experiments/{name}.toml")
