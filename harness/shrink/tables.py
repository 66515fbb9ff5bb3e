"""An experiment of one control and one test set as the tables of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from converge_harness.model import (
    DEFAULT_REPEATS,
    FROZEN_STEPS,
    POWERS_OF_TWO,
    STOP_AFTER,
    Ask,
    Experiment,
    Fault,
    Kind,
    Loader,
    Parallelism,
    Recovery,
    Segment,
    SetSpec,
    Stop,
    Torn,
    TrainConfig,
)

SAME_DP_DEGREE = "same-dp-degree"
"""The rule of the converging guide that is not for generated sets (``plan/rules/guide.py``)."""


def experiment_tables(
    experiment: Experiment,
    name: str,
    place: Callable[[TrainConfig], str],
    of_trainer: Mapping[str, Any],
    pythons: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The tables of the experiment's file, which runs on this machine.

    Not carried over: an anchor, a calibration, a baseline, and the cluster. A set generated from a
    ``space_time`` table is written as the parallel set that it is.

    Args:
        experiment: of one control and one test set, both trained by ``[trainer]``.
        name: of the new experiment.
        place: the path of the file with a train config, from the experiment's folder.
        of_trainer: keys of ``[trainer]`` that only this trainer has (``Trainer.table_of``).
        pythons: by toolchain, the path of the Python that is named instead.
    """
    (control,), (test,) = experiment.controls, experiment.tests
    trainer: dict[str, Any] = {
        "kind": control.trainer.kind,
        **({} if control.deterministic else {"deterministic": False}),
        "startup_timeout_s": experiment.startup_timeout_s,
        "progress_timeout_s": experiment.progress_timeout_s,
        **of_trainer,
    }
    if experiment.seed_checkpoint is not None:
        trainer["seed_checkpoint"] = str(experiment.seed_checkpoint)
    owned = {own.name: own for spec in (control, test) for own in spec.own_techniques}
    tables: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "seed": experiment.seed,
        "reference": experiment.reference,
    }
    if experiment.repeats != DEFAULT_REPEATS:  # named, those that a control cannot make are refused
        tables["repeats"] = [str(each) for each in experiment.repeats]
    if experiment.other_seeds:
        tables["seeds"] = {"count": 1 + len(experiment.other_seeds)}
    scripted = test.kind is Kind.FAULT  # its own checkpoints are in its table
    if recovery := control.recovery or (None if scripted else test.recovery):
        tables["checkpoint_every"] = recovery.checkpoint_every
    if probe := _probe(experiment):
        tables["probe"] = probe
    if stop := _stop(experiment):
        tables["stop"] = stop
    if experiment.cpu_ranks is not None:
        trainer["cpu_ranks"] = experiment.cpu_ranks
    tables["trainer"] = trainer
    if owned:
        tables["technique"] = {
            key: _some(
                what=own.what, set=dict(own.overrides), apply=own.apply, in_force=own.in_force
            )
            for key, own in owned.items()
        }

    def table_of(spec: SetSpec) -> dict[str, Any]:
        named = (pythons or {}).get(spec.toolchain, spec.toolchain)
        is_path = named != spec.toolchain or named.startswith("/")
        return _set_table(spec, place(spec.train_config), {"python": named} if is_path else named)

    tables["control"] = table_of(control)
    tables["test"] = [table_of(test)]
    return tables


def _probe(experiment: Experiment) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if experiment.cadence != POWERS_OF_TWO:
        cadence = experiment.cadence
        found["cadence"] = list(cadence) if isinstance(cadence, tuple) else cadence
    if experiment.frozen != FROZEN_STEPS:
        found["frozen"] = experiment.frozen
    return found


def _stop(experiment: Experiment) -> dict[str, Any]:
    if experiment.stop_after is None:
        return {"when": "never"}
    after = None if experiment.stop_after == STOP_AFTER else experiment.stop_after
    return _some(after=after, waiting_ranks=experiment.waiting_ranks)


