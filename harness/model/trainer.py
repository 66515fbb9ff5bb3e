"""Which trainer a set has, as facts: what asks them knows no trainer by name.

A trainer itself, what it does, is an object of ``harness/trainers``; it fills these in when an
experiment file is read. The judge and all others that may not import it go by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from converge_harness.model.kinds import Kind

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
PLAIN_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "training.seq_len": 1,
        "training.dtype": "float32",
        "training.mixed_precision_param": "float32",
    }
)
"""What a train config means that leaves a key out: samples may be no sequences."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The trainer of a set."""

    kind: str
    """By which ``converge_harness.trainers`` finds it again."""
    can: Capabilities = field(default_factory=Capabilities)
    settings: Any = None
    """What ``[trainer]`` says to it alone: a frozen value of its own."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: PLAIN_DEFAULTS)
    """Keys that its train configs may leave out, and what they are then."""


TORCHTITAN = TrainerSpec(
    DEFAULT_TRAINER,
    EVERYTHING,
    defaults=MappingProxyType(
        {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}
    ),
)
"""What trains a set of which nothing else is said."""
