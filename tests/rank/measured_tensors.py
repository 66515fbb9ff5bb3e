"""Injected into a real run: what its tensors take on every rank, for the tests of dry runs."""

import json
from pathlib import Path

import torch.distributed as dist

from converge_harness.rank.dry_run.run import local_bytes


def measure(trainer):
    """After the second step, write ``bytes-RANK.json`` into the run folder."""
    train_step = trainer.train_step

    def measured(*args):
        train_step(*args)
        if trainer.step == 2:
            _write(trainer)

    trainer.train_step = measured


def _write(trainer):
    parameters = [each for part in trainer.model_parts for each in part.parameters()]
    states = [state for each in trainer.optimizers for state in each.state.values()]
    found = {
        "count": sum(each.numel() for each in parameters),
        "parameters": sum(map(local_bytes, parameters)),
        "gradients": sum(local_bytes(each.grad) for each in parameters),
        "optimizer_states": sum(
            local_bytes(value)
            for state in states
            for value in state.values()
            if hasattr(value, "element_size")
        ),
    }
    folder = Path(trainer.config.dump_folder)
    (folder / f"bytes-{dist.get_rank()}.json").write_text(json.dumps(found))
