"""``converge init``: an experiment file for the techniques that somebody wants to test."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import guide
from harness.cli import matrix
from harness.errors import ConfigError, Problem
from harness.experiment.tables import CP_ROTATIONS, PIPELINE_SCHEDULES
from harness.experiment.train_config import load_train_config
from harness.gate import ExitCode
from harness.model import Loader, Toolchain, TrainConfig
from harness.store import atomic_write
from harness.trainers import assume_toolchain

TITAN_03, TITAN_02 = "torchtitan-0.3.0", "torchtitan-0.2.2"
STREAMING = "torchtitan-0.3.0-streaming"
VARIANTS = {"pp": PIPELINE_SCHEDULES, "cp": CP_ROTATIONS}
"""What may follow a degree."""
SETS = frozenset({"control", "controls", "test", "matrix", "anchor"})
"""Tables of an experiment file, none of them a torchtitan's."""


def init(arguments: argparse.Namespace) -> ExitCode:
    """``converge init``: print the recommended experiment file, or write it.

    Raises:
        ConfigError: a word is not known, a technique cannot run on this base, or the file is
            there already.
    """
    out: Path | None = arguments.out
    if out is not None:
        _require_free(out, force=arguments.force)
    named = guide.parse_factors(arguments.technique, VARIANTS)
    config = read_base(arguments.base)
    base = guide.sized_base(config, toolchain_for(config), arguments.dp, named)
    sets = guide.recommend(base, named)

    def written(train_config: str) -> str:
        return guide.write_experiment(
            base, named, sets, name=arguments.name, train_config=train_config
        )

    _require_right(written(str(_found(arguments.base))), out)
    text = written(_as_written(arguments.base, out))
    if out is None:
        print(text, end="")
        return ExitCode.PASS
    atomic_write(out, text.encode())
    print(f"wrote {out}; see what it runs with: converge plan {out}")
    return ExitCode.PASS


def read_base(written: str) -> TrainConfig:
    """The train config that ``--base`` names, looked up from the current directory.

    Raises ConfigError when it is none.
    """
    config = load_train_config(written, [Path.cwd()], "--base")
    if SETS & config.settings.keys():
        trainer = config.settings.get("trainer")
        named = trainer.get("train_config") if isinstance(trainer, dict) else None
        raise ConfigError(
            Problem(
                f"--base {written}",
                "is an experiment file, not a train config of torchtitan's keys",
                f"its own train config is {named}" if named else "",
            )
        )
    return config


def toolchain_for(config: TrainConfig) -> Toolchain:
    """The toolchain that a config is written for: only 0.3 has a ``[converge] module``."""
    name = TITAN_03 if config.module else TITAN_02
    if config.loader is Loader.STREAMING:
        name = STREAMING
    return assume_toolchain(name)


def _require_free(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise ConfigError(Problem(f"--out {out}", "is a folder", f"as {out / 'experiment.toml'}"))
    if out.exists() and not force:
        raise ConfigError(
            Problem(f"--out {out}", "is there already", "give another name, or --force")
        )


def _found(base: str) -> Path:
    return Path(base).expanduser().absolute()


def _as_written(base: str, out: Path | None) -> str:
    """The base config's path for the file: as given where it leads there from the file's folder."""
    path = Path(base)
    if out is None or _found(base) == path.expanduser():
        return base
    folder = out.resolve().parent
    near = [each / path for each in (folder, folder.parent)]
    first = next((each for each in near if each.is_file()), None)
    return base if first is not None and first.samefile(path) else str(_found(base))


def _require_right(text: str, out: Path | None) -> None:
    """Load and plan a file's text before one that was there is replaced.

    Raises ConfigError, whose places name ``out`` (or what is printed).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experiment.toml"
        path.write_text(text, encoding="utf-8")
        try:
            matrix.load_plan(path, (), on_gpu=True, find=assume_toolchain)
        except ConfigError as error:
            place = str(out or "the file")
            raise ConfigError(
                [
                    replace(each, where=each.where.replace(str(path), place))
                    for each in error.problems
                ]
            ) from None
