"""``passes/NNN``: the evidence of each pass of a resumed run.

A pass is one start of the run's ranks, until they end. Its folder is claimed when it starts, and
only the pass with the highest number may write checkpoints.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from converge_harness.run_folder.layout import METRICS_FILES, PASSES
from converge_harness.run_folder.metrics import SupersededError, step_reached


@dataclass(frozen=True, slots=True)
class PassFolder:
    """The folder of a pass."""

    number: int
    """From 1, in the order of the starts."""
    folder: Path
    """``passes/NNN`` in the run folder."""

    def require_newest(self) -> None:
        """Raise SupersededError when a later pass has begun.

        A scheduler that has lost a node restarts its job elsewhere. Ranks may still run on the lost
        node, and must not write into checkpoints that others load.
        """
        newest = _newest(self.folder.parent)
        if newest > self.number:
            raise SupersededError(
                f"pass {newest} of this run has begun elsewhere, so this one, pass {self.number}, "
                "must not write checkpoints any more"
            )


def claim_pass(run_folder: Path) -> int:
    """Make the folder of the next pass, with an unused number; return it.

    Making a folder is atomic, on NFS too: no two starts get the same one, even at the same time.
    """
    passes = run_folder / PASSES
    passes.mkdir(parents=True, exist_ok=True)
    number = _newest(passes)
    while True:
        number += 1  # not looked up again: a network file system may list an older state
        with suppress(FileExistsError):
            pass_folder(run_folder, number).mkdir()
            return number


def pass_folder(run_folder: Path, number: int) -> Path:
    """The folder of a pass, which need not exist."""
    return run_folder / PASSES / f"{number:03d}"


def pass_folders(run_folder: Path) -> tuple[Path, ...]:
    """The folders of a run's passes so far, in the order of their starts."""
    found = (run_folder / PASSES).glob("[0-9]*")
    return tuple(sorted(found, key=lambda path: int(path.name)))


def passes_with_metrics(run_folder: Path) -> tuple[Path, ...]:
    """The folders of passes that have metrics, sorted by name."""
    found = (run_folder / PASSES).glob("*/metrics.jsonl*")
    return tuple(sorted({path.parent for path in found if path.name in METRICS_FILES}))


def last_step(run_folder: Path) -> int | None:
    """The step that the newest pass had to reach, once it has; None if it has not finished."""
    passes = pass_folders(run_folder)
    return step_reached(passes[-1]) if passes else None


def _newest(passes: Path) -> int:
    return max((int(folder.name) for folder in passes.iterdir()), default=0)
