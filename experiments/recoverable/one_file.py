"""The same script with one checkpoint, checkpoint.pt, which every save overwrites.

MISTAKE=none torchrun --nproc-per-node 2 one_file.py --checkpoints FOLDER
"""

from __future__ import annotations

import os
from pathlib import Path

from mistakes import WrittenInPlace
from train import Training, arguments, main


class OneFile(Training):
    """There is no older checkpoint, so the new one has to be whole before it takes its place."""

    def path(self) -> Path:
        return self.args.checkpoints / "checkpoint.pt"

    def newest(self) -> Path | None:
        return self.path() if self.path().exists() else None


class OneFileInPlace(WrittenInPlace, OneFile):
    """Overwriting begins by emptying the file: who dies then has lost the only checkpoint."""


if __name__ == "__main__":
    kinds = {"none": OneFile, "written_in_place": OneFileInPlace}
    main(kinds[os.environ["MISTAKE"]], arguments().parse_args())
