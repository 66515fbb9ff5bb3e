"""A trainer as small as can be, with the methods that faults wrap, for real gloo ranks.

Two weights: one that all ranks share, one of each rank's own, so that every rank has a shard in
the checkpoints, which are torch's own.
"""

import json
import multiprocessing
import os
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from converge_harness.rank.faults import install_faults

STEPS = 5
EVERY = 2


class Checkpointer:
    def __init__(self, trainer, folder):
        self.trainer = trainer
        self.folder = folder

    def save(self, curr_step, last_step=False):
        if curr_step % EVERY or last_step:
            return False
        dcp.save(self.trainer.states(), checkpoint_id=str(self.folder / f"step-{curr_step}"))
        return True

    def load(self):
        whole = [int(path.parent.name[5:]) for path in self.folder.glob("step-*/.metadata")]
        if whole:
            states = self.trainer.states()
            dcp.load(states, checkpoint_id=str(self.folder / f"step-{max(whole)}"))
            self.trainer.step = int(states["step"])


class Trainer:
    parallel_dims = SimpleNamespace(pp_enabled=False)

    def __init__(self, folder):
        self.step = 0
        self.model_parts = [torch.nn.Linear(64, 64, bias=False)]
        torch.nn.init.constant_(self.model_parts[0].weight, 0.01)
        self.own = torch.full((4096,), float(dist.get_rank()))
        self.checkpointer = Checkpointer(self, folder / "checkpoint")
        self.losses = folder / f"losses-{dist.get_rank()}.jsonl"

    def states(self):
        own = f"own {dist.get_rank()}"
        weight = self.model_parts[0].weight.detach()
        return {"step": torch.tensor(self.step), "weight": weight, own: self.own}

    def forward_backward_step(self):
        loss = self.model_parts[0](torch.ones(2, 64)).square().mean()
        loss.backward()
        return loss.detach()

    def train_step(self):
        weight = self.model_parts[0].weight
        weight.grad = None
        loss = self.forward_backward_step()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        with self.losses.open("a") as stream:
            stream.write(json.dumps([self.step, float(loss)]) + "\n")

    def train(self):
        self.checkpointer.load()
        while self.step < STEPS:
            self.step += 1
            self.train_step()
            self.checkpointer.save(self.step, last_step=self.step == STEPS)


def start_ranks(job, pass_number=1, world_size=2):
    """Real ranks that train the tiny model under the job's faults."""
    torch.set_num_threads(1)  # only a single-threaded process may be forked
    fork = multiprocessing.get_context("fork")
    store = str(job.run_folder / f"store-{pass_number}")
    ranks = [
        fork.Process(target=_rank, args=(rank, world_size, store, job, pass_number))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def run_ranks(job, pass_number=1, world_size=2):
    """The exit codes of the ranks, once all have ended."""
    ranks = start_ranks(job, pass_number, world_size)
    for rank in ranks:
        rank.join(timeout=60)
    return [rank.exitcode for rank in ranks]


def losses(job, rank=0):
    """Steps that a rank has trained, with its loss, over all passes."""
    path = Path(job.run_folder) / f"losses-{rank}.jsonl"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def _rank(rank, world_size, store, job, pass_number):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    trainer = Trainer(job.run_folder)
    install_faults(trainer, job, pass_number)
    try:
        trainer.train()
        dist.barrier()
    except BaseException:
        (job.run_folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise
