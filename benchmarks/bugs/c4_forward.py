"""C4: another forward pass, or another objective, than was meant: off from step 1 on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from places import coordinate

IGNORE_INDEX = -100
SMOOTHING = 0.1


def cp_keys_gathered_on_batch(_trainer: Any) -> None:
    """Keys and values are gathered on the batch dimension, and viewed as if on the sequence.

    Shapes fit, so nothing complains: a sample attends to the keys of another one.

    Reference: torchtitan pull request 3206
    Class: C4
    Technique: CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Needs: batch > 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    from torchtitan.distributed.context_parallel import api

    gather = api.flex_cp_allgather

    def gathered(keys: Any, values: Any, _dimension: int, group: str) -> tuple[Any, Any]:
        rows, _, *rest = keys.shape
        keys, values = gather(keys, values, 0, group)
        return keys.reshape(rows, -1, *rest), values.reshape(rows, -1, *rest)

    api.flex_cp_allgather = gathered


def cp_chunks_in_other_order(trainer: Any) -> None:
    """Each cp rank puts its own keys and values first, and the others' after them.

    The order of a ring, taken for the order of the sequence: it is right on cp rank 0 only.

    Reference: class of torchtitan pull request 3206
    Class: C4
    Technique: CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    from torchtitan.distributed.context_parallel import api

    gather, mine = api.flex_cp_allgather, coordinate(trainer, "cp")

    def gathered(keys: Any, values: Any, dimension: int, group: str) -> tuple[Any, Any]:
        whole = gather(keys, values, dimension, group)
        shift = -mine * keys.shape[dimension]
        return whole[0].roll(shift, dimension), whole[1].roll(shift, dimension)

    api.flex_cp_allgather = gathered


def cp_context_skipped(trainer: Any) -> None:
    """The context of CP is never entered: every rank attends to its own chunk only.

    Reference: torchtitan pull request 1880
    Class: C4
    Technique: CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    import torch

    def alone(attention: Any) -> Callable[..., Any]:
        def forward(queries: Any, keys: Any, values: Any, **options: Any) -> Any:
            length = queries.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
            options["attention_masks"] = causal
            return type(attention).forward(attention, queries, keys, values, **options)

        return forward

    for layer in _layers(trainer):
        layer.attention.inner_attention.forward = alone(layer.attention.inner_attention)


