"""``passes/NNN``: the evidence of each pass of a run that is resumed.

A pass is one life of the run's ranks, from a start or resume to its end. Its folder is claimed when
it starts, and the one with the highest number is the pass that counts.
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

        A scheduler that has lost a node starts its job again elsewhere, and ranks that live on
        there unseen must not write into checkpoints that others load.
        """
        newest = _newest(self.folder.parent)
        if newest > self.number:
            raise SupersededError(
                f"pass {newest} of this run has begun elsewhere, so this one, pass {self.number}, "
                "writes no checkpoint any more"
            )


def claim_pass(run_folder: Path) -> int:
    """Make the folder of the next pass, of a number that nobody has; that number.

    To make a folder is atomic, on NFS too: no two lives get the same one, even if they begin at
    the same time.
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
    """The folder of a pass, whether it is there or not."""
    return run_folder / PASSES / f"{number:03d}"


def pass_folders(run_folder: Path) -> tuple[Path, ...]:
    """The folders of a run's passes so far, in the order of their starts."""
    found = (run_folder / PASSES).glob("[0-9]*")
    return tuple(sorted(found, key=lambda path: int(path.name)))


def passes_with_metrics(run_folder: Path) -> tuple[Path, ...]:
    """The folders of passes whose ranks got as far as to write, sorted by name."""
    found = (run_folder / PASSES).glob("*/metrics.jsonl*")
    return tuple(sorted({path.parent for path in found if path.name in METRICS_FILES}))


def last_step(run_folder: Path) -> int | None:
    """The step that the newest pass was meant to reach and has; None when it has not ended well."""
    passes = pass_folders(run_folder)
    return step_reached(passes[-1]) if passes else None


def _newest(passes: Path) -> int:
    return max((int(folder.name) for folder in passes.iterdir()), default=0)
