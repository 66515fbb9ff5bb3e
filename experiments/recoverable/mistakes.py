"""What people forget when they make a training script recoverable, each as one changed method.

MISTAKE=optimizer_not_saved torchrun --nproc-per-node 2 mistakes.py --checkpoints FOLDER

None of them shows before the first resume or fault, except DividedByRanks, which is a mistake of
accumulation.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train import Training, arguments, main


class OptimizerNotSaved(Training):
    """AdamW's moments and step counts start over."""

    def parts(self) -> dict[str, Any]:
        return {name: part for name, part in super().parts().items() if name != "optimizer"}


class ScheduleNotSaved(Training):
    """The optimizer brings the rate of the next step with it; the schedule starts over after it."""

    def parts(self) -> dict[str, Any]:
        return {name: part for name, part in super().parts().items() if name != "schedule"}


class SamplerStartsOver(Training):
    """Batches are counted from the start of the process."""

    skipped = 0

    def load(self, path: Path) -> None:
        super().load(path)
        self.skipped = self.step

    def batch(self, step: int) -> torch.Tensor:
        return super().batch(step - self.skipped)


class RandomNotSaved(Training):
    """Dropout masks are drawn from the seed again."""

    def restore_random(self, states: list[torch.Tensor]) -> None:
        del states


class OneRandomState(Training):
    """Every rank goes on with the random numbers of rank 0, so all of them drop the same units."""

    def restore_random(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])


class RankZeroAloneLoads(Training):
    """As if DDP gave other ranks the optimizer, too, when it wraps a model that rank 0 loaded."""

    def load(self, path: Path) -> None:
        if self.rank == 0:
            super().load(path)
        step = torch.tensor(self.step)
        dist.broadcast(step, src=0)
        self.step = int(step)
        for tensor in self.model.module.state_dict().values():
            dist.broadcast(tensor, src=0)


class ParametersAlone:
    """The state of a model without its buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.named_parameters())

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self.model.load_state_dict(states, strict=False)


class BuffersNotSaved(Training):
    """The running mean of the loss starts over. No loss depends on it."""

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "model": ParametersAlone(self.model.module)}


class WrittenByEveryRank(Training):
    """Every rank writes the checkpoint with its own random numbers; the last one's file stays."""

    def save(self) -> None:
        states = {name: part.state_dict() for name, part in self.parts().items()}
        random = [torch.get_rng_state()] * self.ranks
        self.write({"step": self.step, "random": random, **states}, self.path())
        self.probe.saved(self.step)

    def write(self, states: dict[str, Any], path: Path) -> None:
        half = path.with_suffix(f".{self.rank}")
        torch.save(states, half)
        half.rename(path)


class LastBatchDropped(Training):
    """An epoch ends early if its last batch does not fill every rank, so by how many there are."""

    def steps_of_epoch(self) -> int:
        full, left = divmod(self.args.samples, self.args.global_batch)
        return full + (left >= self.args.micro_batch * self.ranks)


class RateScaledByRanks(Training):
    """The rate was found on two ranks, and is scaled by the number of ranks at a resize."""

    def rate(self, steps: int) -> float:
        return super().rate(steps) * self.ranks / 2


class DividedByRanks(Training):
    """The loss of a microbatch is divided by the number of ranks only, as if all ran at once."""

    def divisor(self, microbatches: int) -> int:
        del microbatches
        return self.ranks


class BatchOfEveryRank(Training):
    """Every rank takes as many samples as ever, so fewer ranks train on fewer samples."""

    def batch(self, step: int) -> torch.Tensor:
        self.args.global_batch = 4 * self.ranks
        return super().batch(step)


class WrittenInPlace(Training):
    """Whoever finds a checkpoint may find half of it."""

    def write(self, states: dict[str, Any], path: Path) -> None:
        torch.save(states, path)


class WrittenByAllAtOnce(Training):
    """No rank asks whether it is the one that writes: all write the same file, in place."""

    def save(self) -> None:
        random: list[Any] = [None] * self.ranks
        dist.all_gather_object(random, torch.get_rng_state())
        states = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({"step": self.step, "random": random, **states}, self.path())
        self.probe.saved(self.step)


class OlderRemovedFirst(Training):
    """To save space, the older checkpoint is removed before the new one is written."""

    def write(self, states: dict[str, Any], path: Path) -> None:
        for older in path.parent.glob("step-*.pt"):
            older.unlink()
        super().write(states, path)


class NanTrainedOn(Training):
    """Clipping divides by the norm, so an update by it makes every parameter NaN."""

    def clip(self) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class SeededMasks(Training):
    """No mistake: dropout has a seed for every step and rank, so that no state need be saved.

    The generators of torch are left as they are.
    """

    def wrapped(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.forward = self.dropped  # type: ignore[method-assign]
        return super().wrapped(model)

    def dropped(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.mask_seed())
            return nn.functional.dropout(tensor, self.args.dropout)

    def mask_seed(self) -> int:
        return 1000 * (self.rank + 1) + self.step


class MasksStartOver(SeededMasks):
    """Their steps are counted from the start of the process."""

    skipped = 0

    def load(self, path: Path) -> None:
        super().load(path)
        self.skipped = self.step

    def mask_seed(self) -> int:
        return super().mask_seed() - self.skipped


class MasksOfOneRank(SeededMasks):
    """The number of the rank comes from the checkpoint, which rank 0 has written."""

    def load(self, path: Path) -> None:
        super().load(path)
        self.mask_seed = lambda: 1000 + self.step  # type: ignore[method-assign]


MISTAKES: dict[str, type[Training]] = {
    "optimizer_not_saved": OptimizerNotSaved,
    "schedule_not_saved": ScheduleNotSaved,
    "sampler_starts_over": SamplerStartsOver,
    "random_not_saved": RandomNotSaved,
    "one_random_state": OneRandomState,
    "rank_zero_alone_loads": RankZeroAloneLoads,
    "buffers_not_saved": BuffersNotSaved,
    "written_by_every_rank": WrittenByEveryRank,
    "last_batch_dropped": LastBatchDropped,
    "rate_scaled_by_ranks": RateScaledByRanks,
    "divided_by_ranks": DividedByRanks,
    "batch_of_every_rank": BatchOfEveryRank,
    "written_in_place": WrittenInPlace,
    "written_by_all_at_once": WrittenByAllAtOnce,
    "older_removed_first": OlderRemovedFirst,
    "nan_trained_on": NanTrainedOn,
    "none_seeded_masks": SeededMasks,
    "masks_start_over": MasksStartOver,
    "masks_of_one_rank": MasksOfOneRank,
}

if __name__ == "__main__":
    main(MISTAKES[os.environ["MISTAKE"]], arguments().parse_args())
