"""Names a factor: which number of a run the ratio of two curves or tensors equals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.curves import series
from converge_harness.judge.degrees import in_force_over, max_norm
from converge_harness.model import Evidence, Floats, InForce, Integers

FIRST_STEP_MATCH = 1e-2
"""A ratio equals a quantity when it does so within 1% at the first step, where nothing drifts …"""
LATER_MATCH = 3e-2
"""… and within 3% in the median over all steps."""
NEAR_ONE = 0.1
"""To equal a quantity near one, a ratio may be off by this share of its distance from one."""
FEWEST_BATCHES, ALIKE = 8, 0.85
"""A factor varies as a quantity does when at least so many batches correlate so well: by chance 8
do so once in 250, 15 once in 30,000."""
LEAST_LOSS_SCALE, MOST_LOSS_SCALE = 7, 127
"""Loss scales are powers of two; one below 2^7 may be a degree or a count, and float32 ends at
2^127."""
MOST_NAMED = 3
"""How many quantities that fit are named."""

PLAIN, PRODUCT, MIXED, SQUARE = 1, 2, 3, 4
"""Costs of: a number of the run itself; a product of two that both differ in the control; a product
of two of which one is the control's; and a square (something divided twice)."""

_AVERAGING = "an average where a sum belongs, or the reverse"
_PLACES = {
    "dp_replicate": (
        "the replicate degree",
        f"how replicas are reduced: {_AVERAGING}, in DDP's or HSDP's all-reduce",
    ),
    "dp_shard": (
        "the shard degree",
        f"FSDP's reduce-scatter: {_AVERAGING}, gradient_divide_factor",
    ),
    "tp": (
        "the TP degree",
        "TP's gradient placements: a Partial that is reduced twice, or a Replicate that is summed",
    ),
    "cp": (
        "the CP degree",
        f"the loss mesh: {_AVERAGING} over the cp ranks, which FSDP's mesh includes",
    ),
    "pp": (
        "the PP degree",
        "the pipeline schedule: scale_grads, and the loss that its last stage computes",
    ),
    "ep": (
        "the EP degree",
        "the expert parameters' own FSDP mesh: its gradient_divide_factor, and the token dispatch",
    ),
}
_TOKENS = "where the loss or its gradients are divided by the valid tokens"
_BATCH = "means over samples: of sums or of what is a mean over tokens already"
_SHARED = (_TOKENS, _BATCH)
"""For numbers that the control shares on purpose: another bug would make the control wrong, too."""
_LOSS_SCALE = "the loss scaler: which gradients are unscaled before clipping, and whether all are"
_PARTS = "how microbatches add up: the loss divided once for each of them, or for all at once"


class Quantity(NamedTuple):
    """A number of a run by which a bug may multiply or divide."""

    name: str
    values: Floats
    """One per step: most are constant, valid tokens are not."""
    where: str
    """What to look at when gradients are off by this."""
    cost: int = PLAIN
    """How far-fetched it is: of the quantities that fit, only the cheapest are named."""

    def __str__(self) -> str:
        return f"{self.name} ({self.values[0]:g})"


class NamedFactor(NamedTuple):
    """What a ratio equals."""

    text: str = ""
    """The quantities that fit, or one over them; empty when none does."""
    where: str = ""
    """What to look at, for the first of them."""


class Match(NamedTuple):
    """How near to a quantity a ratio must be: at the first step, and in the median of all."""

    first: float = FIRST_STEP_MATCH
    later: float = LATER_MATCH

    def fits(self, ratio: Floats, values: Floats) -> bool:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            off = np.abs(ratio / values - 1)
        near = NEAR_ONE * float(abs(values[0] - 1))
        first, later = min(self.first, near), min(self.later, near)
        return bool(off[0] <= first and np.median(off) <= later)


class FrozenMatch(NamedTuple):
    """How near it must be over batches at frozen weights, which do not depend on each other."""

    most: float
    """Root mean square of the difference of the logarithms, in which ``NEAR_ONE`` holds as well."""

    def fits(self, ratio: Floats, values: Floats) -> bool:
        with np.errstate(divide="ignore", invalid="ignore"):
            found, meant = np.log(ratio), np.log(values)
            off, size = (np.sqrt(np.mean(each**2)) for each in (found - meant, meant))
        if not off <= self.most:
            return False
        return bool(off <= NEAR_ONE * size or _rise_together(found, meant))


