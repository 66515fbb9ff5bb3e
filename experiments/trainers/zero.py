"""One small Llama 3 trained under DDP, FSDP 2 or DeepSpeed's ZeRO 0 to 3 (experiments/zero.toml).

torchrun --nproc-per-node 2 zero.py --wrapping zero2 --data DATA --steps 10 --seed 1 \
    --seq-len 128 --global-batch 8 --batch 2

The model is torchtitan's, its sharding for FSDP 2 too. Initial weights depend on the seed alone,
and the samples of a step on nothing but its number.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models import llama3
from torchtitan.models.common import compute_ffn_hidden_dim
from torchtitan.models.common.attention import ScaledDotProductAttention

from converge_harness.probe import Probe, initial_weights

ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 0.25


class Batch(NamedTuple):
    """int64 tensors of shape (batch, seq_len)."""

    inputs: torch.Tensor
    labels: torch.Tensor


Step = Callable[[list[Batch]], None]
"""One optimizer step, from this rank's microbatches."""


class Corpus:
    """The stream of tokens in a data folder; sample i is its i-th piece."""

    def __init__(self, folder: Path, seq_len: int) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.vocabulary: int = json.loads((folder / "corpus.json").read_text())["vocab_size"]
        self.seq_len = seq_len

    def batch(self, first: int, size: int) -> Batch:
        """Samples ``first`` to ``first + size`` of training, from the start again at their end."""
        count = (len(self.tokens) - 1) // self.seq_len
        starts = [number % count * self.seq_len for number in range(first, first + size)]
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return Batch(tokens[:, :-1], tokens[:, 1:])


def small_llama(vocabulary: int, layers: int = 4, dim: int = 64, heads: int = 4) -> torch.nn.Module:
    """Torchtitan's Llama 3, its debug model made smaller, with the attention that CPUs have."""
    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    rope = config.layers[0].attention.rope
    config.dim = config.tok_embeddings.embedding_dim = config.norm.normalized_shape = dim
    config.vocab_size = config.tok_embeddings.num_embeddings = vocabulary
    config.lm_head.in_features, config.lm_head.out_features = dim, vocabulary
    rope.dim = dim // heads
    config.layers = llama3._build_llama3_layers(  # noqa: SLF001 - public ones have fixed sizes
        n_layers=layers,
        dim=dim,
        n_heads=heads,
        hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=64),
        rope=rope,
        attn_backend="flex",
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def ddp_or_fsdp(model: torch.nn.Module, options: argparse.Namespace) -> Step:
    """Torch's DDP, or FSDP 2 as torchtitan shards, with torch's optimizer."""
    if options.wrapping == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        precision = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
        apply_fsdp_to_decoder(model, mesh, pp_enabled=False, **precision)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo has no sum with a factor in it
                module.set_force_sum_reduction_for_comms(True)
        share = 1 / dist.get_world_size()  # torchtitan's sharding sums over ranks
    else:
        model = DistributedDataParallel(model)
        share = 1.0  # DDP averages over ranks
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    probe = Probe.from_env(model, optimizer)

    def step(batches: list[Batch]) -> None:
        optimizer.zero_grad()
        losses = []
        for place, batch in enumerate(batches, start=1):
            whole = place == len(batches) or options.wrapping == "fsdp2"
            with nullcontext() if whole else model.no_sync():
                losses.append(loss_of(model, batch, probe))
                (losses[-1] * share / len(batches)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        probe.step(loss=mean_of(losses), grad_norm=float(norm))

    return step


def zero(model: torch.nn.Module, options: argparse.Namespace) -> Step:
    """A DeepSpeed engine; its optimizer is torch's."""
    stage = int(options.wrapping.removeprefix("zero"))
    by_loop = options.accumulate == "loop"
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": 1 if by_loop else options.microbatches,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": options.steps + 1,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    if options.reduce == "before-the-last":
        reduce_before_the_last_microbatch(engine)
    probe = Probe.from_env(engine)

    def step(batches: list[Batch]) -> None:
        losses = []
        for batch in batches:
            losses.append(loss_of(engine, batch, probe))
            engine.backward(losses[-1] / len(batches) if by_loop else losses[-1])
            if stage == 0:  # DeepSpeed clips, and does not tell the norm
                norm = torch.nn.utils.get_total_norm([each.grad for each in engine.parameters()])
            if not by_loop:  # updates at the last microbatch
                engine.step()
        if by_loop:
            engine.step()
        if stage > 0:
            norm = engine.get_global_grad_norm()
        probe.step(loss=mean_of(losses), grad_norm=float(norm))

    return step


def reduce_before_the_last_microbatch(engine: Any) -> None:
    """DeepSpeed's order until pull request 7985, of ZeRO 1 in bfloat16.

    The last microbatch was added to the accumulated gradients after they had been averaged over
    ranks, so that each rank updated its weights from its own.
    """
    add, reduce = engine.optimizer.backward_epilogue, engine.allreduce_gradients

    def reduce_and_add(*arguments: Any) -> None:
        reduce(*arguments)
        add()

    engine.optimizer.backward_epilogue = lambda: None
    engine.allreduce_gradients = reduce_and_add


def loss_of(model: torch.nn.Module, batch: Batch, probe: Probe) -> torch.Tensor:
    """Mean over the microbatch's tokens, all of which count."""
    probe.batch(batch.inputs, batch.labels)
    logits = model(batch.inputs)
    probe.logits(logits, batch.labels)
    return functional.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())


def mean_of(losses: list[torch.Tensor]) -> float:
    """Over microbatches and ranks, which are all of one size."""
    mean = torch.stack([loss.detach() for loss in losses]).mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    wrappings = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
    parser.add_argument("--wrapping", choices=wrappings, required=True)
    parser.add_argument("--data", type=Path, required=True)
    for name in ("steps", "seed", "seq-len", "global-batch", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--accumulate",
        choices=("engine", "loop"),
        default="engine",
        help="who knows of microbatches: DeepSpeed's config, or this loop alone",
    )
    parser.add_argument(
        "--reduce",
        choices=("last", "before-the-last"),
        default="last",
        help="when ZeRO 1 in bfloat16 averages over ranks (DeepSpeed 7985)",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    # On CPUs it would compile an all-reduce through shared memory, for inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options.microbatches = options.global_batch // (options.batch * ranks)
    corpus = Corpus(options.data, options.seq_len)
    torch.manual_seed(options.seed)
    model = small_llama(corpus.vocabulary)
    if options.dtype == "bfloat16":
        model.bfloat16()
    initial_weights(model)
    step = (zero if options.wrapping.startswith("zero") else ddp_or_fsdp)(model, options)
    for number in range(options.steps):
        first = number * options.global_batch + rank * options.microbatches * options.batch
        starts = range(first, first + options.microbatches * options.batch, options.batch)
        step([corpus.batch(start, options.batch) for start in starts])
    dist.barrier()  # no rank may leave while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
