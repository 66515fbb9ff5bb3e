"""torchtitan's own debug model, config and loop, as a program that is judged by its curve.

torchrun --nproc-per-node 4 torchtitan_program.py --data DATA --curve FILE --seed 1 \
    --global-batch 8 --set training.local_batch_size 4 \
    --set parallelism.data_parallel_shard_degree 2 --set parallelism.pipeline_parallel_degree 2

It uses few of torchtitan's names, which did not change between March 2026 and 0.3.0, so it also
trains at commits that converge cannot drive (docs/bisect.md). It makes torchtitan run on a CPU with
converge's own code for that, so converge has to be in its environment. In float32, by 1F1B.
"""

from __future__ import annotations

import argparse
import csv
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from converge_harness.rank.titan.common.cpu import prepare_torch
from converge_harness.rank.titan.v0_3.patches import complete_torch

# What torchtitan takes for granted of a GPU or a newer torch, and this machine has not.
prepare_torch()
complete_torch()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

COLUMNS = ("step", "loss", "grad_norm")


class Samples(BaseDataLoader):
    """Sample i of a step is the same on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The corpus, and samples a step."""

        folder: str = ""
        global_batch_size: int = 8

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.tokens = torch.from_numpy(np.load(Path(config.folder) / "tokens.npy")).long()
        self.length, self.size = seq_len, local_batch_size
        self.whole, self.rank, self.ranks = config.global_batch_size, dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        step = 0
        while True:
            first = step * self.whole + self.rank * (self.whole // self.ranks)
            for start in range(first, first + self.whole // self.ranks, self.size):
                rows = [
                    self.tokens[i * self.length : (i + 1) * self.length + 1]
                    for i in range(start, start + self.size)
                ]
                batch = torch.stack(rows)
                yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()
            step += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@torch.no_grad()
def draw_weights(parts: list[torch.nn.Module], seed: int) -> None:
    """The same initial weights in every layout: torchtitan draws per pipeline stage."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.ndim == 1:
                continue  # norms are ones
            dice = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            whole = torch.randn(parameter.shape, generator=dice) * 0.02
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


def as_since_june(config: Any) -> None:
    """Do without its attention kernel for GPUs, its newest SPMD backend, and CUDA graphs."""
    from converge_harness.rank.titan.v0_3.shape import (  # noqa: PLC0415 - needs names of June
        use_dense_attention,
    )

    use_dense_attention(config.model_spec.model)
    config.parallelism.spmd_backend = "partial_dtensor"
    if hasattr(config.training, "disable_cuda_graphs"):
        config.training.disable_cuda_graphs = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    args = parser.parse_args()
    init_logger()
    config = llama3_debugmodel()
    config.hf_assets_path = args.data
    config.dataloader = Samples.Config(folder=args.data, global_batch_size=args.global_batch)
    config.training.global_batch_size = args.global_batch
    config.training.mixed_precision_param = "float32"
    config.checkpoint.enable = config.validator.enable = False
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    if hasattr(config.parallelism, "spmd_backend"):
        as_since_june(config)
    for key, value in args.set:
        table, _, name = key.partition(".")
        if not hasattr(getattr(config, table, None), name):
            parser.error(f"--set {key}: this torchtitan's config has no such key")
        setattr(getattr(config, table), name, int(value))
    trainer = config.build()
    draw_weights(trainer.model_parts, args.seed)
    log = trainer.metrics_processor.log
    # The last rank has the last pipeline stage, which alone knows the loss.
    is_writer = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def logged(step: int, loss: float, max_loss: float, grad_norm: float, **more: Any) -> None:
        if is_writer:
            with args.curve.open("a", newline="") as file:
                rows = csv.writer(file)
                rows.writerows([COLUMNS] if step == 1 else [])
                rows.writerow((step, loss, grad_norm))
        log(step, loss, max_loss, grad_norm, **more)

    trainer.metrics_processor.log = logged
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
