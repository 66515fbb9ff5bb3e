"""Which trainer a set has, as facts: what asks them knows no trainer by name.

A trainer itself, what it does, is an object of ``harness/trainers``; it fills these in when an
experiment file is read. The judge and all others that may not import it go by them.

``Command`` is how a program of the user's is called; its templates are arguments, paths or values
with placeholders in braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.model.kinds import Kind

DEFAULT_TRAINER = "torchtitan"
"""``[trainer] kind`` of a file that names none."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a trainer can do. By default as little as any program that leaves a curve."""

    probed: bool = False
    """Its runs leave the probe's evidence; else a curve is all that they leave."""
    all_signals: bool = False
    """They leave every judged signal; else what its loop happens to compute."""
    audits_config: bool = False
    """``in_force.json`` tells its whole config and every choice that a set can name; else only what
    can be seen of a program from outside."""
    counts_tokens: bool = False
    """A sample has the tokens that the config says; else only the program knows."""
    shares_initial_weights: bool = False
    """All its runs start from one seed checkpoint; else the program makes them of the seed."""
    techniques: bool = False
    """Sets may name techniques, schedules, injected code: its adapters give them a meaning."""
    guided: bool = False
    """The rules of torchtitan's converging guide are about its parallelism and its loaders."""
    references: bool = False
    """A run of it can be made once more in another precision, for one step."""
    rounds_otherwise: bool = False
    """It can round what it computes in low precision another way: ``rounding`` repeats."""
    frozen_steps: bool = False
    """It can make forward and backward passes at the initial weights before it trains."""
    kinds: frozenset[Kind] = frozenset({Kind.PARALLEL})
    """Kinds of sets that it can run."""
    checks_config: bool = False
    """It can be asked whether it would take a config, before anything starts."""
    dry_run: bool = False
    """It can build a rank of a set without the hardware."""
    warm_start: bool = False
    """Its ranks can be forked from a process that has imported everything."""
    several_nodes: bool = False
    """A scheduler can run it."""
    goldens: bool = False
    """All that makes up a run of it is known, so a control of it can be blessed."""
    repeatable_argv: bool = False
    """The argv of a run makes the run again, by itself."""


EVERYTHING = Capabilities(
    probed=True,
    all_signals=True,
    audits_config=True,
    counts_tokens=True,
    shares_initial_weights=True,
    techniques=True,
    guided=True,
    references=True,
    rounds_otherwise=True,
    frozen_steps=True,
    kinds=frozenset(Kind),
    checks_config=True,
    dry_run=True,
    warm_start=True,
    several_nodes=True,
    goldens=True,
    repeatable_argv=True,
)
"""All that the harness may ask of a trainer."""
NUMERICS: Mapping[str, str] = MappingProxyType(
    {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
)
"""torchtitan's own defaults of the data types that a train config names."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The trainer of a set."""

    kind: str = DEFAULT_TRAINER
    """By which ``harness.trainers`` finds it again."""
    can: Capabilities = EVERYTHING
    settings: Any = None
    """What ``[trainer]`` says to it alone: a frozen value of its own."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: NUMERICS)
    """Keys of ``[training]`` that its train configs may leave out, and what they are then."""


class RankLauncher(StrEnum):
    """What starts the ranks of a command trainer: ``[trainer] launcher``."""

    TORCHRUN = "torchrun"
    COMPOSER = "composer"
    DEEPSPEED = "deepspeed"
    MPIRUN = "mpirun"
    NONE = "none"
    """Nothing: the template is the whole argv, and starts its ranks itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a set's program is called, and what it leaves.

    Everything here changes numbers or what is read as evidence, and counts to the identity of a
    job, but for ``folder``.
    """

    argv: tuple[str, ...]
    """The template: what follows the launcher's own options, or with ``NONE`` the whole argv. Each
    entry is one argument, in which ``{name}`` stands for a value (docs/any-trainer.md); ``{{`` and
    ``}}`` are braces. No shell ever sees it."""
    folder: Path
    """Absolute: where the program is started."""
    launcher: RankLauncher = RankLauncher.TORCHRUN
    probed: bool = True
    """Whether the program calls ``harness.probe``, which then leaves all evidence; else it leaves a
    curve of its own, and that is all there is."""
    curves: str | None = None
    """Template of the path of that curve, ``{output}/…``, in any format that ``converge compare``
    reads; None for a probed program."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Signal, or ``step``, to its name in the curve; others are found by their known names."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its ranks are given beside the harness's environment; values are templates."""
    sources: tuple[Path, ...] = ()
    """Absolute paths of the files whose bytes count to the identity: those of the template that are
    there, and those that the file names (``files``)."""


PLACEHOLDERS = (
    "steps",
    "seed",
    "output",
    "data",
    "python",
    "name",
    "ranks",
    "dp",
    "dp_replicate",
    "dp_shard",
    "tp",
    "cp",
    "pp",
    "ep",
    "local_batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "seq_len",
)
"""What stands between braces, beside keys of the train config."""
CONFIG = "config."
"""How a placeholder of the train config starts: ``{config.zero.stage}``."""
_PART = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")


def placeholders(template: str) -> tuple[str, ...]:
    """The names between the braces of a template, in order, known or not.

    Raises:
        ValueError: a brace is alone; those that are meant are doubled.
    """
    found = []
    for part in _PART.finditer(template):
        if part["name"] is not None:
            found.append(part["name"])
        elif part[0] in "{}":
            raise ValueError(f"the brace {part[0]!r} at character {part.start() + 1} is alone")
    return tuple(found)


def fill(template: str, value_of: Callable[[str], str]) -> str:
    """The template with every placeholder replaced by its value, and doubled braces by one.

    What a value brings is not looked at again. Raises whatever ``value_of`` raises, and ValueError
    as ``placeholders`` does.
    """
    placeholders(template)

    def filled(part: re.Match[str]) -> str:
        return part[0][0] if part["name"] is None else value_of(part["name"])

    return _PART.sub(filled, template)