def cp_positions_of_own_chunk(trainer: Any) -> None:
    """Rotary positions of cp rank 1 count from the start of its own chunk.

    Reference: class of torchtitan pull request 1880
    Class: C4
    Technique: CP 2
    Module: layers.*.attention.rope
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    import torch

    def restarted(inputs: Any, labels: Any, extra: dict[str, Any]) -> Any:
        if coordinate(trainer, "cp") == 1:
            positions = extra["positions"]
            here = torch.arange(positions.shape[1], device=positions.device)
            extra["positions"] = here.expand_as(positions).contiguous()
        return inputs, labels, extra

    _after_loading(trainer, restarted)


def sequence_parallel_rows_mixed(trainer: Any) -> None:
    """Rows of a flattened (batch x sequence) are read as (sequence x batch) after attention.

    Right for one sample, as the test upstream had it.

    Reference: torchtitan pull request 3604
    Class: C4
    Technique: TP 2, sequence parallel
    Module: layers.*.attention.wo
    First step: 1
    Needs: batch > 1
    Signature: loss off at step 1
    Cause: forward or objective
    """

    def mixed(rows: Any) -> Any:
        batch, length, width = rows.shape
        return rows.reshape(length, batch, width).transpose(0, 1).contiguous()

    for layer in _layers(trainer):
        _change_output(layer.attention.wo, mixed)


def mean_per_rank(trainer: Any) -> None:
    """Each dp rank averages over its own valid tokens, and ranks are averaged after that.

    Reference: torchtitan issue 2206
    Class: C4
    Technique: FSDP 2
    Module: loss
    First step: 1
    Needs: uneven valid tokens
    Signature: the trainer's loss is another mean; gradients off by the unevenness of the tokens
    Cause: forward or objective
    """
    ranks = trainer.parallel_dims.get_mesh("batch").size()

    def own(labels: Any, tokens: Any) -> Any:
        return (labels != IGNORE_INDEX).sum().to(tokens) * ranks

    _count_tokens(trainer, own)


def mean_per_microbatch(trainer: Any) -> None:
    """Each microbatch is averaged over its own valid tokens, and then over microbatches.

    Reference: transformers pull request 34191
    Class: C4
    Technique: FSDP 2, gradient accumulation 2
    Module: loss
    First step: 1
    Needs: accumulation > 1, uneven valid tokens
    Signature: the trainer's loss is another mean; gradients off by the unevenness of the tokens
    Cause: forward or objective
    """
    import torch.distributed as dist

    group = trainer.parallel_dims.get_mesh("batch").get_group()
    steps = trainer.gradient_accumulation_steps

    def of_microbatch(labels: Any, tokens: Any) -> Any:
        counted = (labels != IGNORE_INDEX).sum().to(tokens)
        dist.all_reduce(counted, group=group)
        return counted * steps

    _count_tokens(trainer, of_microbatch)


def smoothed(trainer: Any) -> None:
    """Label smoothing done right, for the control: the mean over the whole vocabulary."""
    _smooth_labels(trainer, lambda logits: logits)


def label_smoothing_local_vocabulary(trainer: Any) -> None:
    """Label smoothing spreads over the vocabulary of one tp rank instead of the whole.

    Reference: Megatron-LM issue 7464
    Class: C4
    Technique: TP 2, label smoothing
    Module: loss
    First step: 1
    Signature: the trainer's loss is off at step 1, cross entropy itself is right
    Cause: forward or objective
    """
    size, mine = trainer.parallel_dims.tp, coordinate(trainer, "tp")
    _smooth_labels(trainer, lambda logits: logits.chunk(size, dim=-1)[mine])


def cast_in_one_module(trainer: Any) -> None:
    """The feed-forward of one layer hands on its output in bfloat16, and its gradient back.

    At initial weights that branch adds so little to the residual stream that the forward pass
    hides the cast; only the gradients of the module itself show it.

    Reference: torchtitan issue 2575
    Class: C4
    Technique: FSDP 2
    Module: layers.2.feed_forward
    First step: 1
    Signature: gradients of that module off by rounding to bfloat16, the loss later
    Cause: gradient direction | forward or objective
    Says: bfloat16
    Regimes: fp32 | float8 (in bfloat16 the module hands on bfloat16 anyway)
    """
    import torch

    _change_output(_layers(trainer)[2].feed_forward, lambda out: out.to(torch.bfloat16).float())


def norm_in_low_precision(trainer: Any) -> None:
    """The last norm computes its statistics in bfloat16.

    Reference: class of torchtitan issue 2575
    Class: C4
    Technique: FSDP 2
    Module: norm
    First step: 1
    Signature: loss off at step 1 by rounding to bfloat16
    Cause: forward or objective
    Regimes: fp32 | float8 (in bfloat16 the norm gets its input in bfloat16 anyway)
    """
    import torch

    norm = next(part.norm for part in trainer.model_parts if part.norm is not None)
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden.to(torch.bfloat16).float())


def norm_epsilon(trainer: Any) -> None:
    """All norms take an epsilon of 1e-2 instead of 1e-5.

    Reference: class of torchtitan issue 2575
    Class: C4
    Technique: FSDP 2
    Module: layers.*.attention_norm
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    for layer in _layers(trainer):
        layer.attention_norm.eps = layer.ffn_norm.eps = 1e-2


def documents_attend_to_each_other(trainer: Any) -> None:
    """The mask is causal only: packed documents attend to those before them.

    Reference: class of torchtitan issue 1880
    Class: C4
    Technique: FSDP 2, packed documents
    Module: layers.*.attention.inner_attention
    First step: 1
    Needs: packed documents
    Signature: loss off at step 1
    Cause: forward or objective
    """
    import torch

    model = trainer.model_parts[0]
    masks = model.get_attention_masks

    def causal_only(positions: Any) -> Any:
        here = torch.arange(positions.shape[1], device=positions.device)
        return masks(positions=here.expand_as(positions).contiguous())

    model.get_attention_masks = causal_only


def mask_off_by_one(_trainer: Any) -> None:
    """The causal mask lets every token see the next one, which it has to predict.

    Reference: class of torchtitan pull request 3206
    Class: C4
    Technique: FSDP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    from torchtitan.models.common import decoder

    decoder.get_causal_mask_mod = lambda: lambda _batch, _head, query, key: query + 1 >= key


def pipeline_labels_rotated(trainer: Any) -> None:
    """The last stage takes the labels of the microbatch after.

    Reference: class of torchtitan issue 1733
    Class: C4
    Technique: PP 2, 1F1B
    Module: loss
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    step = trainer.pp_forward_backward_step

    def rotated(*, label_mbs: list[Any], **options: Any) -> Any:
        return step(label_mbs=[*label_mbs[1:], label_mbs[0]], **options)

    trainer.pp_forward_backward_step = rotated


def ignored_labels_counted(trainer: Any) -> None:
    """Labels that should be ignored count as those of token 0.

    Reference: class of torchtitan issue 2206
    Class: C4
    Technique: FSDP 2
    Module: loss
    First step: 1
    Needs: ignored labels
    Signature: loss off at step 1
    Cause: forward or objective
    """
    _after_loading(trainer, lambda inputs, labels, extra: (inputs, labels.clamp(min=0), extra))


