"""The options of ``converge init`` and of ``converge plan --cover``, and the help that teaches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from harness.errors import ConfigError, Problem

TECHNIQUE = """\
what is under test, comma-separated: parallelisms with a degree (tp=2, cp=4, pp=2, ep=2, hsdp=2 for
2 replicas), ddp, and compile, async_tp, float8, float8_rowwise, float8_tp, bf16; a pipeline
schedule or a rotation follows its degree (pp=2:Interleaved1F1B, cp=2:alltoall)"""

INIT = """\
Write the experiment file that torchtitan's converging guide recommends for some techniques: a 1D
FSDP control, the least test set of each (a parallelism on dp x p ranks; a technique that is none
on top of what it needs, async_tp on FSDP + TP + compile), and one set of all of them together.
Every entry says which rule of the guide it serves. Where the base config's batch holds too few
microbatches for a pipeline, a `set` makes room, and the token budget is the same in every set.
The toolchain is the one that the base config is written for."""

INIT_EXAMPLES = """\
examples:
  the guide's own example, printed:
    converge init --technique tp=2,pp=2,float8,async_tp --dp 8 --base train_configs/llama3_8b.toml
  kept, and looked at:
    converge init --technique cp=2,pp=2:Interleaved1F1B --dp 2 \\
      --base train_configs/llama3_debug.toml --out experiments/long_context.toml
    converge plan experiments/long_context.toml
  a larger degree of one parallelism beside the composition, which has the first of them:
    converge init --technique tp=2,cp=2,cp=8 --dp 8 --base train_configs/llama3_8b.toml"""

PLAN_EXAMPLES = """\
examples:
  converge plan experiments/llama3_8b.toml --ranks-per-node 8
  the fewest jobs of at most 64 GPUs in which every pair of the file's techniques meets:
    converge plan experiments/llama3_8b.toml --cover pairs --gpus 64
  the same without a file, ready to paste into one:
    converge plan --cover pairs --gpus 64 --technique tp=2,cp=2,float8,async_tp --dp 8 --toml"""


def add_init(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    positive: Callable[[str], int],
) -> None:
    """``converge init``."""
    init = commands.add_parser(
        "init",
        help="write the experiment file that the converging guide recommends for a technique",
        description=INIT,
        epilog=INIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _technique(init, required=True)
    init.add_argument(
        "--dp", type=positive, required=True, metavar="N", help="data-parallel degree of every set"
    )
    init.add_argument(
        "--base",
        required=True,
        metavar="TRAIN_CONFIG",
        help="the trusted train config that every set starts from",
    )
    init.add_argument("--out", type=Path, metavar="FILE", help="write it here (default: print it)")
    init.add_argument("--name", help="of the experiment (default: the file's)")
    init.add_argument("--force", action="store_true", help="replace FILE if it is there")


def add_cover(plan: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """The options of ``converge plan`` that propose jobs instead of showing them."""
    cover = plan.add_argument_group("proposing jobs")
    cover.add_argument(
        "--cover",
        choices=["pairs"],
        help="propose the fewest jobs in which every pair of techniques meets, by the guide's "
        "assumption that a combination of higher dimension implies its subsets",
    )
    cover.add_argument(
        "--gpus", type=positive, metavar="N", help="the largest job that may be proposed"
    )
    _technique(cover, required=False)
    cover.add_argument(
        "--dp",
        type=positive,
        metavar="N",
        help="with --technique: data-parallel degree of every job (default: 2)",
    )
    cover.add_argument(
        "--base",
        metavar="TRAIN_CONFIG",
        help="with --technique: a train config whose batch, sequence and model must divide",
    )
    cover.add_argument(
        "--toml", action="store_true", help="print the proposed jobs as [[test]] entries"
    )


def _technique(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, required: bool
) -> None:
    parser.add_argument(
        "--technique", action="append", required=required, metavar="LIST", help=TECHNIQUE
    )


def require_cover(arguments: argparse.Namespace) -> None:
    """Without ``--cover``, refuse its options, and a plan of nothing."""
    problems = [
        Problem(f"--{option}", "goes with --cover pairs")
        for option in ("gpus", "technique", "dp", "base", "toml")
        if getattr(arguments, option)
    ]
    if arguments.experiment is None and not problems:
        problems.append(
            Problem("EXPERIMENT", "is missing", "only --cover with --technique goes without one")
        )
    if problems:
        raise ConfigError(problems)
