"""Errors put into Megatron-Core at their true places, for megatron_injected.toml.

Each function gets the trainer (``converge_harness.rank.megatron.trainer.MegatronTrainer``) of a
rank, before training. ``nox -s prove -- --megatron`` grades converge by what the docstrings say;
their fields are those of ``benchmarks/bugs`` (docs/bugs.md).
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


# ------------------------------------------------------------------ C1: scale of gradients


def averaged_twice(trainer: Any) -> None:
    """Gradients are divided by the tokens of the step, and by the microbatches as well.

    Reference: class of transformers pull request 34191
    Class: C1
    Technique: DP 2, 4 microbatches
    Place: finalize_model_grads
    Module: none
    First step: 1
    Needs: accumulation > 1
    Signature: every gradient a quarter of the control's; Adam hides it from the loss
    Cause: gradient scale
    Says: microbatch | accumulation
    """

    def divided(parts: Any) -> None:
        for part in parts:
            part.scale_gradients(1 / trainer.config.microbatches)

    _after_finalizing(trainer, divided)


def experts_scaled(trainer: Any) -> None:
    """Gradients of experts are multiplied by the expert-parallel degree.

    Reference: Megatron-LM pull request 5956 (of Megatron-FSDP), torchtitan issue 1551
    Class: C1
    Technique: EP 2
    Place: the expert buffers of DistributedDataParallel
    Module: none
    First step: 1
    Needs: experts
    Signature: gradients of all experts twice the control's, all others right
    Cause: gradient scale of a group
    Says: the EP degree
    """

    def scaled(parts: Any) -> None:
        for part in parts:
            for buffer in part.expert_parallel_buffers:
                buffer.scale_gradients(part.config.expert_model_parallel_size)

    _after_finalizing(trainer, scaled)


def tied_twice(trainer: Any) -> None:
    """The gradients of a tied embedding are summed over the stages twice.

    Reference: class of torchtitan issue 3174
    Class: C1
    Technique: PP 2, 1F1B
    Place: _allreduce_word_embedding_grads
    Module: none
    First step: 1
    Needs: tied weights
    Signature: the embedding's gradient twice the control's, all others right
    Cause: gradient scale of a group
    Says: tied | embedding
    """
    summed = of_finalizing._allreduce_word_embedding_grads

    def twice(*args: Any, **kwargs: Any) -> None:
        summed(*args, **kwargs)
        summed(*args, **kwargs)

    of_finalizing._allreduce_word_embedding_grads = twice


# -------------------------------------------------------------- C2: direction of gradients


def microbatch_lost(trainer: Any) -> None:
    """The first microbatch's gradients are cleared before the others are added.

    Reference: class of DeepSpeed issue 7985
    Class: C2
    Technique: DP 2, 2 microbatches
    Place: DistributedDataParallel.zero_grad_buffer, called between microbatches
    Module: none
    First step: 1
    Needs: accumulation > 1
    Signature: all gradients those of the later microbatches
    Cause: gradient direction
    Says: summed | reduc | accumul | microbatch
    """
    forward_step = trainer.forward_step
    seen = 0

    def cleared(batches: Any, part: Any) -> Any:
        nonlocal seen
        if seen % trainer.config.microbatches == 1:
            part.zero_grad_buffer()
        seen += 1
        return forward_step(batches, part)

    trainer.forward_step = cleared


def input_gradients_partial(trainer: Any) -> None:
    """Gradients by the input of attention's column-parallel layers are not summed over ranks.

    Reference: torchtitan issue 1805, SkyRL pull request 1886
    Class: C2
    Technique: TP 2
    Place: ColumnParallelLinear.disable_grad_reduce of linear_qkv
    Module: layers.*.self_attention.linear_qkv or layers.*.self_attention
    First step: 1
    Signature: what flows back from attention is one rank's part, so norms' copies part as well
    Cause: gradient direction | replicas differ
    """
    for layer in trainer.parts[0].module.decoder.layers:
        qkv = layer.self_attention.linear_qkv
        # Without the first it would sum in another place, the backward pass of its input's copy.
        qkv.disable_grad_reduce, qkv.allreduce_dgrad = True, False


def keys_doubled_on_one_rank(trainer: Any) -> None:
    """The backward pass of attention gives twice the gradient by keys on one rank, in one layer.

    Reference: class of Megatron-LM issue 1464
    Class: C2
    Technique: TP 2
    Place: DotProductAttention of layer 1
    Module: layers.1.self_attention.core_attention or layers.1.self_attention
    First step: 1
    Signature: the gradient of layer 1's keys off in half of its heads, and all that is below
    Cause: gradient direction
    Says: layers.1 | layer 1
    """
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        return
    attention = trainer.parts[0].module.decoder.layers[1].self_attention.core_attention
    forward = attention.forward

    def doubled(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(query, key + (key - key.detach()), *args, **kwargs)

    attention.forward = doubled


# ----------------------------------------------------------------------- C3: replicas part


def sp_norms_not_summed(trainer: Any) -> None:
    """Under sequence parallelism each rank keeps the norms' gradients of its part.

    Reference: Megatron-LM issue 1446, class of 7452
    Class: C3
    Technique: TP 2, sequence parallel
    Place: _allreduce_non_tensor_model_parallel_grads
    Module: none
    First step: 1
    Signature: norms' gradients differ between the tensor-parallel ranks
    Cause: replicas differ
    Says: tp
    """
    of_finalizing._allreduce_non_tensor_model_parallel_grads = lambda *_: None


def router_not_summed(trainer: Any) -> None:
    """Under sequence parallelism each rank keeps the router's gradient of its tokens.

    Reference: class of Megatron-LM issue 599, transformers issue 48687
    Class: C3
    Technique: TP 2, sequence parallel
    Place: TopKRouter.weight.sequence_parallel
    Module: none
    First step: 1
    Needs: experts
    Signature: the routers' gradients differ between the tensor-parallel ranks
    Cause: replicas differ
    Says: router
    """
    for layer in trainer.parts[0].module.decoder.layers:
        layer.mlp.router.weight.sequence_parallel = False


def tied_not_summed(trainer: Any) -> None:
    """The first and the last stage keep their own gradients of the tied embedding.

    Reference: class of torchtitan issue 3174
    Class: C3
    Technique: PP 2, 1F1B
    Place: _allreduce_word_embedding_grads
    Module: none
    First step: 1
    Needs: tied weights
    Signature: the embedding's gradients differ between the stages
    Cause: replicas differ
    Says: embedding
    """
    of_finalizing._allreduce_word_embedding_grads = lambda *_: None


def not_reduced(trainer: Any) -> None:
    """Data-parallel ranks update their copies by their own gradients.

    Reference: class of Megatron-LM issue 599
    Class: C3
    Technique: DP 2
    Place: DistributedDataParallel.finish_grad_sync
    Module: none
    First step: 1
    Signature: all gradients differ between the data-parallel ranks
    Cause: replicas differ
    Says: dp
    """
    for part in trainer.parts:
        part.finish_grad_sync = lambda **_: None


def clipped_on_one_rank(trainer: Any) -> None:
    """Of weights with a copy on every tensor-parallel rank, one rank clips its own.

    Reference: DeepSpeed issue 1801
    Class: C3
    Technique: TP 2
    Place: clip_grad_by_total_norm_fp32
    Module: none
    First step: 1
    Needs: clipping active
    Signature: norms equal in gradient, and apart after the first update
    Cause: replicas differ
    Says: clipping | update differs
    """
    clip = of_optimizer.clip_grad_by_total_norm_fp32

    def clipped(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            sharded = (each for each in parameters if getattr(each, "tensor_model_parallel", 0))
            parameters = list(sharded)
        clip(parameters, *args, **kwargs)

    of_optimizer.clip_grad_by_total_norm_fp32 = clipped


def not_gathered(trainer: Any) -> None:
    """The distributed optimizer's update stays on the rank that made it.

    Reference: class of Megatron-LM issues 663 and 950
    Class: C3
    Technique: distributed optimizer over 2
    Place: start_param_sync of the parameters' bucket groups
    Module: none
    First step: 1
    Signature: each rank has the new values of its own parts only
    Cause: replicas differ
    """
    # Not of DistributedDataParallel, which the optimizer of 0.19 no longer asks.
    for part in trainer.parts:
        for group in part.bucket_groups:
            group.start_param_sync = lambda *_, **__: None


# ---------------------------------------------------------------- C4: forward or objective


def vocabulary_shifted(trainer: Any) -> None:
    """The second tensor-parallel rank takes its part of the vocabulary to start one later.

    Reference: class of Megatron-LM issue 7464
    Class: C4
    Technique: TP 2
    Place: VocabParallelEmbedding.vocab_start_index
    Module: embedding.word_embeddings
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        embedding = trainer.parts[0].module.embedding.word_embeddings
        embedding.vocab_start_index += 1
        embedding.vocab_end_index += 1


