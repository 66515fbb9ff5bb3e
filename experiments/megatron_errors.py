"""Errors put into Megatron-Core at their true places, for megatron_injected.toml.

Each function gets the trainer (``converge_harness.rank.megatron.trainer.MegatronTrainer``) of a
rank, before training. References are issues of Megatron-LM (ML) and DeepSpeed (DS).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as of_optimizer

of_finalizing: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
"""The module, which its package hides behind a function of the same name."""


def norm_gradients_not_summed(trainer: Any) -> None:
    """Under sequence parallelism each rank keeps the norms' gradients of its part (ML 7452)."""
    of_finalizing._allreduce_non_tensor_model_parallel_grads = lambda *_: None


def tied_gradients_not_summed(trainer: Any) -> None:
    """The first and the last stage keep their own gradients of the tied embedding."""
    of_finalizing._allreduce_word_embedding_grads = lambda *_: None


def microbatches_averaged_twice(trainer: Any) -> None:
    """Gradients are divided by the tokens of the step, and by the microbatches as well."""
    config = trainer.parts[0].config
    finalize = config.finalize_model_grads_func

    def averaged(parts: Any, *args: Any, **kwargs: Any) -> None:
        finalize(parts, *args, **kwargs)
        for part in parts:
            part.scale_gradients(1 / trainer.config.microbatches)

    config.finalize_model_grads_func = averaged


def gradients_not_reduced(trainer: Any) -> None:
    """Data-parallel ranks update their copies by their own gradients."""
    for part in trainer.parts:
        part.finish_grad_sync = lambda **_: None


def first_microbatch_lost(trainer: Any) -> None:
    """The first microbatch's gradients are cleared before the others are added (DS 7985)."""
    forward_step = trainer.forward_step
    seen = 0

    def cleared(batches: Any, part: Any) -> Any:
        nonlocal seen
        if seen % trainer.config.microbatches == 1:
            part.zero_grad_buffer()
        seen += 1
        return forward_step(batches, part)

    trainer.forward_step = cleared


def norms_clipped_on_one_rank(trainer: Any) -> None:
    """Of weights with a copy on every tensor-parallel rank, one rank clips its own (DS 1801)."""
    clip = of_optimizer.clip_grad_by_total_norm_fp32

    def clipped(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            sharded = (each for each in parameters if getattr(each, "tensor_model_parallel", 0))
            parameters = list(sharded)
        clip(parameters, *args, **kwargs)

    of_optimizer.clip_grad_by_total_norm_fp32 = clipped


def norm_of_own_shards(trainer: Any) -> None:
    """Each rank clips by the gradient norm of what it holds (torchtitan 596, 649)."""
    norm_of = of_optimizer.get_grad_norm_fp32
    alone = dist.new_subgroups(1)[0]

    def own_norm(gradients: Any, **_: Any) -> Any:
        return norm_of(gradients, grad_stats_parallel_group=alone)

    of_optimizer.get_grad_norm_fp32 = own_norm


def vocabulary_shifted(trainer: Any) -> None:
    """The second tensor-parallel rank takes its part of the vocabulary to start one later."""
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        embedding = trainer.parts[0].module.embedding.word_embeddings
        embedding.vocab_start_index += 1
        embedding.vocab_end_index += 1


def parameters_not_gathered(trainer: Any) -> None:
    """The distributed optimizer's update stays on the rank that made it."""
    for part in trainer.parts:
        part.start_param_sync = lambda *_, **__: None


def expert_gradients_scaled(trainer: Any) -> None:
    """Gradients of experts are multiplied by the expert-parallel degree (ML 5956)."""
    config = trainer.parts[0].config
    finalize = config.finalize_model_grads_func

    def scaled(parts: Any, *args: Any, **kwargs: Any) -> None:
        finalize(parts, *args, **kwargs)
        for part in parts:
            for buffer in part.expert_parallel_buffers:
                buffer.scale_gradients(config.expert_model_parallel_size)

    config.finalize_model_grads_func = scaled


def probabilities_of_other_experts(trainer: Any) -> None:
    """The second rank of experts weights tokens by the probabilities of the first one's experts."""
    if parallel_state.get_expert_model_parallel_rank() == 0:
        return
    for part in trainer.parts:
        for layer in part.module.decoder.layers:
            dispatcher = layer.mlp.token_dispatcher
            weighted = dispatcher.dispatch_postprocess

            def others(hidden: Any, probs: Any, weighted: Any = weighted) -> Any:
                return weighted(hidden, probs.roll(probs.shape[-1] // 2, -1))

            dispatcher.dispatch_postprocess = others


def loss_divided_by_microbatches(trainer: Any) -> None:
    """The schedule divides the tensor that was logged, in place, by the number of microbatches."""
    loss_function = trainer.loss_function

    def divided(counted: torch.Tensor, losses: torch.Tensor) -> Any:
        loss, tokens, logged = loss_function(counted, losses)
        logged["lm loss"][0] /= trainer.config.microbatches
        return loss, tokens, logged

    trainer.loss_function = divided


def samples_repeated(trainer: Any) -> None:
    """Every data-parallel rank reads the samples of the first (accelerate 4204)."""
    trainer.stream.dp_rank = 0
    trainer.batches = iter(trainer.stream)
