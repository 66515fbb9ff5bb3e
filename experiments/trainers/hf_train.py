"""A tiny Llama, randomly initialised, trained by transformers.Trainer (docs/trainers.md).

torchrun --nproc-per-node 2 hf_train.py --data DATA --output OUT --steps 10 --seed 1 --seq-len 64 \
    --batch 2 --accumulate 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from documents import Documents, shifted
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from converge_harness.probe import Probe

Inputs = dict[str, torch.Tensor]


class ProbedTrainer(Trainer):
    """Hugging Face's own trainer, which gives the probe what it sees on the way.

    A ``TrainerCallback`` alone would do but for the batches, which callbacks are not given.
    """

    probe: Probe | None = None

    def training_step(self, model: torch.nn.Module, inputs: Inputs, *rest: Any) -> torch.Tensor:
        if self.probe is None:  # the first step: all is wrapped, made, and loaded
            self.probe = Probe.from_env(model, self.optimizer, schedule=self.lr_scheduler)
            self.probe.loaded(self.state.global_step)
        self.probe.batch(inputs["input_ids"], shifted(inputs["labels"]))
        return super().training_step(model, inputs, *rest)

    def compute_loss(self, model: torch.nn.Module, inputs: Inputs, **rest: Any) -> Any:
        with_outputs = rest.pop("return_outputs", False)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **rest)
        self.probe.logits(outputs.logits, shifted(inputs["labels"]))
        return (loss, outputs) if with_outputs else loss

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        super().log(logs, *rest, **named)
        if "loss" in logs:  # not the summary after the last step
            self.probe.step(loss=logs["loss"], grad_norm=logs["grad_norm"])

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.probe.saved(self.state.global_step)


def tiny_llama(vocabulary: int, length: int, dropout: float = 0.0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        initializer_range=0.05,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("steps", "seed", "seq-len", "batch", "accumulate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shard", type=int, default=1, help="ranks that FSDP 2 shards over")
    parser.add_argument("--fsdp-on-cpu", choices=("repaired", "ignored"), default="repaired")
    parser.add_argument(
        "--normalize",
        default="global",
        choices=("global", "rank", "microbatch"),
        help="over what the loss of a token is averaged; global is what Trainer does by default",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        average_tokens_across_devices=options.normalize == "global",
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        fsdp=options.shard > 1,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    samples = options.steps * options.batch * options.accumulate * arguments.world_size
    data = Documents(options.data, options.seq_len, samples)
    torch.manual_seed(options.seed)
    model = tiny_llama(data.vocabulary, options.seq_len)
    if options.normalize == "microbatch":
        model.accepts_loss_kwargs = False  # as every model was before transformers 34191
    if options.shard > 1 and options.fsdp_on_cpu == "repaired":
        # accelerate 1.15 heeds FSDP on accelerators only (AcceleratorState.__init__): on CPUs it
        # says nothing and wraps the model by DDP. As a GPU's process group it takes ours.
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    trainer = ProbedTrainer(model=model, args=arguments, train_dataset=data)
    trainer.train()


if __name__ == "__main__":
    main()
