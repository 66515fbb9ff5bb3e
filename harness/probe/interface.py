"""What a training program calls. Without ``$CONVERGE_JOB`` nothing else is imported or done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from converge_harness.run_folder.layout import JOB_VARIABLE

if TYPE_CHECKING:
    import torch

    from converge_harness.probe.loop import ProbedLoop


def initial_weights(model: torch.nn.Module) -> None:
    """Let the harness move the initial weights, before anything wraps the model.

    An ``ulp`` repeat of the control starts from weights that are moved by one unit in the last
    place each; in every other run this does nothing. Call it on every rank, once the model has its
    weights. ``Probe.from_env`` does it by itself but for ZeRO.

    Raises ProbeError for a model on the meta device, and when called twice.
    """
    path = os.environ.get(JOB_VARIABLE)
    if path:
        from converge_harness.probe.starting_weights import move_initial_weights

        move_initial_weights(model, path)


class Probe:
    """Leaves the evidence of a training loop; does nothing where the harness does not run it."""

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
        hooks: bool = False,
        dp_rank: int | None = None,
        dp_degree: int | None = None,
    ) -> Probe:
        """The probe of the job that ``$CONVERGE_JOB`` names. Collective over the world.

        Call it once the model is wrapped and has its weights, and before the first step.

        Args:
            model: a plain module, or one wrapped by DDP, FSDP 1, FSDP 2 or ``torch.compile``, or a
                DeepSpeed engine.
            optimizer: a ``torch.optim.Optimizer``, a wrapper that has one as ``optimizer``, or a
                list of them; not needed with a DeepSpeed engine.
            hooks: the optimizer's own hooks end every step, and the model's calls in training are
                the batches unless ``batch`` is called: for loops that cannot be edited.
            dp_rank: which part of the global batch this rank trains on; needed only where several
                ranks share one and mesh dimensions have no names that say so.
            dp_degree: how many parts there are.

        Raises ProbeError when the job, the model or the world cannot be probed.
        """
        path = os.environ.get(JOB_VARIABLE)
        if not path:
            return cls()
        from converge_harness.probe.loop import ProbedLoop

        return cls(
            ProbedLoop(path, model, optimizer, hooks=hooks, dp_rank=dp_rank, dp_degree=dp_degree)
        )

    def batch(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Say which samples a microbatch has, on every rank that trains on them. No collective.

        Args:
            inputs: shape (batch, …); integers count by value, other numbers by their bits.
            labels: shape (batch, …), as the loss has them: -100 is no target. Without them every
                token of integer inputs is one, and every sample of others.
            mask: shape of the leading dimensions of ``inputs``, zero at padding, which is then no
                part of the samples.
        """
        if self._loop is not None:
            self._loop.batch(inputs, labels, mask)

    def logits(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Let the probe compute the cross entropy again, in float64. No collective.

        Args:
            logits: shape (…, classes), of a microbatch; a DTensor may be sharded by classes.
            labels: shape (…), integers, shifted as the loss has them; -100 is no target.
        """
        if self._loop is not None:
            self._loop.logits(logits, labels)

    def gradients(self) -> None:
        """Take the gradients as they are now: complete, reduced, not yet clipped.

        Needed only where neither torch nor the framework clips them. No collective, unless
        gradients are partial sums.
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

        After the update and before gradients are set to zero, if their clipped norm is to be told.
        With ``hooks`` it is called before the update, only notes its arguments, and may be left
        out.

        Args:
            loss: of the whole step: the mean over this rank's tokens, or over all ranks'. The
                ranks' are averaged by their tokens; None where a rank has none.
            grad_norm: that the program reports.

        Raises ProbeError without a ``batch`` in the step, for more steps than the job has, and
        when the model's parameters are other tensors by now.
        """
        if self._loop is not None:
            self._loop.step(loss, grad_norm)

    def close(self) -> None:
        """Take all hooks off, as happens by itself after the job's last step.

        A run that is closed before that is not complete, and the harness says so.
        """
        if self._loop is not None:
            self._loop.close()
