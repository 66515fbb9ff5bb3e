"""``report.json``: the report for programs, as ``harness/report/report.schema.json`` has it."""

from __future__ import annotations

import json
import math
from typing import Any

from converge_harness.model import Check
from converge_harness.report.sanitize import plain
from converge_harness.report.view.against import Against
from converge_harness.report.view.module_tree import ModuleTree
from converge_harness.report.view.report_view import ReportView, RunView, TestView
from converge_harness.report.view.resumed_run import PassesView
from converge_harness.report.view.tolerances import CalibrationView

SCHEMA_VERSION = 1
"""Increased when a field changes or is removed; new fields do not increase it."""


def to_json(view: ReportView) -> str:
    """Render; NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``."""
    return json.dumps(document(view), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def document(view: ReportView) -> dict[str, Any]:
    """The document that :func:`to_json` writes."""
    controls = [_run(control) for control in view.controls]
    return {
        "schema_version": SCHEMA_VERSION,
        "experiment": view.title,
        "source": view.source,
        "generated": view.generated,
        "verdict": view.worst.value,
        "headline": view.headline,
        "seed": view.seed,
        "steps": view.steps,
        "versions": dict(view.versions),
        "control": controls[0] if controls else None,
        "controls": controls,
        "anchor": _run(view.anchor) if view.anchor else None,
        "calibration": [_calibration(each) for each in view.calibrations],
        "repeats": [
            {**_run(repeat.run), "control": repeat.control, "repeat": repeat.run.repeat}
            for repeat in view.repeats
        ],
        "besides": [{**_run(each.run), "role": each.role, "of": each.of} for each in view.besides],
        "tests": [_test(test) for test in view.tests],
        "waived": list(view.waived),
        "notes": list(view.notes),
        "entropy_floor": _value(view.entropy_floor),
        "wall_s": _value(view.wall_s),
        **({"against": _against(view.against)} if view.against else {}),
    }


def _against(against: Against) -> dict[str, Any]:
    return {
        "revision": against.revision,
        "commit": against.commit,
        "fork": against.fork,
        "tree": against.tree,
        "headline": against.headline,
        "same": against.is_same,
        "sets": [
            {
                "name": each.name,
                "change": each.sameness.value,
                "detail": each.sentence,
                "verdict_before": each.before.value if each.before else None,
                "verdict_after": each.after.value if each.after else None,
            }
            for each in against.sets
        ],
    }


def _run(run: RunView) -> dict[str, Any]:
    return {
        "name": run.name,
        "source": run.source,
        "degrees": run.degrees,
        "world_size": run.world_size,
        "techniques": list(run.techniques),
        "own_techniques": dict(run.own_techniques),
        "inject": run.inject or None,
        "toolchain": run.toolchain,
        "deterministic": run.deterministic,
        "tokens_per_step": run.tokens_per_step,
        "wall_s": _value(run.wall_s),
        "reused": run.reused,
        "requeues": run.requeues,
        "command": run.command,
        "error": ({"rank": run.error.rank, "message": run.error.message} if run.error else None),
    }


def _test(test: TestView) -> dict[str, Any]:
    verdict, gate = test.verdict, test.loss_only
    return {
        **_run(test.run),
        "note": test.run.note,
        "kind": test.kind.value,
        **_passes(test.resumed),
        "control": verdict.control,
        "verdict": verdict.judgement.value,
        "ask": verdict.ask.value,
        "not_asked": list(verdict.not_asked),
        "cause": verdict.cause,
        "cause_class": verdict.cause_class.value if verdict.cause_class else None,
        "module": verdict.module,
        "first_wrong": verdict.first_wrong,
        "modules": _modules(test.modules),
        "look_at": verdict.look_at,
        "onset_step": verdict.onset_step,
        "next_command": verdict.next_command,
        "would_change": list(test.would_change),
        "loss_only_gate": (
            {"passes": gate.passes, "measured": _value(gate.measured), "limit": gate.limit}
            if gate
            else None
        ),
        "checks": [_check(check) for check in verdict.checks],
    }


def _modules(tree: ModuleTree | None) -> dict[str, Any] | None:
    if tree is None:
        return None
    furthest = tree.furthest
    return {
        "compared": tree.modules,
        "not_compared": list(tree.not_compared),
        "furthest": {
            "module": plain(furthest.row.module),
            "tensor": plain(furthest.row.tensor),
            "gradient": furthest.row.backward,
            "difference": _value(furthest.distance),
            "noise": furthest.noise,
        },
    }


def _passes(resumed: PassesView | None) -> dict[str, Any]:
    passes = resumed.passes if resumed else ()
    faults = resumed.faults if resumed else ()
    return {
        "passes": [
            {
                "number": each.number,
                "degrees": each.degrees,
                "world_size": each.world_size,
                "steps": list(each.steps) if each.steps else None,
                "loaded_step": each.loaded_step,
                "ended": each.ended,
                "wall_s": _value(each.wall_s),
                "recovery_s": _value(each.recovery_s),
                "replayed_steps": each.replayed,
            }
            for each in passes
        ],
        "faults": [
            {
                "kind": fault.kind,
                "step": fault.step,
                "struck": fault.struck,
                "at_pass": fault.at_pass,
                "torn": fault.torn,
                "how_torn": fault.how_torn.value if fault.how_torn else None,
                "rank": fault.rank,
                "node": fault.node,
                "recovery_s": _value(fault.recovery_s),
            }
            for fault in faults
        ],
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "title": check.title,
        "tier": check.tier.value,
        "outcome": check.outcome.value,
        "measured": _value(check.measured),
        "limit": _value(check.limit.value) if check.limit else None,
        "limit_origin": check.limit.origin if check.limit else None,
        "unit": check.unit,
        "steps": list(check.steps) if check.steps else None,
        "onset_step": check.onset,
        "detail": check.detail,
        "deviations": [
            {
                "tensor": deviation.tensor,
                "step": deviation.step,
                "measured": _value(deviation.measured),
                "limit": _value(deviation.limit),
            }
            for deviation in check.deviations
        ],
    }


def _calibration(calibration: CalibrationView) -> dict[str, Any]:
    return {
        "control": calibration.control,
        "identity": calibration.identity or None,
        "precision": calibration.precision or None,
        "repeats": [
            {
                "name": repeat.name,
                "repeat": repeat.kind,
                "bit_identical": repeat.identical,
                "largest_loss_difference": _value(repeat.loss),
                "largest_grad_norm_difference": _value(repeat.grad_norm),
            }
            for repeat in calibration.repeats
        ],
        "taught_by": calibration.taught_by,
        "signals": {
            growth.signal: {
                "steps": list(growth.steps),
                "scale": [_value(scale) for scale in growth.scale],
                "growth": _value(growth.growth),
                "doubling_steps": _value(growth.doubling_steps),
            }
            for growth in calibration.signals
        },
        "sampled_steps": list(calibration.sampled_steps),
        "problems": list(calibration.problems),
    }


def _value(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return str(float(value))
