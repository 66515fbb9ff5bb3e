"""A technique under test as people name it: ``tp=2``, ``pp=2:Interleaved1F1B``, ``float8``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.model import Kind, OwnTechnique, SetSpec, Technique

AXES = ("tp", "cp", "pp", "ep")
"""Parallelisms that multiply the ranks of data parallelism, or reuse them (``ep``)."""
DATA = "dp"
"""Slot of ``hsdp`` and ``ddp``, which replace FSDP."""
SLOTS = (DATA, *AXES, *map(str, Technique))
"""A job has at most one factor per slot."""
HSDP, DDP = "hsdp", "ddp"
ALIASES = {"dp_replicate": HSDP}
WORDS = (*AXES, HSDP, *ALIASES, DDP, *map(str, Technique))
"""What ``--technique`` takes, without degrees."""
DEFAULT_SCHEDULE = "1F1B"
"""Schedule of a pipeline that names none."""
MOST_RANKS = 65_536
"""Largest degree that an experiment file accepts."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing under test: a parallelism with its degree, or another technique."""

    slot: str
    """One of ``SLOTS``, or the name of a technique of one's own."""
    degree: int = 1
    """1 for ``ddp`` and for a technique that is not a parallelism."""
    variant: str = ""
    """Pipeline schedule or CP rotation if named; ``hsdp`` or ``ddp`` in slot ``dp``."""
    own: OwnTechnique | None = None
    """The technique of one's own that it is."""

    @property
    def is_parallelism(self) -> bool:
        return self.slot in (DATA, *AXES)

    @property
    def technique(self) -> Technique | None:
        return None if self.is_parallelism or self.own else Technique(self.slot)

    def __str__(self) -> str:
        """As in ``--technique``."""
        if self.slot == DATA:
            return DDP if self.variant == DDP else f"{HSDP}={self.degree}"
        if not self.is_parallelism:
            return self.slot
        return f"{self.slot}={self.degree}" + (f":{self.variant}" if self.variant else "")


def ordered(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Parallelisms first and techniques of one's own last, as in names and tables."""

    def place(each: Factor) -> tuple[int, str, int, str]:
        index = len(SLOTS) if each.own else SLOTS.index(each.slot)
        return index, each.slot, each.degree, each.variant

    return tuple(sorted(factors, key=place))


def parse_factors(
    texts: Sequence[str], variants: Mapping[str, Sequence[str]], where: str = "--technique"
) -> tuple[Factor, ...]:
    """Parse ``--technique``: its factors in order, without duplicates.

    Args:
        texts: comma-separated words of one or several options. variants: by parallelism, what may
        follow the degree: schedules for ``pp``, rotations for ``cp``. where: the option, for
        messages.

    Raises:
        ConfigError: all mistakes in all words.
    """
    words = [word for text in texts for word in (part.strip() for part in text.split(",")) if word]
    problems: list[Problem] = []
    found = [_own(word) or _parse(word, variants, where, problems) for word in words]
    if not words:
        problems.append(Problem(where, "names no technique", f"valid: {', '.join(WORDS)}"))
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(factor for factor in found if factor is not None))


def _own(word: str) -> Factor | None:
    """``fused_norm=my_norm.py:use_fused_norm``: a technique of one's own.

    Whether its name and its function are right is found when the file is loaded.
    """
    name, _, rest = word.partition("=")
    file, _, function = rest.rpartition(":")
    if not name or not file.endswith(".py"):
        return None
    what = f"{name}, by {function} of {file}"
    return Factor(name, own=OwnTechnique(name, what, apply=rest))


def _parse(
    word: str, variants: Mapping[str, Sequence[str]], where: str, problems: list[Problem]
) -> Factor | None:
    name, equals, rest = word.partition("=")
    name = ALIASES.get(name, name)
    place = f"{where} {word}"
    if name not in WORDS:
        hint = suggest(name, WORDS)
        own = f"one of your own: {name}=my_file.py:my_function"
        problems.append(
            Problem(place, f"{name!r} is not known", "; ".join(filter(None, (hint, own))))
        )
        return None
    if name not in (*AXES, HSDP):
        if equals:
            problems.append(Problem(place, f"{name} takes no degree", f"write {name}"))
            return None
        return Factor(DATA, variant=DDP) if name == DDP else Factor(name)
    degree, colon, variant = rest.partition(":")
    if not (degree.isascii() and degree.isdigit() and 1 < int(degree[:9]) <= MOST_RANKS):
        problems.append(
            Problem(place, f"{name} needs a degree from 2 to {MOST_RANKS}", f"as {name}=2")
        )
        return None
    valid = variants.get(name, ())
    if colon and variant not in valid:
        hint = suggest(variant, valid) or f"write {name}={degree}"
        problems.append(Problem(place, f"{name} has no {variant!r}", hint))
        return None
    return Factor(DATA, int(degree), HSDP) if name == HSDP else Factor(name, int(degree), variant)


def factors_of(specs: Iterable[SetSpec]) -> tuple[Factor, ...]:
    """Factors that the parallel sets among ``specs`` test, each once, in order of first use."""
    return tuple(
        dict.fromkeys(
            factor for spec in specs if spec.kind is Kind.PARALLEL for factor in _factors(spec)
        )
    )


def _factors(spec: SetSpec) -> Iterable[Factor]:
    degrees = spec.parallelism
    if degrees.dp_replicate > 1:
        if degrees.dp_shard > 1:
            yield Factor(DATA, degrees.dp_replicate, HSDP)
        else:
            yield Factor(DATA, variant=DDP)
    named = {"pp": spec.pipeline_schedule or "", "cp": spec.cp_rotation or ""}
    for axis in AXES:
        degree = getattr(degrees, axis)
        if degree > 1:
            yield Factor(axis, degree, named.get(axis, ""))
    yield from (Factor(technique.value) for technique in spec.techniques)
    yield from (Factor(own.name, own=own) for own in spec.own_techniques)
