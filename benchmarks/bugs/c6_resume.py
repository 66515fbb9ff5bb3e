"""C6 and whatever else begins after step 2: state lost at a resume, and what is scheduled."""

from __future__ import annotations

import math
from typing import Any

import torch
from dropout import SEED, STATE, dropout
from places import before_clipping, before_step, coordinate, local, parameters, scale_gradients
from resuming import States, after_step, load, optimizer_states, resume, save


def optimizer_state_not_loaded(trainer: Any) -> None:
    """The optimizer starts afresh at a resume: checkpoint.exclude_from_loading names it.

    Reference: class of Megatron-LM --no-load-optim, torchtitan checkpoint.exclude_from_loading
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: step 6 agrees, its update does not; counters of optimizer steps are 5 too small
    Cause: state lost
    Says: optimizer
    """
    resume(trainer, 6, without=["optimizer"])


def adam_steps_not_loaded(trainer: Any) -> None:
    """Moments are loaded and the step counters are not, so bias is corrected once more.

    Reference: class of torchtitan checkpoint.exclude_from_loading
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: step 6 agrees, its update does not; counters of optimizer steps are 5 too small
    Cause: state lost
    Says: optimizer
    """

    def lose_steps() -> None:
        for _, state in optimizer_states(trainer):
            state["step"].zero_()

    resume(trainer, 6, after_loading=lose_steps)


def first_moments_swapped(trainer: Any) -> None:
    """The first moments of two matrices of one shape are loaded into each other's place.

    Reference: class of Megatron-LM issue 7452, finding 12
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: the update of these two matrices alone differs, with norms of moments exchanged
    Cause: state lost
    Says: optimizer
    """

    def swap() -> None:
        gate, up = (
            dict(optimizer_states(trainer, f"layers.2.feed_forward.{name}."))
            for name in ("w1", "w3")
        )
        (one,), (other,) = gate.values(), up.values()
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

    resume(trainer, 6, after_loading=swap)


def second_moments_not_loaded(trainer: Any) -> None:
    """The second moments alone are zero after a resume, so its first updates are too long.

    Reference: class of torchtitan checkpoint.exclude_from_loading
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: step 6 agrees, its update is several times too long; second moments too small
    Cause: state lost
    Says: optimizer
    """

    def lose_squares() -> None:
        for _, state in optimizer_states(trainer):
            local(state["exp_avg_sq"]).zero_()

    resume(trainer, 6, after_loading=lose_squares)


def stage_optimizer_not_loaded(trainer: Any) -> None:
    """Optimizer states of two stages collide in the checkpoint, so that of the second is lost.

    Reference: torchtitan components/checkpointer/dcp.py (why optimizer states are flattened)
    Class: C6
    Technique: PP 2, 1F1B, resume
    First step: 6
    Signature: step 6 agrees, the updates of the second stage's parameters do not
    Cause: state lost
    Says: optimizer
    """

    def lose_stage() -> None:
        if coordinate(trainer, "pp") == 1:
            for _, state in optimizer_states(trainer):
                for tensor in state.values():
                    local(tensor).zero_()

    resume(trainer, 6, after_loading=lose_stage)


def warm_up_restarted(trainer: Any) -> None:
    """The lr schedule starts over at a resume: the warm-up comes once more, the decay late.

    Reference: class of torchtitan checkpoint.exclude_from_loading
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: the learning rate of step 6 is that of step 1
    Cause: learning rate
    Says: started over | resume
    """
    resume(trainer, 6, without=["lr_scheduler"])


def loader_started_over(trainer: Any) -> None:
    """The loader's state is not loaded, so the data starts over at a resume.

    Reference: torchtitan's own loader, whose state differs with the data-parallel degree
    Class: C6
    Technique: FSDP 2, resume
    First step: 12
    Signature: the samples of step 12 are those of step 1
    Cause: data
    Says: started over
    """
    resume(trainer, 12, without=["dataloader"])


def loader_of_rank_0_everywhere(trainer: Any) -> None:
    """After a resume every data-parallel rank reads what rank 0 reads.

    Reference: class of accelerate issue 4204
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: the samples of step 6 are not the control's; half of them come twice
    Cause: data
    """
    resume(trainer, 6, after_loading=lambda: setattr(trainer.dataloader._stream, "dp_rank", 0))


def dropout_reseeded(trainer: Any) -> None:
    """The random numbers of dropout start over at a resume.

    Reference: Megatron-LM pull requests 2658 and 4828
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Needs: dropout
    Signature: loss and gradients of step 6 differ from the same weights and samples
    Cause: state lost
    Says: RNG
    """
    generator = dropout(trainer)
    resume(trainer, 6, without=[STATE], before_loading=lambda: generator.manual_seed(SEED))


