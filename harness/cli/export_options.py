"""The options of ``converge export``, with their help."""

from __future__ import annotations

import argparse
from pathlib import Path

EXPORT = """\
Write a finished matrix for the tools that people watch training with: every control, repeat and
test set is a run, with its loss, grad_norm, lr and the other signals under those names, and, as
difference/SIGNAL and limit/SIGNAL, its relative difference to the control and what was allowed. It
is judged again for that; no verdict gates here."""

EXAMPLES = """\
examples:
  converge export reports/smoke --tensorboard runs/smoke && tensorboard --logdir runs/smoke
  converge export reports/smoke --wandb --offline && wandb sync reports/smoke/wandb/offline-run-*"""


def add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``converge export``."""
    export = commands.add_parser(
        "export",
        help="write a finished matrix for TensorBoard or Weights & Biases",
        description=EXPORT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of a run")
    export.add_argument(
        "--tensorboard",
        type=Path,
        metavar="OUT",
        help="a folder for tensorboard --logdir; runs that an earlier export wrote are replaced",
    )
    export.add_argument(
        "--wandb", action="store_true", help="log to Weights & Biases, as a group of new runs"
    )
    export.add_argument(
        "--project",
        default="converge",
        metavar="NAME",
        help="of Weights & Biases (default: %(default)s)",
    )
    export.add_argument(
        "--offline",
        action="store_true",
        help="with --wandb: write to DIR/wandb, send nothing",
    )
