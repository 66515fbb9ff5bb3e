"""What a training program calls. Does and imports nothing without ``$CONVERGE_JOB``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from converge_harness.run_folder.layout import JOB_VARIABLE

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from converge_harness.probe.loop import ProbedLoop


def initial_weights(model: torch.nn.Module) -> None:
    """Let converge move the initial weights, before anything wraps the model.

    An ``ulp`` repeat of the control starts from weights that are each moved by one unit in the last
    place; in every other run this does nothing. Call it on every rank, once the model has its
    weights. ``Probe.from_env`` does it by itself, except with ZeRO.

    Raises ProbeError for a model on the meta device, and when called twice.
    """
    path = os.environ.get(JOB_VARIABLE)
    if path:
        from converge_harness.probe.starting_weights import move_initial_weights

        move_initial_weights(model, path)


def load_seed_checkpoint(model: torch.nn.Module) -> None:
    """Load the checkpoint of another trainer's model, from which this run has to start.

    For sets of a ``[trainers.NAME]`` with ``weights``, a file with the names that the checkpoint
    has for the parameters (docs/across_frameworks.md). Call it on every rank before anything wraps
    the model; collective over the world. Without ``$CONVERGE_JOB`` it does nothing.

    Raises ProbeError unless every parameter of the model has a tensor of its shape in the
    checkpoint, and every weight there a parameter.
    """
    path = os.environ.get(JOB_VARIABLE)
    if path:
        from converge_harness.probe.seed_weights import load_seed_weights

        load_seed_weights(model, path)


class Probe:
    """Records the evidence of a training loop; does nothing unless converge runs the program."""

    __slots__ = ("_loop",)

    def __init__(self, loop: ProbedLoop | None = None) -> None:
        """Use ``from_env``."""
        self._loop = loop

    @classmethod
    def from_env(
        cls,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        schedule: Any = None,
        hooks: bool = False,
        activations: bool = True,
        dp_rank: int | None = None,
        dp_degree: int | None = None,
    ) -> Probe:
        """The probe for the job in ``$CONVERGE_JOB``. Collective over the world.

        Call it once the model is wrapped and has its weights, and before the first step.

        Args:
            model: a plain module, or one wrapped by DDP, FSDP 1, FSDP 2 or ``torch.compile``, or a
                DeepSpeed engine.
            optimizer: a ``torch.optim.Optimizer``, a wrapper that has one as ``optimizer``, or a
                list of them; not needed with a DeepSpeed engine.
            schedule: the learning-rate schedule, one of ``torch.optim.lr_scheduler`` or DeepSpeed,
            or a wrapper that has one as ``scheduler``. Only resumed runs use it: at a load it has
            to have made as many steps as at the save. Without it, a schedule that was not restored
            shows only where the rate differs.
            hooks: for loops that cannot be edited: hooks of the optimizer end every step, and the
            model's inputs in training are the batches unless ``batch`` is called.
            activations: look at what modules compute in the first step, by hooks of theirs, so that
            a FAIL can name the module that is wrong first. Nothing is looked at in a model that is
            compiled as a whole.
            dp_rank: which part of the global batch this rank trains on; needed only if several
            ranks share one and the names of mesh dimensions do not show it.
            dp_degree: how many parts there are.

        Raises ProbeError when the job, the model or the world cannot be probed.
        """
        path = os.environ.get(JOB_VARIABLE)
        if not path:
            return cls()
        from converge_harness.probe.loop import ProbedLoop

        return cls(
            ProbedLoop(
                path,
                model,
                optimizer,
                schedule=schedule,
                hooks=hooks,
                activations=activations,
                dp_rank=dp_rank,
                dp_degree=dp_degree,
            )
        )

    def loaded(self, step: int) -> None:
        """Say from where training goes on, before the first step, on every rank. Collective.

        The restored parameters and optimizer states are recorded as they are now, so call it after
        everything that loads or changes them. Needed where runs are resumed only. In any other
        run it only checks that the step is 0: weights that such a run loads are its initial
        ones.

        Args:
            step: the last step that the loaded checkpoint has; 0 if there is none, and training
            starts from its initial weights.

        Raises ProbeError after a step has begun, when called twice, and for a step that this run
        cannot have.
        """
        if self._loop is not None:
            self._loop.loaded(step)

    def saved(self, step: int, *, written: Future[Any] | None = None) -> None:
        """Say that the checkpoint of a step has been written, on every rank. Collective.

        What is recorded are parameters and optimizer states as they are now, so call it right after
        the checkpoint was written, before the next step. Ignored where nothing resumes.

        Args:
            step: the last step that the checkpoint has.
            written: of a checkpoint that is written while training goes on, as by
            ``torch.distributed.checkpoint.async_save``: a future that is done once it is complete.
            Rank 0's counts. None: it is complete now.

        Raises ProbeError for another step than the one that ended last; on rank 0, if there is no
        such checkpoint where ``[trainer.checkpoints]`` of the experiment says (with ``written`` the
        next step raises it); and if a fault of
        the experiment should have broken off the writing, and could not.
        """
        if self._loop is not None:
            self._loop.saved(step, written)

    def batch(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Record the samples of a microbatch, on every rank that trains on them. No collective.

        Args:
            inputs: shape (batch, …); integers count by value, other numbers by their bits.
            labels: shape (batch, …), as in the loss: -100 means no target. Without labels, every
            token of integer inputs counts as a target, and every sample of other inputs.
            mask: shape of the leading dimensions of ``inputs``, zero at padding, which is ignored.
        """
        if self._loop is not None:
            self._loop.batch(inputs, labels, mask)

    def logits(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Let the probe recompute the cross entropy in float64. No collective.

        Args:
            logits: shape (…, classes), of a microbatch; a DTensor may be sharded by classes.
            labels: shape (…), integers, shifted as in the loss; -100 means no target.
        """
        if self._loop is not None:
            self._loop.logits(logits, labels)

    def terms(self, weights: torch.Tensor, labels: torch.Tensor, **terms: torch.Tensor) -> None:
        """Show what the objective of a microbatch is made of, token by token. No collective.

        Optional: a FAIL then names the first term that differs, or how tokens are weighed
        otherwise. It is used where ``logits`` is called, too, because a term may be wrong for wrong
        scores alone.

        Args:
            weights: shape (batch, length), the share of every token in the loss that this rank
            does backward through; zero for tokens that do not count.
            labels: of the same shape, as in ``batch``.
            terms: what is weighed and what that is made of, in the order in which it is computed;
            each of the shape of ``weights``, or of its leading dimensions.

        Raises ProbeError for other shapes, and for DTensors.
        """
        if self._loop is not None:
            self._loop.terms(weights, labels, terms)

    def gradients(self) -> None:
        """Record the current gradients: complete, reduced, not yet clipped.

        Needed only if neither torch nor the framework clips them. No collective, unless gradients
        are partial sums.
        """
        if self._loop is not None:
            self._loop.gradients()

    def step(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
    ) -> None:
        """End an optimizer step, on every rank. Collective over the world.

        Call it after the update and, for the norm of clipped gradients, before they are set to
        zero. With ``hooks``, call it before the update; it only stores its arguments, and may be
        left out.

        Args:
            loss: the mean loss of the whole step, over this rank's tokens or over all ranks'. The
            ranks' losses are averaged with their tokens as weights; None if a rank has none.
            grad_norm: as the program reports it.

        Raises ProbeError without a ``batch`` in the step, for more steps than the job has, when the
        model's parameters have been replaced by other tensors, and outside of the main thread if a
        fault of the experiment is to break off the checkpoint of this step.
        """
        if self._loop is not None:
            self._loop.step(loss, grad_norm)

    def close(self) -> None:
        """Remove all hooks, as happens automatically after the job's last step.

        A run that is closed earlier is not complete, and converge reports that.
        """
        if self._loop is not None:
            self._loop.close()