def residual_dropped(trainer: Any) -> None:
    """One layer's feed-forward replaces its input instead of adding to it.

    Reference: class of torchtitan issue 1880
    Class: C4
    Technique: FSDP 2
    Module: layers.2
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    layer = _layers(trainer)[2]

    def forward(hidden: Any, masks: Any, positions: Any = None) -> Any:
        hidden = hidden + layer.attention(layer.attention_norm(hidden), masks, positions)
        return layer.feed_forward(layer.ffn_norm(hidden))

    layer.forward = forward


def row_parallel_not_reduced(trainer: Any) -> None:
    """One row-parallel layer's partial sums are taken for the whole: no reduction over tp.

    Reference: class of torchtitan issue 1805
    Class: C4
    Technique: TP 2
    Module: layers.1.feed_forward.w2
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    linear = _layers(trainer)[1].feed_forward.w2

    def unreduced(_dims: Any, out: Any) -> Any:
        whole = DTensor.from_local(out.to_local(), out.device_mesh, [Replicate()])
        return whole.redistribute(placements=[Shard(1)])

    linear._redistribute_outputs = unreduced


def key_value_heads_repeated_in_turn(trainer: Any) -> None:
    """Heads of keys and values are repeated 0 1 0 1 where 0 0 1 1 is meant.

    Reference: class of torchtitan pull request 3206
    Class: C4
    Technique: FSDP 2, grouped-query attention
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """

    def in_turn(attention: Any) -> Callable[..., Any]:
        forward = attention.forward

        def repeated(queries: Any, keys: Any, values: Any, **options: Any) -> Any:
            times = queries.shape[2] // keys.shape[2]
            keys, values = (each.repeat(1, 1, times, 1) for each in (keys, values))
            return forward(queries, keys, values, **{**options, "enable_gqa": False})

        return repeated

    for layer in _layers(trainer):
        layer.attention.inner_attention.forward = in_turn(layer.attention.inner_attention)


def attention_scale(trainer: Any) -> None:
    """Attention scores are divided by the head's dimension, not by its square root.

    Reference: class of torchtitan pull request 3206
    Class: C4
    Technique: FSDP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    for layer in _layers(trainer):
        layer.attention.scaling = 1 / layer.attention.head_dim


def stage_runs_layers_backwards(trainer: Any) -> None:
    """Each pipeline stage runs its layers in the opposite order.

    Reference: class of Megatron-LM issue 7452
    Class: C4
    Technique: PP 2, 1F1B
    Module: the model
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    for part in trainer.model_parts:
        layers = part.layers._modules
        part.layers._modules = dict(reversed(layers.items()))


# ------------------------------------------------------------------------------- places


def _layers(trainer: Any) -> list[Any]:
    """The transformer blocks on this rank, in order."""
    return [layer for part in trainer.model_parts for layer in part.layers.values()]


def _change_output(module: Any, change: Callable[[Any], Any]) -> None:
    """Change what a module hands on; a DTensor by its shard on this rank."""
    from torch.distributed.tensor import DTensor

    forward = module.forward

    def changed(*arguments: Any, **options: Any) -> Any:
        out = forward(*arguments, **options)
        if not isinstance(out, DTensor):
            return change(out)
        return DTensor.from_local(change(out.to_local()), out.device_mesh, out.placements)

    module.forward = changed


def _after_loading(trainer: Any, change: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
    """Change inputs, labels and what else the model gets, as this rank has them."""
    process = trainer.post_dataloading_process

    def changed(*arguments: Any, **options: Any) -> Any:
        return change(*process(*arguments, **options))

    trainer.post_dataloading_process = changed


def _count_tokens(trainer: Any, count: Callable[[Any, Any], Any]) -> None:
    """Divide the loss of each batch by another number of tokens than the global one."""
    step = trainer.forward_backward_step

    def counted(*, labels: Any, global_valid_tokens: Any, **options: Any) -> Any:
        tokens = count(labels, global_valid_tokens)
        return step(labels=labels, global_valid_tokens=tokens, **options)

    trainer.forward_backward_step = counted


def _smooth_labels(trainer: Any, share: Callable[[Any], Any]) -> None:
    """Mix in the mean over the vocabulary, of which ``share`` takes a part."""
    from torch.distributed.tensor import DTensor, Replicate

    loss = trainer.loss_fn.loss_fn
    compute = loss.fn

    def smooth(pred: Any, labels: Any, **options: Any) -> Any:
        hard = compute(pred, labels, **options)
        logits = pred
        if isinstance(pred, DTensor):
            whole = [Replicate()] * pred.device_mesh.ndim
            logits = pred.redistribute(placements=whole).to_local(grad_placements=whole)
        spread = logits.float().logsumexp(-1) - share(logits.float()).mean(-1)
        return (1 - SMOOTHING) * hard + SMOOTHING * spread[labels != IGNORE_INDEX].sum()

    loss.fn = smooth
