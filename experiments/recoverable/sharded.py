"""The script of train.py under FSDP 2, with distributed checkpoints: every rank writes its shards.

torchrun --nproc-per-node 2 sharded.py --checkpoints FOLDER
torchrun --nproc-per-node 4 sharded.py --checkpoints FOLDER --mesh 2x2  # HSDP 2x2

What people forget of that is in sharded_mistakes.py (docs/resumes.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train import Training, main
from train import arguments as usual_arguments


class Sharded(Training):
    """Ranks have a part of every parameter; a checkpoint is a folder with a file of every rank."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        replicas, shards = self.args.mesh or (1, self.ranks)
        if replicas > 1 and shards == 1:
            return DistributedDataParallel(model)
        names = ("dp_replicate", "dp_shard")
        grid = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
        reshard = {"default": None, "always": True, "never": False}[self.args.reshard]
        return fully_shard(
            model,
            mesh=grid if replicas > 1 else grid["dp_shard"],
            reshard_after_forward=reshard,
        )

    def states(self) -> dict[str, Any]:
        """What a checkpoint has; tensors of it are those of the training itself, not copies."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            self.name_of_random(): torch.get_rng_state(),
        }

    def name_of_random(self) -> str:
        """Of this rank's state of random numbers: of equal names, one rank's value is written."""
        return f"random-{self.rank}"

    def save(self) -> None:
        """Write a checkpoint, all ranks together."""
        dcp.save(self.states(), checkpoint_id=self.path())
        self.probe.saved(self.step)

    def path(self) -> Path:
        """The folder of this step's checkpoint."""
        return self.args.checkpoints / f"step-{self.step}"

    def newest(self) -> Path | None:
        """The folder of the newest checkpoint that has .metadata, which is written last."""
        whole = (path.parent for path in self.args.checkpoints.glob("step-*/.metadata"))
        return max(whole, key=lambda path: int(path.name[5:]), default=None)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, which ranks of another number may have written."""
        states, random = self.states(), self.name_of_random()
        if random not in dcp.FileSystemReader(path).read_metadata().state_dict_metadata:
            del states[random]  # this rank was not there before
        dcp.load(states, checkpoint_id=path)
        self.restore(states)
        if random in states:
            torch.set_rng_state(states[random])

    def restore(self, states: dict[str, Any]) -> None:
        """Give what was loaded to the parts of the training."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
        self.schedule.load_state_dict(states["schedule"])
        self.step = states["step"]


def mesh(written: str) -> tuple[int, int]:
    """Numbers of replicas and of shards: of "2x2", (2, 2)."""
    replicas, shards = written.split("x")
    return int(replicas), int(shards)


def arguments() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = usual_arguments()
    parser.add_argument("--mesh", type=mesh, help="replicas x shards: 2x2; else all are shards")
    parser.add_argument("--reshard", choices=("default", "always", "never"), default="default")
    return parser


if __name__ == "__main__":
    main(Sharded, arguments().parse_args())
