"""A Python that converge has no recipe for, as files from which others make its like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from converge_harness.errors import ConfigError, Problem
from converge_harness.matrix.save import SavedMatrix, versions_then
from converge_harness.model import Experiment
from converge_harness.toolchains.find import PACKAGES
from converge_harness.toolchains.pinned import Pinned, pinned
from converge_harness.toolchains.recipes import has_recipe
from converge_harness.trainers import trainer_of


@dataclass(frozen=True, slots=True)
class Environment:
    """Such a Python in a folder for others, whose script makes its like."""

    folder: str
    """In the written folder: ``env``."""
    pinned: Pinned
    is_probed: bool
    """Whether its programs import converge."""

    @property
    def python(self) -> str:
        return f"{self.folder}/bin/python"

    @property
    def requirements(self) -> str:
        """Name of the file with its packages."""
        return f"{self.folder}.txt"

    @property
    def text(self) -> str:
        """Content of that file."""
        pinned = self.pinned
        head = [f"# The packages of Python {pinned.release} in which it failed."]
        head += [f"# Not here: {each}." for each in pinned.lacking]
        return "\n".join((*head, *pinned.lines, ""))

    def commands(self) -> Iterator[str]:
        """What makes it."""
        minor = ".".join(self.pinned.release.split(".")[:2])
        yield f"[ -x {self.python} ] || python{minor} -m venv {self.folder}"
        if self.pinned.lines:
            yield f"{self.python} -m pip install --quiet -r {self.requirements}"
        if self.is_probed:
            yield f"converge toolchain install {self.python}"


def environments_of(finished: SavedMatrix, alone: Experiment) -> dict[str, Environment]:
    """By toolchain, those that ``converge toolchain build`` cannot make.

    Raises ConfigError if the packages of one have changed since.
    """
    then = versions_then(finished.plan, finished.records)
    found: dict[str, Environment] = {}
    for spec in (*alone.controls, *alone.tests):
        if spec.toolchain in found or has_recipe(spec.toolchain):
            continue
        (job, *_) = (each for each in finished.plan.jobs if each.spec.name == spec.name)
        packages = pinned(job.toolchain.python)
        if packages.packages != then[job.toolchain.name].get(PACKAGES):
            raise ConfigError(
                Problem(
                    str(job.toolchain.python),
                    f"has other packages than when {spec.name!r} was run in it",
                    f"run it again: converge run {alone.path} --only {alone.tests[0].name}",
                )
            )
        trainer = trainer_of(spec)
        is_probed = spec.trainer.can.probed and not trainer.own_rank_code
        found[spec.toolchain] = Environment(f"env{len(found) or ''}", packages, is_probed)
    return found
