"""C6: other data, other initial weights, other updates. Those here show within two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from places import before_step, before_update, coordinate, local, parameters

DROPPED = 0.1

# --------------------------------------------------------------------------------- data


def ranks_read_same_data(trainer: Any) -> None:
    """All data-parallel ranks read the samples of the first one.

    Reference: accelerate issue 4204
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: batch digest off at step 1
    Cause: data
    """
    trainer.dataloader._stream.dp_rank = 0


def one_rank_reads_ahead(trainer: Any) -> None:
    """The loader of the last dp rank is one step ahead of the others.

    Reference: class of accelerate issue 4204
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: batch digest off at step 1
    Cause: data
    """
    stream = trainer.dataloader._stream
    if stream.dp_rank == stream.dp_degree - 1:
        before_step(trainer, 1, lambda: _skip(stream))


def tp_ranks_read_different_data(trainer: Any) -> None:
    """The second tp rank reads the samples of the step after.

    Reference: class of accelerate issue 4204
    Class: C6
    Technique: TP 2
    First step: 1
    Signature: ranks that share samples read others
    Cause: data
    Says: tp | ranks
    """
    if coordinate(trainer, "tp") == 1:
        stream = trainer.dataloader._stream
        before_step(trainer, 1, lambda: _skip(stream))


def labels_not_shifted_on_one_rank(trainer: Any) -> None:
    """One dp rank's labels are its inputs, not the next tokens.

    Reference: class of accelerate issue 4204
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: batch digest off at step 1
    Cause: data
    """
    if coordinate(trainer, "batch") == 1:
        _change_batches(trainer, lambda inputs, _labels: (inputs, inputs["input"].clone()))


def vocabulary_remapped(trainer: Any) -> None:
    """Token ids are those of another tokenizer version: all moved on by one.

    Reference: class of the stock torchtitan dataloader
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: batch digest off at step 1
    Cause: data
    """
    size = trainer.model_config.vocab_size

    def moved(inputs: dict[str, Any], labels: Any) -> tuple[dict[str, Any], Any]:
        known = labels >= 0
        return (
            {**inputs, "input": (inputs["input"] + 1) % size},
            labels.where(~known, (labels + 1) % size),
        )

    _change_batches(trainer, moved)


# ------------------------------------------------------------------------------ weights


def layers_swapped_after_load(trainer: Any) -> None:
    """Two layers get each other's weights; a strict load succeeds.

    Reference: Megatron-LM issue 7452, finding 12
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: initial weights differ
    Cause: state lost
    Says: layer
    """

    def swap() -> None:
        first = dict(parameters(trainer, "layers.1."))
        second = dict(parameters(trainer, "layers.2."))
        for name, parameter in first.items():
            here, there = local(parameter), local(second[name.replace("layers.1.", "layers.2.")])
            kept = here.detach().clone()
            here.detach().copy_(there.detach())
            there.detach().copy_(kept)

    _after_load(trainer, swap)


def stages_loaded_in_wrong_order(trainer: Any) -> None:
    """Each of two pipeline stages loads the layers of the other one.

    Reference: Megatron-LM issue 7452, finding 12
    Class: C6
    Technique: PP 2
    First step: 1
    Signature: initial weights differ
    Cause: state lost
    Says: layer
    """

    def other(name: str) -> str:
        first, _, rest = name.partition(".")
        if first != "layers":
            return name
        number, _, rest = rest.partition(".")
        return f"layers.{(int(number) + 2) % 4}.{rest}"

    _ask_for(trainer, lambda states: {other(name): state for name, state in states.items()})


def weights_loaded_in_bf16(trainer: Any) -> None:
    """Weights pass through bfloat16 on their way from the checkpoint.

    Reference: class of Megatron-LM issue 7452
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: initial weights differ by rounding
    Cause: state lost
    Regimes: fp32 | mixed | float8 (parameters in bfloat16 are loaded so)
    """
    import torch

    def round_off() -> None:
        for _, parameter in parameters(trainer):
            shard = local(parameter).detach()
            shard.copy_(shard.to(torch.bfloat16))

    _after_load(trainer, round_off)


def tensor_never_loaded(trainer: Any) -> None:
    """One tensor is not asked for, and keeps its random initial values.

    Reference: class of Megatron-LM issue 7452
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: one initial tensor differs
    Cause: state lost
    Says: w2
    """
    import torch

    missing = "layers.3.feed_forward.w2.weight"
    for _, parameter in parameters(trainer, missing):
        torch.nn.init.normal_(local(parameter), std=0.02)
    _ask_for(trainer, lambda states: {n: s for n, s in states.items() if n != missing})


# ------------------------------------------------------------------------------ updates


def parameter_left_out_of_optimizer(trainer: Any) -> None:
    """The optimizer does not know one parameter, as after a replacement by a wrapper.

    Reference: class of torchtitan issue 3686
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: one parameter does not move
    Cause: parameters do not move
    Says: qkv
    """
    _leave_out(trainer, "layers.1.attention.qkv_linear.")


def layer_left_out_of_optimizer(trainer: Any) -> None:
    """The optimizer does not know a whole layer.

    Reference: class of torchtitan issue 3686
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: a layer does not move
    Cause: parameters do not move
    Says: layer 2 | layers.2
    """
    _leave_out(trainer, "layers.2.")


def weight_decay_twice(trainer: Any) -> None:
    """Weights decay in the optimizer and once more outside.

    Reference: class of the AdamW and L2 mix-up
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: updates off by a multiple of the weights
    Cause: update
    Says: decay
    """

    def decay() -> None:
        for group in _groups(trainer):
            for parameter in group["params"]:
                local(parameter).detach().mul_(1 - group["lr"] * group["weight_decay"])

    before_update(decay)


def weight_decay_on_norms_only(trainer: Any) -> None:
    """The groups with and without weight decay are exchanged: only norms decay.

    Reference: class of the AdamW and L2 mix-up
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: updates of all matrices off by a multiple of the weights
    Cause: update
    Says: decay
    """
    for group, optimizer in _groups_of(trainer):
        small = [p for p in group["params"] if p.ndim == 1]
        large = [p for p in group["params"] if p.ndim > 1]
        group["params"] = small
        optimizer.param_groups.append({**group, "params": large, "weight_decay": 0.0})
    _follow_schedule(trainer)


def adam_second_beta(trainer: Any) -> None:
    """AdamW takes its default beta2 of 0.999 instead of 0.95.

    Reference: class of a config key that is not passed on
    Class: C6
    Technique: FSDP 2
    First step: 2
    Signature: the first update is right, the second is not
    Cause: update
    """
    for group in _groups(trainer):
        group["betas"] = (group["betas"][0], 0.999)


def adam_epsilon(trainer: Any) -> None:
    """AdamW takes an epsilon of 1e-4 instead of 1e-8.

    Reference: class of a config key that is not passed on
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: gradients agree, updates do not
    Cause: update
    """
    for group in _groups(trainer):
        group["eps"] = 1e-4


def adam_without_bias_correction(trainer: Any) -> None:
    """AdamW does not correct the bias of its averages, as an optimizer of its own may forget.

    Reference: class of a fused optimizer's missing step count
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: every update shorter by the same factor
    Cause: update
    """
    import torch

    def begun() -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in optimizer.state:
                        optimizer.state[parameter] = {
                            "step": torch.tensor(1e6),
                            "exp_avg": torch.zeros_like(parameter),
                            "exp_avg_sq": torch.zeros_like(parameter),
                        }

    before_update(begun)


def group_rate_a_tenth(trainer: Any) -> None:
    """Norms are in a group of their own, with a tenth of the learning rate.

    Reference: class of a parameter group's own settings
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: updates of norms a tenth as far
    Cause: update
    Says: 0.1
    """
    for group, optimizer in _groups_of(trainer):
        norms = [p for p in group["params"] if p.ndim == 1]
        group["params"] = [p for p in group["params"] if p.ndim > 1]
        optimizer.param_groups.append({**group, "params": norms})
    _follow_schedule(trainer, factor=0.1)


def group_misses_schedule(trainer: Any) -> None:
    """The schedule of the output projection's group is constant: its rate never warms up.

    Reference: class of a parameter group's own settings
    Class: C6
    Technique: FSDP 2
    First step: 1
    Needs: warm-up
    Signature: updates of the output projection are farther
    Cause: update
    Says: times as far
    """
    chosen = {id(p) for _, p in parameters(trainer, "lm_head")}
    for group, optimizer in _groups_of(trainer):
        late = [p for p in group["params"] if id(p) in chosen]
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
        optimizer.param_groups.append({**group, "params": late})
    for scheduler in trainer.lr_schedulers.schedulers:
        scheduler.base_lrs.append(scheduler.base_lrs[0])
        scheduler.lr_lambdas.append(lambda _: 1.0)
        scheduler.optimizer.param_groups[-1]["lr"] = scheduler.base_lrs[0]


def scheduler_stepped_per_microbatch(trainer: Any) -> None:
    """The lr scheduler steps once per microbatch, not per optimizer step.

    Reference: class of the lr schedule restarted after a resume
    Class: C6
    Technique: FSDP 2, gradient accumulation 2
    First step: 6
    Needs: accumulation > 1
    Signature: learning rate off once it decays
    Cause: learning rate
    """
    scheduler = trainer.lr_schedulers
    step = scheduler.step

    def stepping() -> None:
        for _ in range(trainer.gradient_accumulation_steps):
            step()

    scheduler.step = stepping


def warmup_skipped(trainer: Any) -> None:
    """The schedule begins behind its warm-up.

    Reference: class of the lr schedule restarted after a resume
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: learning rate off at step 1
    Cause: learning rate
    """
    for _ in range(2):
        trainer.lr_schedulers.step()


# ------------------------------------------------------------------------------- random


def dropout(trainer: Any) -> None:
    """Dropout done right, for the control: a mask of each sample, whatever rank has it."""
    import zlib

    _drop(trainer, lambda tokens: [zlib.crc32(row.numpy().tobytes()) for row in tokens])


def same_dropout_on_all_ranks(trainer: Any) -> None:
    """All dp ranks draw the same dropout masks: their random states were never set apart.

    Reference: Megatron-LM pull requests 2658 and 4828
    Class: C6
    Technique: FSDP 2, dropout
    First step: 1
    Needs: dropout
    Signature: loss off at step 1
    Cause: forward or objective
    """
    _drop(trainer, lambda tokens: list(range(tokens.shape[0])))


# ------------------------------------------------------------------------------- places


def _skip(stream: Any) -> None:
    stream.consumed += stream.global_batch_size


def _change_batches(trainer: Any, change: Callable[[dict[str, Any], Any], Any]) -> None:
    """Change what comes out of the loader on this rank."""
    loader = trainer.dataloader

    class Changed(type(loader)):  # type: ignore[misc]
        def __iter__(self) -> Any:
            for inputs, labels in super().__iter__():
                yield change(inputs, labels)

    loader.__class__ = Changed


def _after_load(trainer: Any, action: Callable[[], None]) -> None:
    load = trainer.checkpointer.load

    def loading(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        action()
        return loaded

    trainer.checkpointer.load = loading


def _ask_for(trainer: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change under which names this rank asks the checkpoint for its tensors."""
    model = trainer.checkpointer.states["model"]
    states = model._get_state_dict
    model._get_state_dict = lambda: change(states())
    model.cached_state_dict = {}


