"""The identity of a job: a hash of everything that can change its numbers, and of nothing else.

Names, notes, tolerances, waivers, timeouts and the location of files change no number, so they are
not in it: a finished run is found again even under another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from converge_harness import DISTRIBUTION
from converge_harness.model import (
    CHECKOUT,
    FaultKind,
    Job,
    Recovery,
    Repeat,
    SetSpec,
    Surroundings,
    Toolchain,
)
from converge_harness.trainers import trainer_of

OF_THE_PROGRAM = "its program"
"""In place of a seed checkpoint, if the program makes the initial weights itself."""


def model_overrides(spec: SetSpec) -> dict[str, Any]:
    """The part of a set's overrides that its seed checkpoint depends on."""
    keys = trainer_of(spec).model_keys
    return {key: value for key, value in spec.overrides.items() if key.startswith(keys)}


def seed_identity(
    spec: SetSpec, toolchain: Toolchain, seed: int, surroundings: Surroundings
) -> str:
    """Identity of the seed-checkpoint job that a set starts from.

    Initial weights do not depend on data, parallelism or techniques: sets that differ only in those
    share a seed checkpoint. All settings of the train config count, which may cost a needless seed
    job but never gives a wrong one.
    """
    return _digest(
        {
            "role": "seed checkpoint",
            **_common(spec, toolchain, seed, surroundings),
            "overrides": model_overrides(spec),
        }
    )


def job_identity(
    spec: SetSpec,
    toolchain: Toolchain,
    seed: int,
    surroundings: Surroundings,
    *,
    starts_from: str,
    sample_steps: Sequence[int] = (),
    frozen: int = 0,
    repeat: Repeat | None = None,
) -> str:
    """Identity of a control, repeat or test job.

    Args:
        spec: the set that the job trains.
        toolchain: in which it trains.
        seed: of the experiment.
        surroundings: hardware, rank code, corpus and injected code.
        starts_from: identity of its seed-checkpoint job, or digest of a given checkpoint.
        sample_steps: the steps at which it writes per-tensor evidence.
        frozen: the number of frozen steps before training.
        repeat: how an A/A repeat differs from its control.

    Raises:
        KeyError: ``surroundings`` lacks the digest of the set's corpus, injected file or source.
    """
    return _digest(
        {
            "role": "training",
            **_facts(spec, toolchain, seed, surroundings, sample_steps, frozen),
            "segments": [asdict(segment) for segment in spec.segments],
            "recovery": broken_by(spec.recovery),
            "repeat": None if repeat is None else str(repeat),
            "starts_from": starts_from,
        }
    )


def identity_facts(job: Job, surroundings: Surroundings) -> dict[str, Any]:
    """The inputs of a control's identity, as JSON values, for people to compare.

    The seed checkpoint follows from the same facts, and is left out.

    Raises:
        KeyError: ``surroundings`` lacks the digest of the set's corpus or injected file.
    """
    # Frozen steps change no number of what is trained after them.
    facts = _facts(job.spec, job.toolchain, job.seed, surroundings, job.sample_steps, frozen=0)
    if job.spec.recovery is not None:  # a scheduler may interrupt controls, too
        facts["recovery"] = json.loads(json.dumps(broken_by(job.spec.recovery)))
    return facts


def _facts(
    spec: SetSpec,
    toolchain: Toolchain,
    seed: int,
    surroundings: Surroundings,
    sample_steps: Sequence[int],
    frozen: int,
) -> dict[str, Any]:
    data = spec.train_config.data
    return {
        **_common(spec, toolchain, seed, surroundings),
        "overrides": dict(spec.overrides),
        "parallelism": asdict(spec.parallelism),
        "techniques": sorted(spec.techniques),
        # Absent without any, so that existing runs keep their identities.
        **_own_techniques(spec, surroundings),
        "pipeline_schedule": spec.pipeline_schedule,
        "cp_rotation": spec.cp_rotation,
        # Only if there is such a choice.
        **({"spmd_backend": spec.spmd_backend} if spec.spmd_backend else {}),
        # Only where it is switched off, so that existing runs keep their identities.
        **({} if spec.deterministic else {"deterministic": False}),
        "without_fixes": sorted(spec.without_fixes),
        # Only in reruns that record them, so that existing runs keep their identities.
        **({"operations_of": spec.operations_of} if spec.operations_of else {}),
        "inject": _injected(spec.inject, surroundings),
        "data": None if data is None else surroundings.data[data],
        "loader": None if data is None else spec.train_config.loader.value,
        "sample_steps": list(sample_steps),
        # Absent if empty, so that existing runs keep their identities.
        **({"frozen": frozen} if frozen else {}),
        # Absent for torchtitan, so that its runs keep their identities.
        **trainer_of(spec).identity(spec, surroundings),
    }


def _common(
    spec: SetSpec, toolchain: Toolchain, seed: int, surroundings: Surroundings
) -> dict[str, Any]:
    config = spec.train_config
    versions = dict(toolchain.versions)
    # The part of converge that runs in ranks is covered by the digest of the rank code.
    versions.pop(DISTRIBUTION, None)
    # The source itself counts, whatever git calls it.
    versions.pop(CHECKOUT, None)
    return {
        "train_config": {
            "module": config.module,
            "config": config.config,
            # Absent without any, so that existing runs keep their identities.
            **({"arguments": dict(config.arguments)} if config.arguments else {}),
            **({"code": surroundings.sources[config.code]} if config.code else {}),
            "model": dict(config.model),
            "settings": config.settings,
        },
        "seed": seed,
        "versions": versions,
        "rank_code": surroundings.rank_code,
        "hardware": surroundings.hardware,
        # Absent without a cluster, so that local runs keep their identities.
        **({"software": surroundings.software} if surroundings.software else {}),
    }


def broken_by(recovery: Recovery | None) -> dict[str, Any] | None:
    """How a fault set is broken and restarted.

    The allowed recovery time matters to the judge only, except for a hang: there it also decides
    when the run is restarted.
    """
    if recovery is None:
        return None
    facts = recovery.facts()
    if not any(fault.kind is FaultKind.HANG for fault in recovery.faults):
        del facts["within_s"]
    return facts


def _injected(inject: str | None, surroundings: Surroundings) -> list[str] | None:
    """The function's name and the digest of its file, wherever the file is."""
    if inject is None:
        return None
    return [inject.rpartition(":")[2], surroundings.injected[inject]]


def _own_techniques(spec: SetSpec, surroundings: Surroundings) -> dict[str, Any]:
    """By name, in the order in which they are applied; their keys are overrides of the set."""
    techniques = [
        [each.name, _injected(each.apply, surroundings), _injected(each.in_force, surroundings)]
        for each in spec.own_techniques
    ]
    return {"own_techniques": techniques} if techniques else {}


def _digest(values: Mapping[str, Any]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
