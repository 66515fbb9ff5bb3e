"""What a test set names, beside what really ran, and how its configuration differs; pure.

For display only: whether a named technique is in force is judged by ``converge_harness.judge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converge_harness.judge import RunComparison
from converge_harness.model import (
    CompileInForce,
    Evidence,
    Float8InForce,
    InForce,
    Job,
    Probing,
    SetSpec,
    Technique,
)
from converge_harness.report.sanitize import from_here, plain
from converge_harness.report.text import ABSENT
from converge_harness.report.view.report_view import ConfigChange, Named
from converge_harness.report.view.resumed_run import degrees_in_force, joined
from converge_harness.wording import counted

_FLOAT8 = (Technique.FLOAT8, Technique.FLOAT8_ROWWISE, Technique.FLOAT8_TP)


def techniques_of(spec: SetSpec, control: SetSpec | None = None) -> tuple[str, ...]:
    """Techniques, schedule and rotation of a set, for one table cell.

    Also its SPMD backend, where it differs from its control's, and what is injected.
    """
    named = [technique.value.replace("_", " ") for technique in spec.techniques]
    named += [own.name for own in spec.own_techniques]
    if schedule := _named_schedule(spec):
        named.append(plain(schedule))
    if spec.cp_rotation:
        named.append(f"CP {plain(spec.cp_rotation)}")
    if control is not None and spec.spmd_backend not in (None, control.spmd_backend):
        named.append(str(spec.spmd_backend))
    if spec.injected:
        named.append(plain(spec.injected))
    if not spec.deterministic:
        named.append("not deterministic")
    return tuple(named)


def named_and_in_force(spec: SetSpec | None, evidence: Evidence | None) -> tuple[Named, ...]:
    """One row per technique that the set names or that ran; empty without evidence of either."""
    seen = evidence.in_force if evidence else None
    if spec is None or seen is None:
        return ()
    named = set(spec.techniques)
    # Values that may change from pass to pass are shown for each.
    passes = evidence.passes if evidence else ()
    everywhere = [each.in_force for each in passes if each.in_force] or [seen]
    rows = [
        Named("degrees", _named_degrees(spec), joined(map(degrees_in_force, everywhere))),
        Named("pipeline schedule", _named_schedule(spec), joined(map(_schedule, everywhere))),
        Named("CP rotation", spec.cp_rotation or "", _text(seen.cp_rotation)),
        Named("SPMD backend", spec.spmd_backend or "", _text(seen.spmd_backend)),
        Named("compile", _yes(Technique.COMPILE in named), _compile(seen.compile)),
        Named("async TP", _yes(Technique.ASYNC_TP in named), _async_tp(seen.fused_nodes)),
        Named(
            "Float8",
            ", ".join(technique.value for technique in _FLOAT8 if technique in named),
            _float8(seen.float8),
        ),
        Named(
            "parameters",
            "bfloat16" if Technique.BF16 in named else "",
            _text(seen.param_dtype),
        ),
        *(Named(own.name, own.what, _own(own.name, seen)) for own in spec.own_techniques),
        Named("inject", spec.injected.partition(" ")[2], _file(seen.injected)),
        Named("attention", "", _text(seen.attention)),
        Named("wrapped by", "", seen.probing.wrapping),
        Named("gradients taken", "", _gradients(seen.probing)),
    ]
    return tuple(
        Named(row.what, plain(row.named) or ABSENT, plain(row.in_force) or ABSENT)
        for row in rows
        if row.named or row.in_force
    )


def config_changes(
    compared: RunComparison | None,
    test: Job | None = None,
    control: Job | None = None,
    *,
    here: Path | None = None,
) -> tuple[ConfigChange, ...]:
    """Keys and versions that differ between two runs, undeclared ones first.

    Of a program without the probe, keys of the experiment file. ``here`` as
    :func:`converge_harness.report.view.build.build_view` has it.
    """
    changes: list[ConfigChange] = []
    if compared is not None:
        of_test, of_control = compared.configs
        changes += [
            ConfigChange(
                plain(each.key),
                _setting(of_control, each.key, here),
                _setting(of_test, each.key, here),
                each.expected,
            )
            for each in compared.config_differences
        ]
    if test and control:
        ours, theirs = test.toolchain.versions, control.toolchain.versions
        changes += [
            ConfigChange(
                f"version of {plain(key)}",
                _setting(theirs, key),
                _setting(ours, key),
                declared=True,
            )
            for key in sorted({key for key, _ in ours.items() ^ theirs.items()})
        ]
    return tuple(sorted(changes, key=lambda change: change.declared))


def _setting(table: Mapping[str, Any], key: str, here: Path | None = None) -> str:
    return from_here(str(table[key]), here) if key in table else ABSENT


def _own(name: str, seen: InForce) -> str:
    """What was seen of an own technique: its function's count, else whether anything changed."""
    found = next((each for each in seen.own_techniques if each.name == name), None)
    if found is None:
        return ""
    if found.count is not None:
        return f"{found.count} by its in_force function, on all ranks"
    return "changed what it was given" if found.changed else "changed nothing"


def _file(called: str | None) -> str:
    """What was injected, without its folder."""
    return _text(called).rpartition("/")[2]


def _text(value: str | None) -> str:
    return value or ""


def _yes(named: bool) -> str:  # noqa: FBT001 - a value to print
    return "yes" if named else ""


def _named_degrees(spec: SetSpec) -> str:
    return joined(str(segment.parallelism) for segment in spec.segments) or str(spec.parallelism)


def _named_schedule(spec: SetSpec) -> str:
    of_segments = joined(segment.pipeline_schedule or "" for segment in spec.segments)
    return of_segments or spec.pipeline_schedule or ""


def _gradients(probing: Probing) -> str:
    """Where the probe of a program took them; empty for our own ranks."""
    return probing.gradients if probing.wrapping else ""


def _schedule(seen: InForce) -> str:
    schedule, microbatches = seen.pipeline_schedule, seen.pipeline_microbatches
    if schedule is None:
        return ""
    return schedule + (f", {microbatches} microbatches" if microbatches else "")


def _compile(seen: CompileInForce) -> str:
    regions, graphs = seen.regions, seen.graphs
    return f"{counted(regions, 'region')}, {counted(graphs, 'graph')}" if regions or graphs else ""


def _async_tp(nodes: Mapping[str, int]) -> str:
    return ", ".join(f"{amount} {node}" for node, amount in nodes.items() if amount)


def _float8(seen: Float8InForce) -> str:
    if not seen.modules:
        return ""
    parts = [counted(seen.modules, "module"), _text(seen.recipe)]
    if seen.emulated:
        parts.append("emulated")
    if seen.tp_styles:
        parts.append(counted(seen.tp_styles, "TP style"))
    return ", ".join(part for part in parts if part)
