"""The sets that the converging guide recommends: as an experiment file, or as the fewest jobs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from converge_harness import guide
from converge_harness.errors import ConfigError, Problem
from converge_harness.experiment.tables import CP_ROTATIONS, PIPELINE_SCHEDULES
from converge_harness.matrix.load import load_plan
from converge_harness.model import (
    Role,
    SetSpec,
    Setting,
    Toolchain,
    TrainConfig,
)
from converge_harness.trainers import DEFAULT_TRAINER, assume_toolchain, trainer_of_kind

VARIANTS = {"pp": PIPELINE_SCHEDULES, "cp": CP_ROTATIONS}
"""By parallelism, what may follow its degree."""
SETS = frozenset({"control", "controls", "test", "matrix", "anchor"})
"""Tables of an experiment file that no train config has."""
DEFAULT_DP = 2
"""The smallest degree at which FSDP shards."""


# ------------------------------------------------------------------ an experiment file


def recommended_file(
    technique: Sequence[str],
    dp: int,
    base: str,
    *,
    name: str | None,
    out: Path | None,
    deterministic: bool = True,
) -> str:
    """The text of the experiment file for techniques, on the train config ``base``.

    ``out`` is where it will lie (None: it is printed), from where its paths lead. Without
    ``deterministic`` all sets train by the kernels of production.

    Raises ConfigError if a technique is unknown or cannot run on this base.
    """
    named = guide.parse_factors(technique, VARIANTS)
    config = read_base(base)
    sized = guide.sized_base(config, toolchain_for(config), dp, named)
    sets = guide.recommend(sized, named)

    def written(train_config: str, place: Callable[[str], str]) -> str:
        return guide.write_experiment(
            sized,
            named,
            sets,
            name=name,
            train_config=train_config,
            deterministic=deterministic,
            place=place,
        )

    _require_right(written(str(_found(base)), lambda path: str(_found(path))), out)
    return written(_as_written(base, out), lambda path: _as_written(path, out))


def read_base(written: str) -> TrainConfig:
    """The train config that ``--base`` names, looked up from the current directory.

    Raises ConfigError if it is not a train config.
    """
    guided = trainer_of_kind(DEFAULT_TRAINER)
    config = guided.load_train_config(written, [Path.cwd()], "--base")
    if SETS & config.settings.keys():
        trainer = config.settings.get("trainer")
        named = trainer.get("train_config") if isinstance(trainer, dict) else None
        raise ConfigError(
            Problem(
                f"--base {written}",
                f"is an experiment file, not a train config with {guided.kind}'s keys",
                f"its own train config is {named}" if named else "",
            )
        )
    return config


def toolchain_for(config: TrainConfig | None = None) -> Toolchain:
    """The toolchain that a config is written for (None: the default), built or not."""
    return assume_toolchain(trainer_of_kind(DEFAULT_TRAINER).toolchain_for(config))


def _found(base: str) -> Path:
    return Path(base).expanduser().absolute()


def _as_written(written: str, out: Path | None) -> str:
    """A path for the file: as given where it leads there from the file's folder."""
    path = Path(written)
    if out is None or _found(written) == path.expanduser():
        return written
    folder = out.resolve().parent
    near = [each / path for each in (folder, folder.parent)]
    first = next((each for each in near if each.is_file()), None)
    return written if first is not None and first.samefile(path) else str(_found(written))


def _require_right(text: str, out: Path | None) -> None:
    """Load and plan a file's text before it replaces an existing file.

    Raises ConfigError, whose places name ``out`` (or the printed file).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.toml"
        path.write_text(text, encoding="utf-8")
        try:
            load_plan(path, (), on_gpu=True, find=assume_toolchain)
        except ConfigError as error:
            place = str(out or "the file")
            raise ConfigError(
                [
                    replace(each, where=each.where.replace(str(path), place))
                    for each in error.problems
                ]
            ) from None


# ------------------------------------------------------------------ the fewest jobs


@dataclass(frozen=True, slots=True)
class Proposal:
    """The fewest jobs in which every pair of techniques meets."""

    base: guide.Base
    named: tuple[guide.Factor, ...]
    """The requested techniques."""
    common: Mapping[str, Setting]
    """Settings that all sets share, for the file into which the jobs are pasted."""
    factors: tuple[guide.Factor, ...]
    """The requested techniques, and those that they need."""
    found: guide.Cover
    sets: tuple[guide.Recommended, ...]
    """One set per job."""


def propose_for_experiment(path: Path, only: Sequence[str], gpus: int) -> Proposal:
    """Jobs for the techniques of an experiment's test sets, beside its first control.

    Raises ConfigError if there is nothing to pair, and for every problem of the file.
    """
    made = load_plan(path, only, on_gpu=True, find=assume_toolchain)
    control = next(job for job in made.jobs if job.role is Role.CONTROL)
    named = guide.factors_of(made.experiment.tests)
    if not named:
        raise ConfigError(
            Problem(
                str(path),
                "its parallel test sets have no technique to pair",
                "name techniques with --technique instead",
            )
        )
    specs = [*made.experiment.controls, *made.experiment.tests]
    return _propose(guide.control_of(control, made.experiment), named, _shared(specs), gpus)


def propose_for_techniques(
    technique: Sequence[str], dp: int | None, base: str | None, gpus: int
) -> Proposal:
    """Jobs for techniques; without a base any batch, sequence and model are assumed to fit."""
    named = guide.parse_factors(technique, VARIANTS)
    dp = dp or DEFAULT_DP
    if base is None:
        made = guide.nominal_base(dp, toolchain_for(), named)
    else:
        config = read_base(base)
        made = guide.sized_base(config, toolchain_for(config), dp, named)
    return _propose(made, named, made.control.spec.overrides, gpus)


def _propose(
    base: guide.Base,
    named: tuple[guide.Factor, ...],
    common: Mapping[str, Setting],
    gpus: int,
) -> Proposal:
    factors = guide.completed(base, named)
    found = guide.cover_pairs(base, factors, gpus)
    sets = guide.with_own_names(
        [
            guide.proposed(base, frozenset(job.factors), alone=len(found.jobs) == 1)
            for job in found.jobs
        ]
    )
    return Proposal(base, named, common, factors, found, tuple(sets))


def _shared(specs: Sequence[SetSpec]) -> dict[str, Setting]:
    first, *others = specs
    return {
        key: value
        for key, value in first.overrides.items()
        if all(key in other.overrides and other.overrides[key] == value for other in others)
    }