def _rise_together(one: Floats, other: Floats) -> bool:
    """Whether two quantities vary alike from batch to batch.

    A factor that is itself a bfloat16 number is up to 0.4% off, perhaps as much as it varies.
    """
    if one.size < FEWEST_BATCHES or not (np.ptp(one) > 0 and np.ptp(other) > 0):
        return False
    return bool(np.corrcoef(one, other)[0, 1] >= ALIKE)


def named_factor(
    ratio: Floats,
    steps: Integers,
    test: Evidence,
    control: Evidence,
    match: Match | FrozenMatch = Match(),  # noqa: B008 (frozen)
) -> NamedFactor:
    """Names the quantities (or one over them) that a ratio equals.

    ``ratio`` has one entry per step. Quantities that are the same in the control explain a
    difference to it less well, so they are named only when no other fits. Products are named only
    beside plain numbers or alone, mixed ones and squares only alone.
    """
    theirs = {quantity.name: quantity for quantity in _quantities(control, steps)}
    special: list[tuple[Quantity, str]] = []
    common: list[tuple[Quantity, str]] = []
    for quantity in _quantities(test, steps, control):
        for fits, text in (
            (match.fits(ratio, quantity.values), str(quantity)),
            (match.fits(ratio, 1 / quantity.values), f"1 / {quantity}"),
        ):
            if fits:
                other = theirs.get(quantity.name)
                shared = other is not None and match.fits(quantity.values, other.values)
                (common if shared else special).append((quantity, text))
    found = sorted(special or common, key=lambda pair: pair[0].cost)
    if not found:
        return _loss_scale(ratio, match)
    dearest = max(PRODUCT, found[0][0].cost)
    said = ", or ".join([text for each, text in found if each.cost <= dearest][:MOST_NAMED])
    where = found[0][0].where
    shared = not special and where not in _SHARED
    return NamedFactor(f"{said}, which the control has, too" if shared else said, where)


def _loss_scale(ratio: Floats, match: Match | FrozenMatch) -> NamedFactor:
    """A power of two that is not a number of the run, as loss scales are."""
    if not np.isfinite(ratio[0]) or ratio[0] <= 0:
        return NamedFactor()
    power = round(float(np.log2(ratio[0])))
    if not LEAST_LOSS_SCALE <= abs(power) <= MOST_LOSS_SCALE:
        return NamedFactor()
    if not match.fits(ratio, np.full(ratio.size, 2.0**power)):
        return NamedFactor()
    text = f"2^{abs(power)}, a power of two as loss scales are"
    return NamedFactor(text if power > 0 else f"1 / {text}", _LOSS_SCALE)


def _quantities(
    evidence: Evidence, steps: Integers, control: Evidence | None = None
) -> list[Quantity]:
    """The numbers of the run, step by step: another pass may have other degrees and counts.

    Where a pass does not have a quantity, it is one there: a factor of one changes nothing.
    """
    found: dict[str, Quantity] = {}
    for ran, here in in_force_over(evidence, steps):
        for quantity in _quantities_of(ran, evidence, steps[here], control):
            values = np.ones(steps.size)
            whole = found.setdefault(quantity.name, quantity._replace(values=values))
            whole.values[here] = quantity.values
    return list(found.values())


def _quantities_of(
    ran: InForce, evidence: Evidence, steps: Integers, control: Evidence | None
) -> list[Quantity]:
    """The numbers of the run while one configuration was in force, without ones."""
    base = (control.in_force if control else None) or InForce()
    degrees = ran.degrees
    dp = _product(degrees, "dp_replicate", "dp_shard")
    numbers = [*_degrees(degrees, base.degrees, dp, ran.world_size), *_counts(ran)]
    constant = [
        Quantity(name, np.full(steps.size, float(value)), where, cost)
        for name, value, where, cost in numbers
        if value is not None and value > 1
    ]
    clipping = _clipping(control, steps) if control else []
    return constant + _token_quantities(ran, evidence, steps, dp) + clipping


Degrees = Mapping[str, int | None]
"""As in ``InForce``."""
_Number = tuple[str, int | None, str, int]
"""Name, value, where to look, and cost."""


