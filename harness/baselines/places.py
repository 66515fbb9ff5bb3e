"""Where goldens lie: in ``baselines/`` of the project whose experiments they are for."""

from __future__ import annotations

from pathlib import Path

from harness.baselines.files import FILE
from harness.model import GOLDENS

EXPERIMENTS = "experiments"


def default_folder(experiment: Path) -> Path:
    """The folder that holds goldens of an experiment: beside ``experiments/``, else beside it."""
    beside = experiment.absolute().parent
    return (beside.parent if beside.name == EXPERIMENTS else beside) / GOLDENS


def find_goldens(folder: Path) -> tuple[Path, ...]:
    """Every golden in a folder of goldens, by name."""
    return tuple(sorted(path.parent for path in folder.glob(f"*/{FILE}")))


def not_there(folder: Path) -> str:
    """That there is no golden of this folder, and which are beside it."""
    beside = ", ".join(each.name for each in find_goldens(folder.parent)) or "none"
    return f"there is no golden {folder} (there: {beside})"
