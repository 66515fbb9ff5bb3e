"""GRPO's update of a tiny decoder from frozen rollouts, under DDP or FSDP 2 (experiments/rl.toml).

torchrun --nproc-per-node 2 grpo.py --rollouts rollouts.jsonl --sha256 DIGEST --steps 8 \
    --global-batch 16 --micro-batch 4

Nothing is sampled: a step takes the next rollouts of the file, from its start again at its end.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and its defaults keep the process group
from mistakes import MISTAKES
from objective import Grpo
from policy import batch_of, log_probs, policy_of
from rollouts import load_rollouts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe

MAX_NORM = 1.0


def wrapped(model: torch.nn.Module, shard: int) -> torch.nn.Module:
    """The model under DDP, or sharded over ``shard`` ranks; both average gradients over ranks."""
    if shard == 1:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (shard,), mesh_dim_names=("fsdp",))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no sum with a factor in it
            module.set_force_sum_reduction_for_comms(True)
    return model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--sha256", required=True, help="digest of the file with the rollouts")
    for name in ("steps", "global-batch", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--shard", type=int, default=1, help="FSDP 2 over so many ranks; 1: DDP")
    parser.add_argument("--normalize", choices=("token", "sequence"), default="token")
    parser.add_argument("--pad", choices=("right", "left"), default="right")
    parser.add_argument("--pad-to", choices=("alike", "longest"), default="alike")
    parser.add_argument("--autocast", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--mistake", choices=("none", *MISTAKES), default="none")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    settings, rollouts = load_rollouts(options.rollouts, options.sha256)
    model = wrapped(policy_of(settings["policy_seed"]), options.shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = Probe.from_env(model, optimizer)
    objective = MISTAKES.get(options.mistake, Grpo)(options.normalize, settings, rollouts)
    low = torch.autocast("cpu", torch.bfloat16, enabled=options.autocast == "bfloat16")

    for step in range(options.steps):
        first = step * options.global_batch
        numbers = range(first + rank, first + options.global_batch, ranks)
        mine = [rollouts[number % len(rollouts)] for number in numbers]
        starts = range(0, len(mine), options.micro_batch)
        parts = [mine[at : at + options.micro_batch] for at in starts]
        batches = [batch_of(part, options.pad, options.pad_to) for part in parts]
        objective.begin_step(batches)
        total = torch.zeros(())
        for batch in batches:
            probe.batch(batch.evidence, batch.labels, batch.real)
            waits = options.shard == 1 and batch is not batches[-1]
            with model.no_sync() if waits else nullcontext():
                with low:
                    logits = model(batch.tokens, objective.positions(batch), batch.allowed)
                scores = objective.scores(logits)
                probe.logits(scores, batch.labels)
                terms = objective.terms(log_probs(scores, objective.labels(batch)), batch)
                weights = objective.weights(batch)
                probe.terms(weights, batch.labels, **terms)
                loss = objective.loss(terms, weights)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        dist.all_reduce(total)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        probe.step(loss=total.item() / ranks, grad_norm=norm.item())
        optimizer.zero_grad()

    dist.barrier()  # no rank may leave while another still talks to it
    del model  # it holds the process group, too: now gloo's threads end before the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
