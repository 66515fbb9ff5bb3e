"""A control and a test set as files that stand alone, with the code of one's own that they name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Experiment, OwnTechnique, SetSpec, TrainConfig
from converge_harness.shrink import experiment_tables, train_config_tables
from converge_harness.store import atomic_write
from converge_harness.surroundings import sources_with, with_imports
from converge_harness.trainers import normal_path, trainer_of

EXPERIMENT = "experiment.toml"
SHRUNK = "shrunk.json"
"""Beside an experiment that ``converge shrink`` wrote: what the failure needs."""


_STARTED = (b"#!", b"\x7fELF")
"""How files begin that the system can start."""


def why_not_for_others(experiment: Experiment, test: SetSpec) -> Problem | None:
    """Why a failed set of an experiment is not written for others; None if it is.

    Unlike what is shrunk, it is written as it was run, so its kind and its parts do not matter.
    """
    place = str(experiment.path)
    if experiment.baseline or experiment.calibration:
        what = "is judged by a baseline or a calibration file, which nobody else has"
        hint = "leave it out of the experiment and run it: then its control is trained"
        return Problem(place, f"{test.name!r} {what}", hint)
    if test.starts_from_control:
        what = "starts from the weights of a control that another trainer trains, so it would need "
        hint = "reproduce a set that [trainer] trains, or write the issue by the report"
        return Problem(place, f"{test.name!r} {what}both trainers in one folder", hint)
    return None


def write_pair(experiment: Experiment, name: str, folder: Path, head: str) -> tuple[Path, ...]:
    """Write an experiment of one test set; return the paths of all files, the experiment's first.

    Args and ConfigError as of ``pair_files``. Raises StoreError if it cannot be written.
    """
    return write_files(pair_files(experiment, name, head), folder)


def write_files(files: Mapping[str, bytes], folder: Path) -> tuple[Path, ...]:
    """Write files by their paths in a folder; return their paths.

    What can be started by itself stays so. Raises StoreError if they cannot be written.
    """
    for path, content in files.items():
        atomic_write(folder / path, content)
        if content.startswith(_STARTED):
            (folder / path).chmod(0o755)
    first, *others = files
    return folder / first, *(folder / path for path in sorted(others))


def pair_files(
    experiment: Experiment, name: str, head: str, pythons: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """The content of all files of an experiment of one test set, by path; the experiment's first.

    Models and programs of one's own, and functions of ``inject`` and of techniques, are copied with
    what they import from their folders.

    Args:
        experiment: with one control and one test set, both trained by ``[trainer]``.
        name: of the written experiment.
        head: comment lines at the top of every TOML file, without ``#``.
        pythons: as of ``experiment_tables``.

    Raises ConfigError if two files of one name differ, or a program cannot be written for others.
    """
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    specs = (*experiment.controls, *experiment.tests)
    copies = _Copies()
    placed = copies.sources(specs)
    of_trainer, why = trainer_of(specs[0]).table_of(specs, placed)
    if why:
        raise ConfigError(Problem(str(experiment.path), f"{experiment.tests[0].name!r} {why}"))
    self_contained = replace(
        experiment,
        controls=tuple(map(copies.beside, experiment.controls)),
        tests=tuple(map(copies.beside, experiment.tests)),
    )
    configs = _different([spec.train_config for spec in specs])

    def place(config: TrainConfig) -> str:
        return f"train_config{configs.index(config) or ''}.toml"

    tables = experiment_tables(self_contained, name, place, of_trainer, pythons)
    ours = {EXPERIMENT: tables, **{place(each): train_config_tables(each) for each in configs}}
    found = {path: (comment + tomli_w.dumps(each)).encode() for path, each in ours.items()}
    require_free(found, copies.files)
    return {**found, **copies.files}


def require_free(ours: Collection[str], files: Mapping[str, bytes]) -> None:
    """Raise ConfigError if one of the copied files has the name of one of ours."""
    for path in sorted(files.keys() & set(ours)):
        raise ConfigError(
            Problem(path, "is a file of the program, and one that converge writes", "rename it")
        )


def _different(configs: Sequence[TrainConfig]) -> list[TrainConfig]:
    found: list[TrainConfig] = []
    for config in configs:
        if config not in found:
            found.append(config)
    return found


class _Copies:
    """Copies of the user's files, by their paths in the new folder.

    Files of a model or program keep their places below the folder that they are imported from. All
    others are in folders ``code``, those of one folder together.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._copied: list[Path] = []
        """The folders that files were copied from, in the order of their numbers."""

    def sources(self, specs: Sequence[SetSpec]) -> dict[Path, str]:
        """Copy what ``Trainer.sources`` names; by absolute path, where each of them is now."""
        placed: dict[Path, str] = {}
        for spec in specs:
            for source in trainer_of(spec).sources(spec):
                path, folder = normal_path(source.path), normal_path(source.folder)
                for each in sources_with(path, folder):
                    self._add(each, self._place(normal_path(each), folder, path.parent))
                placed[path] = self._place(path, folder, path.parent)
        return placed

    def beside(self, spec: SetSpec) -> SetSpec:
        """The set with its functions in copied files, by relative paths."""
        return replace(
            spec,
            inject=self._function(spec.inject),
            own_techniques=tuple(map(self._technique, spec.own_techniques)),
        )

    def _technique(self, own: OwnTechnique) -> OwnTechnique:
        return replace(own, apply=self._function(own.apply), in_force=self._function(own.in_force))

    def _function(self, function: str | None) -> str | None:
        if function is None:
            return None
        written, _, name = function.rpartition(":")
        path = Path(written)
        for each in with_imports(path, [path.parent]):
            self._add(each, self._in_code(each, path.parent))
        return f"{self._in_code(path, path.parent)}:{name}"

    def _place(self, path: Path, folder: Path, beside: Path) -> str:
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
        return self._in_code(path, beside)

    def _in_code(self, path: Path, folder: Path) -> str:
        if folder not in self._copied:
            self._copied.append(folder)
        below = f"code{self._copied.index(folder) or ''}"
        return f"{below}/{path.relative_to(folder).as_posix()}"

    def _add(self, path: Path, place: str) -> None:
        content = path.read_bytes()
        if self.files.setdefault(place, content) != content:
            raise ConfigError(
                Problem(str(path), f"is another {place} than that of the other set", "rename one")
            )
