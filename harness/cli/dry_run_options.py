"""The options of ``converge plan --dry-run``."""

from __future__ import annotations

import argparse


def add_dry_run(plan: argparse.ArgumentParser) -> None:
    """``--dry-run`` and what goes with it."""
    dry = plan.add_argument_group("building every job without its GPUs")
    dry.add_argument(
        "--dry-run",
        action="store_true",
        help="build every job on this machine up to and through its first steps, on fake tensors "
        "and a fake process group: errors by set and key, memory per rank, GPU-hours",
    )
    dry.add_argument(
        "--throughput",
        type=_amount,
        metavar="TOKENS",
        help="tokens per second and GPU to tell costs by (default: the experiment's "
        "tokens_per_gpu_second)",
    )
    dry.add_argument(
        "--gpu-memory",
        type=_amount,
        metavar="GB",
        help="memory of a GPU, as 80: sets that need more are named; the exit code stays 0, since "
        "the peak is an estimate",
    )
    dry.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="what the jobs are meant for (default: what [cluster] says; cpu for a train config "
        "that reads our synthetic corpus, cuda for others)",
    )


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < amount < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return amount