def _degrees(
    degrees: Degrees, base: Degrees, dp: int | None, world: int | None
) -> Iterator[_Number]:
    """Degrees, their products and squares, each number under one name."""
    for key, (name, where) in _PLACES.items():
        yield name, degrees.get(key), where, PLAIN
        yield f"{name} squared", _product(degrees, key, key), where, SQUARE
    if dp not in (degrees.get("dp_replicate"), degrees.get("dp_shard")):
        yield "the data-parallel degree", dp, _PLACES["dp_replicate"][1], PLAIN
    loss_mesh = _product(degrees, "dp_replicate", "dp_shard", "cp")
    if loss_mesh not in (dp, degrees.get("cp")):
        where = _PLACES["cp"][1]
        yield "the number of ranks that share the loss (dp x cp)", loss_mesh, where, PLAIN
    if world not in (*degrees.values(), dp, loss_mesh):
        yield "the world size", world, f"reductions over all ranks: {_AVERAGING}", PLAIN
    for one, other in combinations(_PLACES, 2):
        pair = _product(degrees, one, other)
        trivial = 1 in (degrees.get(one), degrees.get(other))
        named = {one, other} <= {"dp_replicate", "dp_shard", "cp"} and pair in (dp, loss_mesh)
        if not trivial and not named and pair != world:
            mixed = any(degrees.get(key) == base.get(key) for key in (one, other))
            yield f"{one} x {other}", pair, _PLACES[other][1], MIXED if mixed else PRODUCT


def _counts(ran: InForce) -> Iterator[_Number]:
    """How many parts a step consists of."""
    accumulation = ran.gradient_accumulation_steps
    microbatches = ran.pipeline_microbatches
    yield "gradient accumulation steps", accumulation, _PARTS, PLAIN
    yield "pipeline microbatches", microbatches, _PARTS, PLAIN
    if accumulation is not None and microbatches is not None and accumulation > 1:
        yield "accumulation steps x microbatches", accumulation * microbatches, _PARTS, PRODUCT
    yield "the global batch size", ran.global_batch_size, _BATCH, MIXED
    yield "the local batch size", ran.local_batch_size, _BATCH, MIXED
    yield "the sequence length", ran.seq_len, _TOKENS, MIXED


def _token_quantities(
    ran: InForce, evidence: Evidence, steps: Integers, dp: int | None
) -> list[Quantity]:
    """Valid tokens of the step, and the shares of it that ranks, microbatches and samples have."""
    counts = _values(evidence, "tokens", steps)
    found = []
    if counts.size and np.all(counts > 1):
        found.append(Quantity("the valid tokens of the step", counts, _TOKENS))
        before = _values(evidence, "tokens", steps - 1)
        if np.all(before > 1) and not np.array_equal(before, counts):
            name = "the valid tokens over those of the step before"
            found.append(Quantity(name, counts / before, _TOKENS, MIXED))
        for name, parts in _shares(ran, dp):
            if parts is not None and parts > 1:
                each = counts / parts
                found.append(Quantity(f"the valid tokens of {name}", each, _TOKENS, PRODUCT))
    batch, length = ran.global_batch_size, ran.seq_len
    if batch is not None and length is not None and batch * length > 1:
        places = np.full(steps.size, float(batch * length))
        if not np.array_equal(places, counts):
            found.append(Quantity("the token budget of the step", places, _TOKENS, PRODUCT))
            if np.all(counts > 1):
                name = "the valid tokens over the token budget"
                found.append(Quantity(name, counts / places, _TOKENS))
    return found


def _shares(ran: InForce, dp: int | None) -> Iterator[tuple[str, int | None]]:
    """What a step's tokens are divided among, and among how many."""
    accumulation = ran.gradient_accumulation_steps
    microbatches = ran.pipeline_microbatches
    cp = ran.degrees.get("cp")
    yield "a data-parallel rank", dp
    yield "an accumulation step", accumulation
    yield "a pipeline microbatch", microbatches
    yield "a sample", ran.global_batch_size
    if cp is not None and cp > 1 and dp is not None and dp > 1:
        yield "a rank", dp * cp
    parts = [each for each in (dp, accumulation, microbatches) if each is not None]
    if sum(each > 1 for each in parts) > 1:
        yield "one rank's microbatch", prod(parts)


def _clipping(control: Evidence, steps: Integers) -> list[Quantity]:
    """The factor by which clipping multiplies the control's gradients."""
    most = max_norm(control.in_force, control.keys)
    norms = _values(control, "grad_norm_recomputed", steps)
    if most is None or not norms.size or not np.all(norms > most):
        return []
    where = "what clips gradients before they are complete, or once more"
    return [Quantity(f"the share that clipping to {most:g} leaves", most / norms, where, MIXED)]


def _values(evidence: Evidence, signal: str, steps: Integers) -> Floats:
    """A signal at each of some steps; NaN where there is none."""
    curve = series(evidence, signal)
    known = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    return np.array([known.get(step, np.nan) for step in steps.tolist()], dtype=np.float64)


def _product(degrees: Degrees, *names: str) -> int | None:
    """Product of degrees; None when one is not known."""
    product = 1
    for name in names:
        degree = degrees.get(name)
        if degree is None:
            return None
        product *= degree
    return product
