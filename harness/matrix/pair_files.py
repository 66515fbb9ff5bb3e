"""A control and a test set as files that stand alone, with the code of one's own that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Experiment, OwnTechnique, SetSpec, TrainConfig
from converge_harness.shrink import experiment_tables, train_config_tables
from converge_harness.store import atomic_write
from converge_harness.surroundings import with_imports

EXPERIMENT = "experiment.toml"
SHRUNK = "shrunk.json"
"""Beside an experiment that ``converge shrink`` wrote: what the failure needs."""


def write_pair(experiment: Experiment, name: str, folder: Path, head: str) -> tuple[Path, ...]:
    """Write an experiment of one test set; return the paths of all files, the experiment's first.

    Models of one's own, and functions of ``inject`` and of techniques, are copied with what they
    import from their folders.

    Args:
        experiment: with one control and one test set that ``shrink.why_not`` does not refuse.
        name: of the written experiment.
        folder: which need not exist.
        head: comment lines at the top of every file, without ``#``.

    Raises StoreError if it cannot be written, and ConfigError if two files of one name differ.
    """
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    specs = (*experiment.controls, *experiment.tests)
    written: dict[Path, bytes] = {}
    configs = _different([spec.train_config for spec in specs])

    def place(config: TrainConfig) -> str:
        return f"train_config{configs.index(config) or ''}.toml"

    for config in configs:
        if config.code is not None and config.import_from is not None:
            _add(config.code, config.import_from, folder, written)
        text = comment + tomli_w.dumps(train_config_tables(config))
        written[folder / place(config)] = text.encode()
    functions = _Functions(folder, written)
    self_contained = replace(
        experiment,
        controls=tuple(map(functions.beside, experiment.controls)),
        tests=tuple(map(functions.beside, experiment.tests)),
    )
    first = folder / EXPERIMENT
    text = comment + tomli_w.dumps(experiment_tables(self_contained, name, place))
    written[first] = text.encode()
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content)
    return first, *sorted(written.keys() - {first})


def _different(configs: Sequence[TrainConfig]) -> list[TrainConfig]:
    found: list[TrainConfig] = []
    for config in configs:
        if config not in found:
            found.append(config)
    return found


class _Functions:
    """Copies the files of ``file:function``; those of one folder stay together."""

    def __init__(self, folder: Path, written: dict[Path, bytes]) -> None:
        self._folder, self._written = folder, written
        self._copied: list[Path] = []
        """The folders that files were copied from, in the order of their numbers."""

    def beside(self, spec: SetSpec) -> SetSpec:
        """The set with its functions in copied files, by relative paths."""
        return replace(
            spec,
            inject=self._placed(spec.inject),
            own_techniques=tuple(map(self._technique, spec.own_techniques)),
        )

    def _technique(self, own: OwnTechnique) -> OwnTechnique:
        return replace(own, apply=self._placed(own.apply), in_force=self._placed(own.in_force))

    def _placed(self, function: str | None) -> str | None:
        if function is None:
            return None
        written, _, name = function.rpartition(":")
        path = Path(written)
        if path.parent not in self._copied:
            self._copied.append(path.parent)
        below = f"code{self._copied.index(path.parent) or ''}"
        _add(path, path.parent, self._folder / below, self._written)
        return f"{below}/{path.name}:{name}"


def _add(path: Path, root: Path, folder: Path, written: dict[Path, bytes]) -> None:
    """Add a Python file, and what it imports from a folder of its own, as they lie there."""
    for each in with_imports(path, [root]):
        inside = each.relative_to(root)
        content = each.read_bytes()
        if written.setdefault(folder / inside, content) != content:
            raise ConfigError(
                Problem(str(each), f"is another {inside} than that of the other set", "rename one")
            )