def samples_exchanged(trainer: Any) -> None:
    """One rank gets its half of the sequence with the samples of the batch in another order.

    Reference: class of torchtitan issue 3604
    Class: C4
    Technique: TP 2, sequence parallel
    Place: LanguageModelEmbedding.forward
    Module: embedding
    First step: 1
    Needs: more than one sample in a batch
    Signature: loss off at step 1
    Cause: forward or objective
    """
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        return
    embedding = trainer.parts[0].module.embedding
    forward = embedding.forward

    def exchanged(*args: Any, **kwargs: Any) -> torch.Tensor:
        embedded: torch.Tensor = forward(*args, **kwargs)
        return embedded.roll(1, dims=1)  # sequence, batch, width

    embedding.forward = exchanged


def wrong_experts(trainer: Any) -> None:
    """The second rank of experts weights tokens by the probabilities of the first one's experts.

    Reference: class of torchtitan issue 3604
    Class: C4
    Technique: EP 2
    Place: MoEAllGatherTokenDispatcher.dispatch_postprocess
    Module: layers.*.mlp.experts.*.linear_fc2 or layers.*.mlp.experts.* or layers.*.mlp
    First step: 1
    Needs: experts
    Signature: loss off at step 1
    Cause: forward or objective
    """
    if parallel_state.get_expert_model_parallel_rank() == 0:
        return
    for part in trainer.parts:
        for layer in part.module.decoder.layers:
            dispatcher = layer.mlp.token_dispatcher
            weighted = dispatcher.dispatch_postprocess

            def others(hidden: Any, probs: Any, weighted: Any = weighted) -> Any:
                return weighted(hidden, probs.roll(probs.shape[-1] // 2, -1))

            dispatcher.dispatch_postprocess = others


def mean_per_microbatch(trainer: Any) -> None:
    """Each microbatch is averaged over its own tokens, and then over microbatches and ranks.

    Reference: transformers pull request 34191, Megatron-LM issue 4590
    Class: C4
    Technique: DP 2, 4 microbatches
    Place: the loss function
    Module: loss
    First step: 1
    Needs: accumulation > 1, uneven valid tokens
    Signature: the reported loss right; gradients off by the unevenness of the tokens
    Cause: forward or objective | gradient direction
    """
    loss_function = trainer.loss_function

    def averaged(counted: torch.Tensor, losses: torch.Tensor) -> Any:
        loss, tokens, logged = loss_function(counted, losses)
        return loss / tokens, torch.ones_like(tokens), logged

    trainer.loss_function = averaged


# --------------------------------------------------------------------- C5: only the metric


def loss_divided(trainer: Any) -> None:
    """The logged loss is divided by the number of microbatches, as the schedule divides its own.

    Reference: class of torchtitan issue 3280
    Class: C5
    Technique: PP 2, 1F1B
    Place: the loss function, what it leaves for the log
    Module: none
    First step: 1
    Signature: the reported loss a quarter of the recomputed one
    Cause: metric only
    Says: microbatch | accumulation
    """
    loss_function = trainer.loss_function

    def divided(counted: torch.Tensor, losses: torch.Tensor) -> Any:
        loss, tokens, logged = loss_function(counted, losses)
        logged["lm loss"][0] /= trainer.config.microbatches
        return loss, tokens, logged

    trainer.loss_function = divided


def norm_of_stage(trainer: Any) -> None:
    """The reported grad norm is that of one pipeline stage; clipping uses the right one.

    Reference: torchtitan issues 596 and 649
    Class: C5
    Technique: PP 2, 1F1B
    Place: what ChainedOptimizer.step returns
    Module: none
    First step: 1
    Signature: the reported norm too small, by no constant factor
    Cause: metric only
    Says: norm
    """
    norm_of = of_optimizer.get_grad_norm_fp32
    step = trainer.optimizer.step
    alone = dist.new_subgroups(1)[0]
    own = 0.0

    def watched(gradients: Any, **kwargs: Any) -> Any:
        nonlocal own
        own = float(norm_of(gradients, grad_stats_parallel_group=alone))
        return norm_of(gradients, **kwargs)

    def stepped() -> Any:
        updated, _, zeros = step()
        return updated, own, zeros

    of_optimizer.get_grad_norm_fp32 = watched
    trainer.optimizer.step = stepped


def norm_of_own_shards(trainer: Any) -> None:
    """Each rank clips by the gradient norm of what it holds, and reports it.

    Reference: torchtitan issues 596 and 649
    Class: C5
    Technique: TP 2
    Place: get_grad_norm_fp32
    Module: none
    First step: 1
    Needs: clipping active
    Signature: the reported norm too small, and copies clipped by other factors on each rank
    Cause: clipping | metric only | replicas differ
    """
    norm_of = of_optimizer.get_grad_norm_fp32
    alone = dist.new_subgroups(1)[0]

    def own_norm(gradients: Any, **_: Any) -> Any:
        return norm_of(gradients, grad_stats_parallel_group=alone)

    of_optimizer.get_grad_norm_fp32 = own_norm


# --------------------------------------------------------- C6: data, weights and schedules


def samples_repeated(trainer: Any) -> None:
    """Every data-parallel rank reads the samples of the first.

    Reference: accelerate issue 4204
    Class: C6
    Technique: DP 2
    Place: the loader's data-parallel rank
    Module: none
    First step: 1
    Signature: two ranks with one batch
    Cause: data
    """
    trainer.stream.dp_rank = 0
    trainer.batches = iter(trainer.stream)


def layers_swapped(trainer: Any) -> None:
    """The last stage has loaded its two layers in the wrong order; shapes fit.

    Reference: Megatron-LM issue 7452, finding 12
    Class: C6
    Technique: PP 2, 1F1B
    Place: weights after loading
    Module: none
    First step: 1
    Signature: initial weights differ in the last two layers
    Cause: state lost
    Says: layer
    """
    if parallel_state.get_pipeline_model_parallel_rank() > 0:
        first, second = trainer.parts[0].module.decoder.layers
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        with torch.no_grad():
            for here, there in pairs:
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)
    trainer.optimizer.reload_model_params()


def schedule_per_microbatch(trainer: Any) -> None:
    """The learning rate's schedule moves on once for each microbatch.

    Reference: class of a learning rate whose warm-up restarts
    Class: C6
    Technique: DP 2, 4 microbatches
    Place: OptimizerParamScheduler.step
    Module: none
    First step: 2
    Needs: accumulation > 1
    Signature: another learning rate from step 2 on
    Cause: learning rate
    """
    step = trainer.schedule.step
    trainer.schedule.step = lambda increment: step(increment * trainer.config.microbatches)


# ----------------------------------------------------------------------- C7: precision lost


def reduced_in_bf16(trainer: Any) -> None:
    """Gradients are reduced over data-parallel ranks in bfloat16, though float32 was asked for.

    Reference: class of pytorch issue 190626
    Class: C7
    Technique: DP 2
    Place: _ParamAndGradBucketGroup.start_grad_sync
    Module: none
    First step: 1
    Signature: every gradient off by the rounding of bfloat16
    Cause: gradient direction
    Says: bf16 | bfloat16 | precision
    """
    for part in trainer.parts:
        for group in part.bucket_groups:
            group.start_grad_sync = _rounding(group, group.start_grad_sync)


def _rounding(group: Any, reduce: Any) -> Any:
    def rounded(*args: Any, **kwargs: Any) -> None:
        for bucket in group.buckets:
            bucket.grad_data.copy_(bucket.grad_data.bfloat16())
        reduce(*args, **kwargs)
        for bucket in group.buckets:
            bucket.grad_data.copy_(bucket.grad_data.bfloat16())

    return rounded


def _after_finalizing(trainer: Any, action: Any) -> None:
    """Let an action change the parts' gradients at the end of each forward-backward pass."""
    config = trainer.parts[0].config
    finalize = config.finalize_model_grads_func

    def finalized(parts: Any, *args: Any, **kwargs: Any) -> None:
        finalize(parts, *args, **kwargs)
        action(parts)

    config.finalize_model_grads_func = finalized
