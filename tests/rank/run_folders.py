"""What runs of either dialect left in their folders, for the tests."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Start(NamedTuple):
    """What every run of a dialect starts from, unless a test says otherwise."""

    data: Path
    """The folder of the corpus."""
    seed_checkpoint: str


class RunFolders:
    """Run folders below ``self.folder``, by name."""

    def passes(self, name):
        """The lines of each pass of a run, finished or not, in the order of the starts."""
        folders = sorted((self.folder / name / "passes").iterdir())
        assert [folder.name for folder in folders] == [f"{i + 1:03d}" for i in range(len(folders))]
        files = [next(folder.glob("metrics.jsonl*")) for folder in folders]
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]

    def state(self, name, number, event, step):
        """The arrays of what a pass of a run saved or loaded."""
        folder = self.folder / name / "passes" / f"{number:03d}" / "state"
        with np.load(folder / f"{event}-step-{step:08d}.npz") as arrays:
            return dict(arrays)

    def sample(self, name, step):
        """The arrays of a run's per-tensor evidence of a step."""
        with np.load(self.folder / name / "tensors" / f"step-{step:08d}.npz") as arrays:
            return dict(arrays)


def tensor_differences(control, test, kind):
    """Per parameter, the estimated norm of the difference relative to the control's norm."""
    assert control["names"].tolist() == test["names"].tolist()
    apart = np.linalg.norm(test[f"{kind}_sketch"] - control[f"{kind}_sketch"], axis=1)
    return dict(zip(control["names"].tolist(), apart / control[f"{kind}_norm"], strict=True))


def largest_difference(control, test, signal):
    """Largest relative difference of a signal over all steps."""
    pairs = zip(control, test, strict=True)
    return max(abs(b[signal] - a[signal]) / abs(a[signal]) for a, b in pairs)
