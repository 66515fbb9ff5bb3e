"""torchtitan saves the tokens that one rank has seen, and restores that number on every rank.

``python reproduce.py``: two processes train on 400 tokens each, save, and one process resumes.
Exit code 1 if it believes to have seen fewer than 800. Trainer.state_dict and load_state_dict are
torchtitan's own; what they return is saved by torch.distributed.checkpoint, as its checkpointer
does. The number that is logged (``n_tokens_seen``) is the sum of ``ntokens_seen`` over all ranks
(Trainer.train_step), so what a resume starts from has to have this sum, too.
"""

import sys
from importlib.metadata import version
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

torch._utils._get_available_device_type = lambda: "cpu"  # also where no GPU is
for name in ("get_device_name", "get_device_properties"):
    setattr(torch.cpu, name, getattr(torch.cpu, name, lambda *_: None))

from torchtitan.trainer import Trainer  # noqa: E402

SEEN = 400
"""Tokens on each rank."""


class OfCheckpoint(Trainer):
    """A trainer as far as a checkpoint asks for it."""

    def __init__(self, tokens: int) -> None:
        self.step, self.ntokens_seen = 10, tokens


def on_ranks(rank: int, ranks: int, folder: str, found: dict[int, int]) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    trainer = OfCheckpoint(SEEN if ranks > 1 else 0)
    state = {"train_state": trainer}
    if ranks > 1:
        dcp.save(state, checkpoint_id=f"{folder}/step-10")
    else:
        dcp.load(state, checkpoint_id=f"{folder}/step-10")
    logged = torch.tensor(trainer.ntokens_seen)
    dist.all_reduce(logged)
    if rank == 0:
        found[ranks] = int(logged)
    dist.destroy_process_group()


def main() -> int:
    with TemporaryDirectory() as folder, mp.Manager() as manager:
        found = manager.dict()
        for ranks in (2, 1):
            mp.start_processes(on_ranks, (ranks, folder, found), ranks, start_method="fork")
        print(
            f"torchtitan {version('torchtitan')}: n_tokens_seen is {found[2]} when 2 ranks save, "
            f"and {found[1]} when 1 rank has loaded"
        )
        return 0 if found[1] == found[2] else 1


if __name__ == "__main__":
    sys.exit(main())
