"""Hugging Face's Llama, trained from a checkpoint of torchtitan's (docs/across_frameworks.md).

torchrun --nproc-per-node 2 hf_from_torchtitan.py --data DATA --steps 20 --seed 42 --seq-len 128 \
    --batch 4 --global-batch 8

A plain training loop around ``transformers.LlamaForCausalLM``, which does what torchtitan does with
the train config llama3_across.toml. Each option after ``--shard`` brings back a mistake.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn
from documents import IGNORED
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from converge_harness.probe import Probe, load_seed_checkpoint
from converge_harness.probe.data import Sample, SampleStream, open_corpus

LR, LAST_LR = 4e-3, 4e-4
HEADS = 4


def small_llama(vocabulary: int, rope_type: str) -> LlamaForCausalLM:
    """The model of llama3_across.toml; its weights are loaded afterwards."""
    scaled = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_type": rope_type, "rope_theta": 500_000.0}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters=rope | (scaled if rope_type == "llama3" else {}),
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


@torch.no_grad()
def put_rows_back(model: LlamaForCausalLM) -> None:
    """Queries and keys with their rows as torchtitan has them, for a model that rotates halves."""
    for layer in model.model.layers:
        for each in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = each.weight.unflatten(0, (-1, 2, model.config.head_dim // 2))
            each.weight.copy_(heads.transpose(1, 2).flatten(0, 2))


def optimizer_of(model: torch.nn.Module, *, decay_norms: bool) -> torch.optim.AdamW:
    """Torchtitan decays all parameters; transformers.Trainer all but biases and norms."""
    groups = [
        {"params": [each], "weight_decay": 0.1 if decay_norms or each.ndim > 1 else 0.0}
        for each in model.parameters()
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    corpus = open_corpus(options.data)
    model = small_llama(corpus.vocab_size, options.rope_type)
    load_seed_checkpoint(model)
    if options.rows == "neighbours":
        put_rows_back(model)
    if options.shard > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = optimizer_of(model, decay_norms=options.decay_norms)
    falls = 1 - LAST_LR / LR
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - falls * step / options.steps
    )
    probe = Probe.from_env(model, optimizer)
    batches = batches_of(
        options,
        SampleStream(
            corpus,
            seq_len=options.seq_len,
            seed=options.seed,
            global_batch_size=options.global_batch,
            batch_size=options.batch,
            dp_rank=dist.get_rank(),
            dp_degree=ranks,
        ),
    )
    for _ in range(options.steps):
        step = next(batches)
        mine = sum(int((batch.labels != IGNORED).sum()) for batch in step)
        all_tokens = torch.tensor(mine)
        dist.all_reduce(all_tokens)
        total = 0.0
        for batch in step:
            probe.batch(batch.inputs, batch.labels)
            # transformers attends within documents, which it sees by positions that begin anew.
            positions = batch.positions if options.documents else None
            logits = model(batch.inputs, position_ids=positions).logits
            probe.logits(logits, batch.labels)
            loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
            # DDP and FSDP average gradients over ranks.
            (loss / all_tokens * ranks).backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        schedule.step()
        probe.step(loss=total / mine, grad_norm=norm)
        optimizer.zero_grad()
    del model
    dist.destroy_process_group()


def batches_of(options: argparse.Namespace, stream: SampleStream) -> Iterator[list[Sample]]:
    """The microbatches of one step after another, on this rank."""
    microbatches = options.global_batch // dist.get_world_size() // options.batch
    samples = iter(stream)
    while True:
        yield [next(samples) for _ in range(microbatches)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    for name in ("steps", "seed", "seq-len", "batch", "global-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--shard", type=int, default=1, help="ranks that FSDP 2 shards over")
    parser.add_argument("--rows", choices=("halves", "neighbours"), default="halves")
    parser.add_argument("--rope-type", choices=("llama3", "default"), default="llama3")
    parser.add_argument("--decay-norms", type=json.loads, default=True, help="true or false")
    parser.add_argument("--documents", type=json.loads, default=True, help="true or false")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
