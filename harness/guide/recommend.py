"""The sets that the converging guide asks for, given the techniques to test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from converge_harness.errors import ConfigError, Problem
from converge_harness.guide.base import Base
from converge_harness.guide.cover import cover_pairs
from converge_harness.guide.factor import DATA, DDP, DEFAULT_SCHEDULE, HSDP, Factor, ordered
from converge_harness.guide.fit import Combination, breaches, completed, why_apart, with_needs
from converge_harness.model import LOCAL_BATCH, SetSpec, Technique
from converge_harness.plan.describe import serves
from converge_harness.plan.rules import count_microbatches
from converge_harness.plan.sizes import precision_of
from converge_harness.trainers import pipeline_stages

COARSE = (Technique.FLOAT8, Technique.FLOAT8_ROWWISE, Technique.BF16)
"""Techniques that change the arithmetic, and so the precision of a run."""
ALL_AT_ONCE = (
    "All of them at once: the guide lets a combination of higher dimension stand for its subsets.",
    "If it fails, the sets above find the culprit.",
)
ONE_OF_FEWEST = (
    "One of the fewest sets in which every pair of techniques meets that can.",
    "The guide lets a combination of higher dimension stand for its subsets.",
)
KEPT = ("same-dp-degree", "same-token-budget", "same-steps", "same-initial-weights")
"""Rules of the guide that every test set follows, whatever its degrees."""
MAX_NAME = 80
"""Longest name that an experiment file accepts."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """A control or test set, and why it is there."""

    spec: SetSpec
    """Its ``note`` begins with what the guide wants it for."""
    comments: tuple[str, ...]
    """Comments for the file: what the guide says, and which settings satisfy which rules."""


def recommend(base: Base, named: Sequence[Factor]) -> tuple[Recommended, ...]:
    """The control, then the minimal test set of every factor, then their composition.

    The composition is one set if everything can run together, else the fewest sets that contain
    every possible pair. A set that would repeat another is left out.

    Raises:
        ConfigError: every factor that cannot run in any set on this base, and why.
    """
    least = [_least(base, factor, named) for factor in named]
    problems = [
        Problem(f"--technique {factor}", "; ".join(why))
        for factor, combination in zip(named, least, strict=True)
        if (why := _problems(base, factor, combination, named))
    ]
    if problems:
        raise ConfigError(problems)
    tests = [
        _test(base, combination, factor)
        for factor, combination in zip(named, least, strict=True)
        if combination is not None
    ]
    together = _composed(named)
    jobs = cover_pairs(base, completed(base, together)).jobs if together else ()
    composed = [each for job in jobs if (each := frozenset(job.factors)) not in least]
    tests += [proposed(base, each, alone=len(jobs) == 1) for each in composed]
    return (_control(base), *with_own_names(tests))


def _composed(named: Sequence[Factor]) -> list[Factor]:
    """The factors of the composition: the first degree of every parallelism, and every technique.

    Without DDP, which the guide uses only to verify FSDP on small models, and without further
    degrees of a parallelism, which are tested in their 2D sets.
    """
    first = {factor.slot: factor for factor in reversed(named) if factor.variant != DDP}
    return [factor for factor in named if first.get(factor.slot) == factor]


def _least(base: Base, factor: Factor, named: Sequence[Factor]) -> Combination | None:
    return with_needs(base, frozenset({factor}), named)


def _problems(
    base: Base, factor: Factor, combination: Combination | None, named: Sequence[Factor]
) -> list[str]:
    if combination is None:
        return [why_apart(base, frozenset({factor}), named, None)]
    return breaches(base, combination)


# --------------------------------------------------------------------- the sets


def _control(base: Base) -> Recommended:
    spec = base.control.spec
    comments = (
        "The guide takes 1D FSDP to be right (control-is-1d-fsdp).",
        "It is run more than once, so that limits are learnt (control-is-repeated).",
    )
    return Recommended(replace(spec, note=f"{serves(base.control, base.control)}."), comments)


def _test(base: Base, combination: Combination, factor: Factor) -> Recommended:
    spec = base.spec(combination, _name(base, _named_factors(combination, factor)))
    return _noted(base, spec, [*_why(base, spec, factor), *_sizes(base, spec)], "")


def proposed(base: Base, combination: Combination, *, alone: bool) -> Recommended:
    """A composition as a test set; ``alone`` if it contains everything under test."""
    spec = base.spec(combination, _name(base, combination))
    comments = (*(ALL_AT_ONCE if alone else ONE_OF_FEWEST), *_sizes(base, spec))
    return _noted(base, spec, comments, "Stands for all of its subsets.")


def _noted(base: Base, spec: SetSpec, comments: Sequence[str], more: str) -> Recommended:
    sentence = serves(base.job(spec), base.control)
    note = f"{sentence}. {more}".strip()
    return Recommended(replace(spec, note=note), (*comments, *_kept(spec)))


def _why(base: Base, spec: SetSpec, factor: Factor) -> Iterator[str]:
    """What the guide says about the minimal set of a factor."""
    count = base.job(spec).world_size
    if factor.slot == DATA:
        other = "DDP" if factor.variant == DDP else "HSDP"
        yield f"FSDP is itself verified by comparing it with {other} on as many ranks."
    elif factor.slot == "ep":
        yield f"A parallelism: its least test set is 2D. EP borrows its ranks: {count} in all."
    elif factor.is_parallelism:
        yield (
            "A parallelism: its least test set is 2D, on dp x p = "
            f"{base.dp} x {factor.degree} = {count} ranks."
        )
        if factor.slot == "pp" and factor.variant:
            yield f"A pipeline schedule is tested on FSDP + PP: here {spec.pipeline_schedule}."
    else:
        if factor.own:
            yield f"{factor.own.what}: a technique of your own ([technique.{factor.slot}])."
        yield from _why_technique(base, spec, factor.slot)


def _why_technique(base: Base, spec: SetSpec, name: str) -> Iterator[str]:
    tp = spec.parallelism.tp
    needs = [*([f"TP {tp}"] if tp > 1 else []), *(each for each in spec.techniques if each != name)]
    yield (
        f"No parallelism: tested on FSDP{''.join(f' + {each}' for each in needs)}, against the "
        "same 1D control" + (", since it needs them (technique-needs)." if needs else ".")
    )
    if precision_of(spec) is not base.control.precision:
        coarse = ", ".join(f'"{each}"' for each in spec.techniques if each in COARSE)
        yield (
            "Its arithmetic is coarser than the control's, so coarse limits hold. For sharp ones "
            f"add a [controls.NAME] with techniques = [{coarse}] and "
            'waive = ["control-is-1d-fsdp"].'
        )


def _sizes(base: Base, spec: SetSpec) -> Iterator[str]:
    """What batch a pipeline needs, and how the token budget stays the same."""
    if spec.parallelism.pp == 1:
        return
    job = base.job(spec)
    stages, micro = pipeline_stages(job), count_microbatches(job)
    yield f"{spec.pipeline_schedule}: {stages} stages, {micro} microbatches (pp-microbatches)."
    if LOCAL_BATCH in spec.overrides and job.local_batch_size != base.control.local_batch_size:
        yield (
            f"So the local batch is {job.local_batch_size}, not {base.control.local_batch_size}; "
            f"the global batch stays {job.global_batch_size} (same-token-budget)."
        )
    key = base.microbatch_key
    if key in spec.overrides and spec.train_config.setting(key) is None:
        yield "Microbatches of 2: the all-gathers of a smaller one do not fuse for async TP."


def _kept(spec: SetSpec) -> Iterator[str]:
    """The rules of the guide that every test set follows."""
    names = [*KEPT, *(["pp-microbatches"] if spec.parallelism.pp > 1 else [])]
    yield f"Keeps {', '.join(names)}."


# -------------------------------------------------------------------- the names


def _named_factors(combination: Combination, factor: Factor) -> Combination:
    """The factors in the name of a minimal set: its parallelisms and the technique under test."""
    return frozenset(each for each in combination if each.is_parallelism) | {factor}


def _name(base: Base, combination: Combination) -> str:
    factors = ordered(combination)
    data = next((each for each in factors if each.slot == DATA), None)
    if data is None:
        parts = [f"fsdp{base.dp}"]
    elif data.variant == HSDP:
        parts = [f"hsdp{data.degree}x{base.dp // data.degree}"]
    else:
        parts = [f"ddp{base.dp}"]
    axes = [each for each in factors if each.is_parallelism and each is not data]
    parts += [f"{each.slot}{each.degree}" for each in axes]
    parts += [
        each.variant.lower()
        for each in axes
        if each.variant and (each.slot != "pp" or each.variant != DEFAULT_SCHEDULE)
    ]
    parts += [each.slot for each in factors if not each.is_parallelism]
    return "_".join(parts)[:MAX_NAME].rstrip("_")


def with_own_names(tests: Sequence[Recommended]) -> list[Recommended]:
    """The sets with unique names, if two were cut to the same."""
    taken: dict[str, int] = {}
    found = []
    for test in tests:
        name = test.spec.name
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            end = f"_{taken[name]}"
            name = name[: MAX_NAME - len(end)] + end
        found.append(replace(test, spec=replace(test.spec, name=name)))
    return found
