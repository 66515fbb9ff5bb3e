"""torchtitan 0.2.2 loads nothing at all, not even initial_load_path, beside a torn checkpoint.

``python reproduce.py``. Exit code 1 if it loads nothing. A run that starts from
``checkpoint.initial_load_path`` dies while it writes its first checkpoint, which then has no
``.metadata``. Started again with the same arguments it finds its checkpoint folder, ignores
``initial_load_path`` because the folder is there, finds no whole checkpoint in it, and trains on
from random weights. CheckpointManager.load is torchtitan's own; what it would load is noted
instead of loaded.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # also where no GPU is

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402


class NotesWhatItLoads(CheckpointManager):
    def __init__(self, folder: Path, initial: Path) -> None:
        self.enable, self.enable_ft_dataloader_checkpoints = True, False
        self.folder, self.initial_load_path = str(folder), str(initial)
        self.initial_load_model_only, self.initial_load_in_hf = True, False
        self.initial_load_in_hf_quantized = False
        self.loaded: str | None = None

    def __del__(self) -> None:
        """Nothing was opened."""

    def _states_to_load(self, _model_only: object) -> dict[str, object]:
        return {}

    def dcp_load(self, _states: object, checkpoint_id: str, **_options: object) -> None:
        self.loaded = Path(checkpoint_id).name


def loaded(folder: Path, initial: Path) -> str | None:
    manager = NotesWhatItLoads(folder, initial)
    manager.load()
    return manager.loaded


def main() -> int:
    with TemporaryDirectory() as root:
        initial, folder = Path(root, "initial"), Path(root, "checkpoint")
        initial.mkdir()
        first = loaded(folder, initial)
        (folder / "step-4").mkdir(parents=True)
        (folder / "step-4" / "__0_0.distcp").touch()
        again = loaded(folder, initial)
    print(
        f"torchtitan {version('torchtitan')}: the first start loads {first}, and a restart "
        f"beside a torn checkpoint loads {again or 'nothing'}"
    )
    return 0 if first and again == first else 1


if __name__ == "__main__":
    sys.exit(main())