def _groups(trainer: Any) -> list[dict[str, Any]]:
    return [group for group, _ in _groups_of(trainer)]


def _groups_of(trainer: Any) -> list[tuple[dict[str, Any], Any]]:
    return [(group, each) for each in trainer.optimizers for group in each.param_groups]


def _follow_schedule(trainer: Any, factor: float = 1.0) -> None:
    """Let the scheduler set the rate of the groups that were added last, times ``factor``."""
    for scheduler in trainer.lr_schedulers.schedulers:
        scheduler.base_lrs.append(scheduler.base_lrs[0] * factor)
        scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
        scheduler.optimizer.param_groups[-1]["lr"] *= factor


def _leave_out(trainer: Any, part: str) -> None:
    unknown = {id(parameter) for _, parameter in parameters(trainer, part)}
    for group in _groups(trainer):
        group["params"] = [p for p in group["params"] if id(p) not in unknown]


def _drop(trainer: Any, keys: Callable[[Any], list[int]]) -> None:
    """Dropout after the embeddings, with a mask per row, drawn by the step and the row's key."""
    import torch

    embeddings = trainer.model_parts[0].tok_embeddings
    forward = embeddings.forward

    def dropped(tokens: Any) -> Any:
        hidden = forward(tokens)
        masks = []
        for key in keys(tokens):
            generator = torch.Generator().manual_seed(1_000_003 * trainer.step + key)
            masks.append(torch.rand(hidden.shape[1:], generator=generator) >= DROPPED)
        return hidden * torch.stack(masks) / (1 - DROPPED)

    embeddings.forward = dropped
