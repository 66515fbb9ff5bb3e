"""The training loop, as Megatron-LM's ``pretrain_gpt.py`` and ``train_step`` have it.

An injected function gets the ``MegatronTrainer``: it may replace any method or part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from converge_harness.rank.data_order import Sample, SampleStream
from converge_harness.rank.megatron.config import MegatronConfig
from converge_harness.rank.megatron.model import Wrapped
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX


def mask_across_documents(positions: torch.Tensor) -> torch.Tensor:
    """What no token attends to: later tokens, and those of other documents.

    As Megatron-LM's ``--reset-attention-mask`` has it. Rotary positions need no reset: scores
    depend on distances alone.

    Args:
        positions: shape (batch, sequence), the place of each token within its document.

    Returns:
        Shape (batch, 1, queries, keys), bool.
    """
    here = torch.arange(positions.shape[1], device=positions.device)
    begins = here - positions
    return ((here[:, None] < here) | (begins[:, :, None] != begins[:, None]))[:, None]


class MegatronTrainer:
    """One rank of a training run."""

    def __init__(
        self,
        config: MegatronConfig,
        parts: list[Wrapped],
        optimizer: Any,
        schedule: OptimizerParamScheduler,
        stream: SampleStream,
        device: torch.device,
    ) -> None:
        self.config = config
        self.parts = parts
        """The model chunks of this rank, in DDP or FSDP."""
        self.optimizer = optimizer
        """Megatron-Core's ``ChainedOptimizer``."""
        self.schedule = schedule
        self.stream = stream
        self.batches = iter(stream)
        self.device = device
        """Where this rank computes."""
        self.step = 0
        """The last step that ended."""

    @property
    def has_last_stage(self) -> bool:
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def train(self, after_step: Callable[[int], None]) -> None:
        """All steps of the job; ``after_step`` is called with each that has ended."""
        for part in self.parts:
            part.train()
        while self.step < self.config.tables.training.steps:
            self.train_step()
            self.step += 1
            after_step(self.step)

    def train_step(self) -> None:
        """Forward and backward passes of all microbatches, then the update."""
        losses = self.forward_backward()
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(1)
        self.log(self.mean_loss(losses), None if grad_norm is None else float(grad_norm))

    def forward_backward(self) -> list[dict[str, torch.Tensor]]:
        """What the loss function left for the log, per microbatch; nothing on earlier stages."""
        sizes = self.config.tables.training
        for part in self.parts:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        microbatches = [
            Sample(*(each.to(self.device) for each in next(self.batches)))
            for _ in range(self.config.microbatches)
        ]
        found: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=[iter(microbatches) for _ in self.parts],
            model=self.parts,
            num_microbatches=self.config.microbatches,
            seq_length=sizes.seq_len,
            micro_batch_size=sizes.local_batch_size,
            decoder_seq_length=sizes.seq_len,
            forward_only=False,
        )
        return found

    def forward_step(self, batches: Iterator[Sample], part: Wrapped) -> Any:
        """A model chunk's output for the next microbatch, and the function that makes it a loss."""
        sample = next(batches)
        positions = torch.arange(sample.inputs.shape[1], device=self.device)
        counted = sample.labels != IGNORE_INDEX
        # The loss of what does not count is masked, so its label may be any.
        labels = sample.labels.where(counted, 0)
        resets = self.config.tables.training.reset_attention_mask
        mask = mask_across_documents(sample.positions) if resets else None
        output = part(sample.inputs, positions.expand_as(sample.inputs), mask, labels=labels)
        return output, partial(self.loss_function, counted)

    def loss_function(
        self, counted: torch.Tensor, losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The summed loss, how many tokens it is of, and both for the log."""
        loss = (losses.float() * counted).sum()
        tokens = counted.sum().to(torch.int)
        # The schedule divides the loss in place, so the log needs a copy.
        logged = torch.stack([loss.detach().clone(), tokens.float()])
        return loss, tokens, {"lm loss": logged}

    def mean_loss(self, losses: list[dict[str, torch.Tensor]]) -> float | None:
        """The mean over all tokens of the step; None on ranks without the last stage.

        Collective over the data-parallel ranks of the last stage.
        """
        if not losses:
            return None
        summed = torch.stack([each["lm loss"] for each in losses]).sum(0)
        dist.all_reduce(summed, group=parallel_state.get_data_parallel_group())
        return float(summed[0] / summed[1])

    def log(self, loss: float | None, grad_norm: float | None) -> None:
        """Print what Megatron-LM's console has of a step."""
        if loss is not None and parallel_state.get_data_parallel_rank() == 0:
            print(f"iteration {self.step + 1} | lm loss: {loss:.6E} | grad norm: {grad_norm}")
