"""An experiment of one control and one test set as the tables of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from converge_harness.model import (
    FROZEN_STEPS,
    POWERS_OF_TWO,
    STOP_AFTER,
    Ask,
    Experiment,
    Loader,
    SetSpec,
    Stop,
    TrainConfig,
)


def experiment_tables(
    experiment: Experiment, name: str, place: Callable[[TrainConfig], str]
) -> dict[str, Any]:
    """The tables of the experiment's file, which runs on this machine.

    Not carried over: an anchor, a calibration, a baseline, and the cluster.

    Args:
        experiment: of sets that ``reductions.why_not`` does not refuse.
        name: of the new experiment.
        place: the path of the file with a train config, from the experiment's folder.
    """
    (control,), (test,) = experiment.controls, experiment.tests
    trainer: dict[str, Any] = {
        "kind": control.trainer.kind,
        **({} if control.deterministic else {"deterministic": False}),
        "startup_timeout_s": experiment.startup_timeout_s,
        "progress_timeout_s": experiment.progress_timeout_s,
    }
    if experiment.seed_checkpoint is not None:
        trainer["seed_checkpoint"] = str(experiment.seed_checkpoint)
    owned = {own.name: own for spec in (control, test) for own in spec.own_techniques}
    tables: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "seed": experiment.seed,
        "repeats": [str(each) for each in experiment.repeats],
        "reference": experiment.reference,
    }
    if experiment.other_seeds:
        tables["seeds"] = {"count": 1 + len(experiment.other_seeds)}
    if recovery := test.recovery or control.recovery:
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
    tables["control"] = _set_table(control, place)
    tables["test"] = [_set_table(test, place)]
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


def _set_table(spec: SetSpec, place: Callable[[TrainConfig], str]) -> dict[str, Any]:
    degrees = {key: degree for key, degree in asdict(spec.parallelism).items() if degree != 1}
    is_path = spec.toolchain.startswith("/")
    return {
        "name": spec.name,
        **_some(note=spec.note),
        "train_config": place(spec.train_config),
        "toolchain": {"python": spec.toolchain} if is_path else spec.toolchain,
        "parallelism": degrees,
        **_some(
            techniques=list(spec.technique_names),
            pipeline_schedule=spec.pipeline_schedule,
            cp_rotation=spec.cp_rotation,
            spmd_backend=spec.spmd_backend,
            inject=spec.inject,
            without_fixes=list(spec.without_fixes),
            waive=list(spec.waive),
            tolerance=dict(spec.tolerances),
            margin=spec.margin,
        ),
        **({"stop": spec.stop.value} if spec.control and spec.stop is not Stop.FAIL else {}),
        **({"ask": spec.ask.value} if spec.ask is not Ask.SAME else {}),
        **({"own_random_numbers": True} if spec.own_random_numbers else {}),
        **_some(set=dict(spec.overrides)),
    }


def _some(**values: Mapping[str, Any] | list[Any] | float | str | None) -> dict[str, Any]:
    """Those that are neither None nor empty."""
    return {key: value for key, value in values.items() if value not in (None, "", [], {})}