def weights_of_an_older_checkpoint(trainer: Any) -> None:
    """The weights are those of step 4 and all else is that of step 5: a rank saved too early.

    Reference: class of asynchronous checkpointing that copies while training goes on
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: the loss of step 6 is too high from right data; one update is missing in all weights
    Cause: state lost
    Says: weights | parameters
    """
    after_step(trainer, 4, lambda: save(trainer, 4))
    others = [name for name in trainer.checkpointer.states if name != "model"]
    resume(trainer, 6, after_loading=lambda: load(trainer, 4, without=others))


def weights_rounded_to_bf16(trainer: Any) -> None:
    """Weights went through bfloat16 at a resume, as checkpoint.export_dtype writes them.

    Reference: class of torchtitan checkpoint.last_save_model_only with export_dtype
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: the loss of step 6 is off by little; every weight by about 0.1% of itself
    Cause: state lost
    Says: weights | parameters
    """

    def rounded(states: States) -> States:
        return {
            name: value.bfloat16().float() if isinstance(value, torch.Tensor) else value
            for name, value in states.items()
        }

    resume(trainer, 6, written=rounded)


def layers_swapped(trainer: Any) -> None:
    """Layers 1 and 2 change places at a resume: stages disagree about the layers' numbers.

    Reference: Megatron-LM issue 7452, finding 12
    Class: C6
    Technique: PP 2, 1F1B, resume
    First step: 6
    Signature: the loss of step 6 jumps; the weights of two layers are each other's
    Cause: state lost
    Says: weights | parameters
    """
    other = {"layers.1.": "layers.2.", "layers.2.": "layers.1."}

    def renamed(states: States) -> States:
        return {other.get(name[:9], name[:9]) + name[9:]: states[name] for name in states}

    resume(trainer, 6, written=renamed)


def tensor_not_loaded(trainer: Any) -> None:
    """One matrix is not in the checkpoint and stays as it was initialised; nobody is strict.

    Reference: torchtitan components/checkpointer/base.py (load_state_dict with strict=False)
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: the loss of step 6 jumps; one matrix is far from where it was
    Cause: state lost
    Says: layers.1.feed_forward.w2
    """
    missing = "layers.1.feed_forward.w2.weight"
    resume(
        trainer,
        6,
        read=lambda states: {name: states[name] for name in states if name != missing},
    )


def frozen_from_step_5(trainer: Any) -> None:
    """The embeddings drop out of the optimizer's list when a schedule unfreezes other parts.

    Reference: class of torchtitan issue 3686
    Class: C6
    Technique: FSDP 2
    First step: 5
    Signature: step 5 agrees; one parameter has a gradient and does not move any more
    Cause: parameters do not move | update
    Says: tok_embeddings
    """

    def drop() -> None:
        ((_, embeddings),) = parameters(trainer, "tok_embeddings")
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not embeddings]

    before_step(trainer, 5, drop)


def gradients_kept_once(trainer: Any) -> None:
    """One step does not set gradients to zero, so those of the step before are added.

    Reference: class of accelerate's skipped steps, where zero_grad is skipped with the update
    Class: C6
    Technique: FSDP 2
    First step: 7
    Signature: the grad norm of step 7 alone jumps from a right loss; then all is nearly right
    Cause: one step | state lost
    """
    zero_grad = trainer.optimizers.zero_grad

    def forgetful(*arguments: Any, **options: Any) -> None:
        if trainer.step != 7:
            zero_grad(*arguments, **options)

    trainer.optimizers.zero_grad = forgetful


def gradients_doubled_from_step_9(trainer: Any) -> None:
    """A loss scale that is raised at step 9 is not taken out of the gradients any more.

    Reference: class of torchtitan issue 2972
    Class: C1
    Technique: FSDP 2
    First step: 9
    Signature: from step 9 on the grad norm is twice the control's while the loss agrees
    Cause: gradient scale
    Says: 2
    """

    def scale() -> None:
        if trainer.step >= 9:
            scale_gradients(trainer, 2.0)

    before_clipping(scale)


def clipping_off_from_step_6(trainer: Any) -> None:
    """Gradients are not clipped any more from step 6 on.

    Reference: class of DeepSpeed issue 1801
    Class: C1
    Technique: FSDP 2
    First step: 6
    Needs: clipping active
    Signature: step 6 agrees, its update does not; norms after clipping are those before it
    Cause: update
    Says: clip
    """
    before_step(trainer, 6, lambda: setattr(trainer.config.training, "max_norm", math.inf))
