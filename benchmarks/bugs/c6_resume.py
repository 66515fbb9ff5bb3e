"""C6, later than the first steps: what a resume in the middle of a run loses."""

from __future__ import annotations

from typing import Any

from dropout import SEED, STATE, dropout
from places import coordinate, local
from resuming import States, optimizer_states, resume


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
