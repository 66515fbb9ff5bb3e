"""Options that several commands share, and what their values mean. Cheap to import."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.errors import suggest
from converge_harness.model import Experiment, Launcher, Plan

if TYPE_CHECKING:
    from converge_harness.history import History
    from converge_harness.matrix.load import Finder
    from converge_harness.store import Store

ONLY_SETS = """\
only these test sets (and the controls they need); the name of a space_time set selects
all sets generated from it"""

TECHNIQUE = """\
what is under test, comma-separated: parallelisms with a degree (tp=2, cp=4, pp=2, ep=2, hsdp=2 for
2 replicas), ddp, and compile, async_tp, float8, float8_rowwise, float8_tp, bf16; a pipeline
schedule or a rotation follows its degree (pp=2:Interleaved1F1B, cp=2:alltoall); one of your own is
NAME=file.py:function"""

HISTORY_FILE = "history.sqlite"
HISTORY_VARIABLE = "CONVERGE_HISTORY"


# ------------------------------------------------------------------ declared


TRIALS = 60
"""Of one search for the smallest set-up that fails."""


def add_experiment(
    parser: argparse.ArgumentParser, only: str = ONLY_SETS, *, may_miss: bool = False
) -> None:
    """Add EXPERIMENT, ``--only`` (with the given help) and the store."""
    parser.add_argument(
        "experiment",
        type=Path,
        nargs="?" if may_miss else None,
        metavar="EXPERIMENT",
        help="a TOML matrix",
    )
    parser.add_argument(
        "--only",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME",
        help=only,
    )
    add_store(parser)


def add_store(parser: argparse.ArgumentParser) -> None:
    """``--store``."""
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="where runs are stored and reused from (default: $CONVERGE_STORE or .converge)",
    )


def add_reports(parser: argparse.ArgumentParser) -> None:
    """``--out``, of the reports of a matrix."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the reports go (default: reports/NAME of the experiment, and with --only "
        "reports/NAME/only/SETS, so that a part does not overwrite the whole)",
    )


def add_slots(parser: argparse.ArgumentParser) -> None:
    """``--slots``."""
    parser.add_argument(
        "--slots",
        type=positive,
        metavar="N",
        help="how many ranks may run at once: on the CPU (a set with more ranks is refused), or on "
        "GPUs that ranks share (NCCL_MULTI_RANK_GPU_ENABLE=1; default there: 4 per GPU)",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """``--launcher`` and ``--cluster``."""
    parser.add_argument(
        "--launcher",
        type=_launcher,
        metavar="{local,slurm,kubernetes}",
        help="what starts the jobs: torchrun on this machine, Slurm, or Kubernetes, for which "
        "`submit` writes objects (default: the experiment's `launcher`)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="your own cluster file, for keys that the experiment's [cluster] lacks (default: "
        "$CONVERGE_CLUSTER, else ~/.config/converge/cluster.toml)",
    )


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """``--calibration``, of a matrix."""
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="judge by this file of `converge calibrate --out` instead of repeating the controls; "
        "`converge run` refuses one that was learnt from other controls",
    )


def add_running(parser: argparse.ArgumentParser) -> None:
    """``--fresh`` and ``--cold``."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="start every rank in a new Python instead of forking one that has imported torch",
    )


def add_search(parser: argparse.ArgumentParser, *, trials: int, tried: str, out: str) -> None:
    """What is searched for a failed test set, how long, and where the result goes.

    Args:
        parser: of the command.
        trials: at most, by default.
        tried: what a trial changes, in the plural.
        out: help of ``--out``.
    """
    parser.add_argument(
        "source", type=Path, metavar="REPORT", help="a report folder of a run, or an experiment"
    )
    parser.add_argument("--set", required=True, metavar="NAME", help="the failed test set")
    parser.add_argument(
        "--trials",
        type=positive,
        default=trials,
        metavar="N",
        help=f"try at most N {tried} ({trials})",
    )
    parser.add_argument("--minutes", type=positive, metavar="M", help="start none after M minutes")
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    add_store(parser)
    add_slots(parser)
    add_running(parser)


def add_history_file(parser: argparse.ArgumentParser) -> None:
    """``--history``."""
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="the history file (default: $CONVERGE_HISTORY, or history.sqlite in the store)",
    )


def add_technique(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, required: bool
) -> None:
    """``--technique``."""
    parser.add_argument(
        "--technique", action="append", required=required, metavar="LIST", help=TECHNIQUE
    )


def positive(text: str) -> int:
    """A positive whole number, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _launcher(text: str) -> Launcher:
    if text not in list(Launcher):
        hint = suggest(text, [each.value for each in Launcher])
        raise argparse.ArgumentTypeError(f"{text!r} is not known; {hint}")
    return Launcher(text)


# ------------------------------------------------------------------ given


def names(only: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All values of an option that may be repeated, with several values each time."""
    return tuple(chain.from_iterable(only))


def experiment_of(source: Path) -> Experiment:
    """What REPORT names: the experiment of a report folder, or that of a file."""
    with leaving_when_interrupted():
        from converge_harness.matrix.load import load_with_cluster
        from converge_harness.matrix.save import load_matrix

    return load_matrix(source).plan.experiment if source.is_dir() else load_with_cluster(source)


def plan_of(
    arguments: argparse.Namespace, *, whole: bool = False, find: Finder | None = None
) -> Plan:
    """The plan of a command that takes an experiment; ``whole``: without ``--only``.

    Raises ConfigError with all its problems.
    """
    with leaving_when_interrupted():
        from converge_harness.matrix.load import load_plan
        from converge_harness.surroundings import gpus
        from converge_harness.trainers import find_toolchain

    return load_plan(
        arguments.experiment,
        () if whole else names(arguments.only),
        on_gpu=bool(gpus()),
        slots=getattr(arguments, "slots", None),  # a scheduler has its own limits
        calibration=arguments.calibration,
        launcher=arguments.launcher,
        cluster=arguments.cluster,
        find=find or find_toolchain,
    )


def store_of(arguments: argparse.Namespace) -> Store:
    """The store that ``--store``, the environment or the default names."""
    from converge_harness.store import Store, default_root

    return Store(arguments.store or default_root(os.environ))


def history_of(arguments: argparse.Namespace) -> History:
    """The history that ``--history``, the environment or the store names."""
    from converge_harness.history import History

    named = arguments.history or os.environ.get(HISTORY_VARIABLE)
    return History(Path(named) if named else store_of(arguments).root / HISTORY_FILE)


def report_folder(arguments: argparse.Namespace, experiment: Experiment) -> Path:
    """Where the reports of a matrix, or of a part of it, go: ``--out``, or a default folder.

    A part of a matrix never overwrites the whole one's.
    """
    from converge_harness.store import folder_name

    if arguments.out is not None:
        return Path(arguments.out)
    whole = Path("reports") / folder_name(experiment.name)
    only = sorted(set(names(arguments.only)))
    return whole / "only" / folder_name(*only) if only else whole
