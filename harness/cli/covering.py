"""``converge plan --cover pairs``: the fewest jobs in which every pair of techniques meets."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from harness import guide
from harness.cli import matrix
from harness.cli.initializing import TITAN_03, VARIANTS, read_base, toolchain_for
from harness.cli.shared import make_console, names, say
from harness.errors import ConfigError, Problem
from harness.gate import ExitCode
from harness.guide.cover import Pair, ProposedJob
from harness.guide.factor import ordered
from harness.model import Plan, Role, SetSpec, Setting
from harness.trainers import assume_toolchain

DEFAULT_DP = 2
"""The least degree at which FSDP shards anything."""


def cover(arguments: argparse.Namespace) -> ExitCode:
    """Propose jobs for an experiment's techniques, or for those of ``--technique``."""
    _require_sense(arguments)
    common: Mapping[str, Setting] = {}
    if arguments.experiment is not None:
        base, named, common = _of_experiment(arguments)
    else:
        base, named = _of_options(arguments)
        common = base.control.spec.overrides
    factors = guide.completed(base, named)
    found = guide.cover_pairs(base, factors, arguments.gpus)
    sets = guide.with_own_names(
        [
            guide.proposed(base, frozenset(job.factors), alone=len(found.jobs) == 1)
            for job in found.jobs
        ]
    )
    if arguments.json:
        print(json.dumps(_document(base, found, sets, arguments.gpus), indent=2))
    elif arguments.toml:
        print("\n".join([*_beside(base, common), *guide.write_tests(sets, common)]))
    else:
        added = [each for each in factors if each not in named]
        _print(make_console(), base, found, sets, arguments.gpus, added)
    return ExitCode.PASS


def _beside(base: guide.Base, common: Mapping[str, Setting]) -> Iterator[str]:
    """What the file into which the entries are pasted must have."""
    yield f"# For a file whose control is {base.control.spec.parallelism}"
    if common:
        settings = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in common.items())
        yield f"# and whose [trainer.set] has {settings}"


def _require_sense(arguments: argparse.Namespace) -> None:
    """Refuse options that say two things, or nothing."""
    problems = []
    if (arguments.experiment is None) == (not arguments.technique):
        problems.append(
            Problem("--cover", "needs either an EXPERIMENT or --technique", "as tp=2,cp=2,float8")
        )
    if arguments.gpus is None:
        problems.append(Problem("--cover", "needs --gpus N", "the ranks of the largest job"))
    if arguments.experiment is not None:
        problems += [
            Problem(f"--{option}", "goes with --technique: an EXPERIMENT says it itself")
            for option in ("dp", "base")
            if getattr(arguments, option) is not None
        ]
    if arguments.json and arguments.toml:
        problems.append(Problem("--toml", "is not printed together with --json"))
    if problems:
        raise ConfigError(problems)


def _of_experiment(
    arguments: argparse.Namespace,
) -> tuple[guide.Base, tuple[guide.Factor, ...], Mapping[str, Setting]]:
    """The first control, what the test sets hold, and the settings that all sets share."""
    made: Plan = matrix.load_plan(
        arguments.experiment, names(arguments.only), on_gpu=True, find=assume_toolchain
    )
    control = next(job for job in made.jobs if job.role is Role.CONTROL)
    named = guide.factors_of(made.experiment.tests)
    if not named:
        raise ConfigError(
            Problem(
                str(arguments.experiment),
                "its parallel test sets hold no technique to pair",
                "name techniques with --technique instead",
            )
        )
    specs = [*made.experiment.controls, *made.experiment.tests]
    return guide.control_of(control, made.experiment), named, _shared(specs)


def _shared(specs: list[SetSpec]) -> dict[str, Setting]:
    first, *others = specs
    return {
        key: value
        for key, value in first.overrides.items()
        if all(key in other.overrides and other.overrides[key] == value for other in others)
    }


def _of_options(arguments: argparse.Namespace) -> tuple[guide.Base, tuple[guide.Factor, ...]]:
    named = guide.parse_factors(arguments.technique, VARIANTS)
    dp = arguments.dp or DEFAULT_DP
    if arguments.base is None:
        return guide.nominal_base(dp, assume_toolchain(TITAN_03), named), named
    config = read_base(arguments.base)
    return guide.sized_base(config, toolchain_for(config), dp, named), named