def train_config_tables(config: TrainConfig) -> dict[str, Any]:
    """The tables of a train config's file, whose module is installed or lies beside it."""
    data = asdict(config.data) if config.data else {}
    if config.loader is not Loader.CONVERGE:
        data["loader"] = config.loader.value
    ours = _some(
        module=config.module,
        config=config.config,
        arguments=dict(config.arguments),
        model=dict(config.model),
        data=data,
    )
    return {**({"converge": ours} if ours else {}), **config.settings}


def _set_table(
    spec: SetSpec, train_config: str, toolchain: str | Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": spec.name,
        **_kind(spec),
        **_some(note=spec.note),
        "train_config": train_config,
        "toolchain": toolchain,
        **_some(
            techniques=list(spec.technique_names),
            cp_rotation=spec.cp_rotation,
            spmd_backend=spec.spmd_backend,
            inject=spec.inject,
            without_fixes=list(spec.without_fixes),
            waive=list(_waived(spec)),
            tolerance=dict(spec.tolerances),
            margin=spec.margin,
        ),
        **_some(set=dict(spec.overrides)),
    }


def _waived(spec: SetSpec) -> tuple[str, ...]:
    """Rules that a set waives; written as parallel, a generated one breaks one that it may."""
    breaks = spec.kind is Kind.SPACE_TIME and spec.trainer.can.guided
    return tuple(dict.fromkeys((*spec.waive, *((SAME_DP_DEGREE,) if breaks else ()))))


def _kind(spec: SetSpec) -> dict[str, Any]:
    """The keys of a set that depend on its kind."""
    if spec.kind is Kind.ELASTIC:
        return {"kind": spec.kind.value, "segments": [_segment(each) for each in spec.segments]}
    in_one_pass = {
        "parallelism": _degrees(spec.parallelism),
        **_some(pipeline_schedule=spec.pipeline_schedule),
        **({"stop": spec.stop.value} if spec.control and spec.stop is not Stop.FAIL else {}),
        **({"ask": spec.ask.value} if spec.ask is not Ask.SAME else {}),
        **({"own_random_numbers": True} if spec.own_random_numbers else {}),
    }
    if spec.kind is Kind.FAULT and spec.recovery is not None:
        return {"kind": spec.kind.value, **in_one_pass, **_script(spec.recovery)}
    return in_one_pass


def _degrees(parallelism: Parallelism) -> dict[str, int]:
    return {key: degree for key, degree in asdict(parallelism).items() if degree != 1}


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "until": segment.until,
        **_degrees(segment.parallelism),
        "local_batch_size": segment.local_batch_size,
        **_some(pipeline_schedule=segment.pipeline_schedule),
    }


def _script(recovery: Recovery) -> dict[str, Any]:
    return {
        "checkpoint_every": recovery.checkpoint_every,
        "faults": [_fault(each) for each in recovery.faults],
        "restarts": recovery.restarts.value,
        "max_restarts": recovery.max_restarts,
        "recover_within_s": recovery.within_s,
        "nodes": list(recovery.nodes),
    }


def _fault(fault: Fault) -> dict[str, Any]:
    """Without what is the default: a kind of fault takes only some of the keys."""
    plain = Fault(fault.kind, fault.step)
    return {
        "kind": fault.kind.value,
        "step": fault.step,
        **({} if fault.rank == plain.rank else {"rank": fault.rank}),
        **({} if fault.node == plain.node else {"node": fault.node}),
        **({} if fault.torn is Torn.DEATH else {"torn": fault.torn.value}),
        **({} if fault.grace_s == plain.grace_s else {"grace_s": fault.grace_s}),
        **({"saves": True} if fault.saves else {}),
    }


def _some(**values: Mapping[str, Any] | list[Any] | float | str | None) -> dict[str, Any]:
    """Those that are neither None nor empty."""
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}
