"""``converge plan --cover pairs``: the fewest jobs in which every pair of techniques meets."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console
from rich.table import Table

from converge_harness import guide
from converge_harness.cli.console import make_console, say
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.options import names
from converge_harness.errors import ConfigError, Problem
from converge_harness.guide.cover import ProposedJob, TechniquePair
from converge_harness.guide.factor import ordered
from converge_harness.matrix.recommend import (
    Proposal,
    propose_for_experiment,
    propose_for_techniques,
    toolchain_for,
)
from converge_harness.model import SetSpec, Setting
from converge_harness.wording import plural


def cover(arguments: argparse.Namespace) -> ExitCode:
    """Propose jobs for an experiment's techniques, or for those of ``--technique``."""
    _require_sense(arguments)
    if arguments.experiment is not None:
        made = propose_for_experiment(arguments.experiment, names(arguments.only), arguments.gpus)
    else:
        made = propose_for_techniques(
            arguments.technique, arguments.dp, arguments.base, arguments.gpus
        )
    if arguments.json:
        print(json.dumps(_document(made, arguments.gpus), indent=2))
    elif arguments.toml:
        print(
            "\n".join(
                [
                    *_beside(made.base, made.common, (each.spec for each in made.sets)),
                    *guide.write_tests(made.sets, made.common),
                ]
            )
        )
    else:
        _print(make_console(), made, arguments.gpus)
    return ExitCode.PASS


def _beside(
    base: guide.Base, common: Mapping[str, Setting], sets: Iterable[SetSpec]
) -> Iterator[str]:
    """What the experiment file that takes the entries must have."""
    yield f"# For a file whose control is {base.control.spec.parallelism}"
    if common:
        settings = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in common.items())
        yield f"# and whose [trainer.set] has {settings}"
    for name in dict.fromkeys(each.name for spec in sets for each in spec.own_techniques):
        yield f"# and which has a table [technique.{name}]"


def _require_sense(arguments: argparse.Namespace) -> None:
    """Refuse contradicting options, and missing ones."""
    problems = []
    if (arguments.experiment is None) == (not arguments.technique):
        problems.append(
            Problem(
                "--cover", "needs either an EXPERIMENT or --technique", "such as tp=2,cp=2,float8"
            )
        )
    if arguments.gpus is None:
        problems.append(Problem("--cover", "needs --gpus N", "the ranks of the largest job"))
    if arguments.experiment is not None:
        problems += [
            Problem(f"--{option}", "needs --technique: an EXPERIMENT sets it itself")
            for option in ("dp", "base")
            if getattr(arguments, option) is not None
        ]
    if arguments.json and arguments.toml:
        problems.append(Problem("--toml", "cannot be combined with --json"))
    if problems:
        raise ConfigError(problems)


# -------------------------------------------------------------------- for people


def _print(console: Console, made: Proposal, gpus: int) -> None:
    base, found = made.base, made.found
    added = [each for each in made.factors if each not in made.named]
    names = ", ".join(map(str, ordered(found.factors)))
    say(console, f"{len(found.factors)} techniques on dp {base.dp}: {names}")
    if added:
        say(console, f"added, because others need them: {', '.join(map(str, added))}")
    if not base.sizes_known:
        say(console, f"no base config given: {toolchain_for().name}, any batch, sequence and model")
    table = Table(show_edge=False, show_lines=True)
    for title in ("job", "degrees", "techniques"):
        table.add_column(title, overflow="fold")
    table.add_column("ranks", justify="right")
    table.add_column("first to cover", overflow="fold", ratio=1)
    for number, (job, each) in enumerate(zip(found.jobs, made.sets, strict=True), 1):
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
    return ", ".join([*spec.technique_names, *(each for each in extras if each)]) or "none"


def _first(job: ProposedJob) -> str:
    """``all 15 pairs``, or the pairs that no earlier job has covered."""
    pairs = sum(each.other is not None for each in job.first)
    if 0 < pairs == math.comb(len(job.factors), 2):
        return "the pair" if pairs == 1 else f"all {pairs} pairs of them"
    return "; ".join(map(str, job.first))


def _summary(found: guide.Cover, gpus: int) -> Iterator[str]:
    jobs, single = len(found.jobs), found.pairs + found.alone
    proof = "proved to be the fewest"
    if found.at_most_more:
        proof = f"at most {found.at_most_more} more than the fewest"
    lone = (
        f" ({found.alone:,} {plural(found.alone, 'technique')} cannot run with any other)"
        if found.alone
        else ""
    )
    yield (
        f"\n{jobs:,} {plural(jobs, 'job')} of at most {gpus} GPUs, beside the control: {proof}. "
        f"{found.pairs:,} {plural(found.pairs, 'pair')} can run together: all are covered{lone}."
    )
    yield (
        f"One job per pair would be {single:,} {plural(single, 'job')}, {single - jobs:,} more; "
        f"all combinations that fit, {found.combinations:,}, {found.combinations - jobs:,} more."
    )
    yield (
        "This relies on the guide's assumption that a combination that passes vouches for its "
        "parts. When a job fails, the sets of `converge init` locate the cause."
    )


def _apart(found: guide.Cover) -> list[str]:
    if not found.apart:
        return []
    reasons: dict[str, list[str]] = {}
    for each in found.apart:
        reasons.setdefault(each.why, []).append(str(each.pair))
    return [
        "",
        f"{len(found.apart):,} {plural(len(found.apart), 'pair')} cannot run together:",
        *(f"  {', '.join(pairs)}: {why}" for why, pairs in reasons.items()),
    ]


# ------------------------------------------------------------------ for programs


def _document(made: Proposal, gpus: int) -> dict[str, object]:
    found = made.found
    return {
        "schema": 1,
        "gpus": gpus,
        "dp": made.base.dp,
        "techniques": [str(each) for each in found.factors],
        "jobs": [
            {
                "name": each.spec.name,
                "techniques": [str(factor) for factor in job.factors],
                "degrees": str(each.spec.parallelism),
                "ranks": job.ranks,
                "first_to_cover": [_pair(pair) for pair in job.first],
            }
            for job, each in zip(found.jobs, made.sets, strict=True)
        ],
        "at_most_more_than_the_fewest": found.at_most_more,
        "pairs": found.pairs,
        "meeting_no_other": found.alone,
        "jobs_of_one_per_pair": found.pairs + found.alone,
        "jobs_of_all_combinations": found.combinations,
        "apart": [{"pair": _pair(each.pair), "why": each.why} for each in found.apart],
    }


def _pair(pair: TechniquePair) -> list[str]:
    return [str(each) for each in (pair.one, pair.other) if each is not None]