# -------------------------------------------------------------------- for people


def _print(
    console: Console,
    base: guide.Base,
    found: guide.Cover,
    sets: list[guide.Recommended],
    gpus: int,
    added: list[guide.Factor],
) -> None:
    words = ", ".join(map(str, ordered(found.factors)))
    say(console, f"{len(found.factors)} techniques on dp {base.dp}: {words}")
    if added:
        say(console, f"added, because others need them: {', '.join(map(str, added))}")
    if not base.sizes_known:
        say(console, f"no base config given: {TITAN_03}, any batch, sequence and model")
    table = Table(show_edge=False, show_lines=True)
    for title in ("job", "degrees", "techniques"):
        table.add_column(title, overflow="fold")
    table.add_column("ranks", justify="right")
    table.add_column("first to cover", overflow="fold", ratio=1)
    for number, (job, each) in enumerate(zip(found.jobs, sets, strict=True), 1):
        table.add_row(
            str(number),
            str(each.spec.parallelism),
            _techniques(each.spec),
            str(job.ranks),
            _first(job),
        )
    console.print(table)
    for line in (*_summary(found, gpus), *_apart(found)):
        say(console, line)


def _techniques(spec: SetSpec) -> str:
    extras = (spec.pipeline_schedule, spec.cp_rotation)
    return ", ".join([*map(str, spec.techniques), *(each for each in extras if each)]) or "none"


def _first(job: ProposedJob) -> str:
    """``all 15 pairs``, or which, where a job before has covered some."""
    pairs = sum(each.other is not None for each in job.first)
    if 0 < pairs == math.comb(len(job.factors), 2):
        return "the pair" if pairs == 1 else f"all {pairs} pairs of them"
    return "; ".join(map(str, job.first))


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def _summary(found: guide.Cover, gpus: int) -> Iterator[str]:
    jobs, single = len(found.jobs), found.pairs + found.alone
    proof = "proved to be the fewest"
    if found.at_most_more:
        proof = f"at most {found.at_most_more} more than the fewest"
    lone = f" ({_plural(found.alone, 'technique')} can meet no other)" if found.alone else ""
    yield (
        f"\n{_plural(jobs, 'job')} of at most {gpus} GPUs, beside the control: {proof}. "
        f"{_plural(found.pairs, 'pair')} can meet, and do{lone}."
    )
    yield (
        f"One job per pair would be {_plural(single, 'job')}, {single - jobs:,} more; all "
        f"combinations that fit, {found.combinations:,}, {found.combinations - jobs:,} more."
    )
    yield (
        "It rests on the guide's assumption that a combination of higher dimension implies its "
        "subsets. When a job fails, the sets of `converge init` find the culprit."
    )


def _apart(found: guide.Cover) -> list[str]:
    if not found.apart:
        return []
    reasons: dict[str, list[str]] = {}
    for each in found.apart:
        reasons.setdefault(each.why, []).append(str(each.pair))
    return [
        "",
        f"{_plural(len(found.apart), 'pair')} cannot meet:",
        *(f"  {', '.join(pairs)}: {why}" for why, pairs in reasons.items()),
    ]


# ------------------------------------------------------------------ for programs


def _document(
    base: guide.Base, found: guide.Cover, sets: list[guide.Recommended], gpus: int
) -> dict[str, object]:
    return {
        "schema": 1,
        "gpus": gpus,
        "dp": base.dp,
        "techniques": [str(each) for each in found.factors],
        "jobs": [
            {
                "name": each.spec.name,
                "techniques": [str(factor) for factor in job.factors],
                "degrees": str(each.spec.parallelism),
                "ranks": job.ranks,
                "first_to_cover": [_pair(pair) for pair in job.first],
            }
            for job, each in zip(found.jobs, sets, strict=True)
        ],
        "at_most_more_than_the_fewest": found.at_most_more,
        "pairs": found.pairs,
        "meeting_no_other": found.alone,
        "jobs_of_one_per_pair": found.pairs + found.alone,
        "jobs_of_all_combinations": found.combinations,
        "apart": [{"pair": _pair(each.pair), "why": each.why} for each in found.apart],
    }


def _pair(pair: Pair) -> list[str]:
    return [str(each) for each in (pair.one, pair.other) if each is not None]
