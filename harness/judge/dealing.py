"""Which repeats speak for a test set: those that deal samples out as it does.

A repeat that deals the samples of a batch out to the ranks otherwise changes the order of sums, as
another data-parallel degree does. In a low precision it changes more than that: what lies in one
tensor is scaled together, so other samples beside a token give it another rounding (gradients of
Float8 layers with tensorwise scaling differ by 4% on a debug model, a hundred times what an ulp on
every weight does). A test set that deals samples as its control does has no such excuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.model import Calibration, Evidence, RepeatKind

_DEALING = (
    "local_batch_size",
    "global_batch_size",
    "seq_len",
    "gradient_accumulation_steps",
    "pipeline_microbatches",
)
"""What decides which tokens meet in one tensor, beside degrees that divide batch or sequence."""


def fitting(
    calibration: Calibration | None, test: Evidence, control: Evidence
) -> Calibration | None:
    """The part of a calibration that speaks for this pair; all of it when in doubt."""
    if calibration is None or calibration.alike is None or not deals_alike(test, control):
        return calibration
    return calibration.alike


def deals_alike(test: Evidence, control: Evidence) -> bool:
    """Whether the ranks of both runs meet the same tokens together, by what was in force."""
    if test.in_force is None or control.in_force is None:
        return False
    if RepeatKind.PERMUTE in (test.repeat, control.repeat):
        return False
    expected = _dealt(control.in_force)
    passes = [each.in_force for each in test.passes if each.in_force is not None]
    return all(_dealt(ran) == expected for ran in (test.in_force, *passes))


def _dealt(ran: Mapping[str, Any]) -> tuple[object, ...]:
    degrees = ran.get("degrees") or {}
    dp = (degrees.get("dp_replicate") or 1) * (degrees.get("dp_shard") or 1)
    return (dp, degrees.get("cp") or 1, *(ran.get(key) for key in _DEALING))
