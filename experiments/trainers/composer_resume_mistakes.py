"""What people get wrong about Composer when it is resumed on other ranks, one change each.

MISTAKE=batch_kept torchrun --nproc-per-node 2 composer_resume_mistakes.py --data DATA …

None of them raises an error. Mistakes that are another value of an option are not here.
"""

from __future__ import annotations

import os
from typing import Any

from composer_resume import Training, arguments


class WeightsAlone(Training):
    """``load_weights_only``: the count of steps, the schedule and the data start over."""

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"load_weights_only": True}


class DataNotSpun(Training):
    """``spin_dataloaders=False``, because reading what was trained on again took long."""

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"spin_dataloaders": False}


class BatchKept(Training):
    """Each rank's batch stays as it was on two ranks."""

    def batch(self) -> int:
        return self.options.global_batch // 2


class ScheduleByDuration(Training):
    """``max_duration`` ends each part of the training, and so sets the schedule's length, too."""

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"max_duration": f"{self.options.stop_at}ba"}


class LatestLink(Training):
    """``autoresume``, as Composer recommends: it looks for no checkpoint but the latest."""

    def settings(self) -> dict[str, Any]:
        by_link = {"autoresume": True, "save_folder": str(self.options.checkpoints)}
        return super().settings() | {"load_path": None} | by_link


MISTAKES: dict[str, type[Training]] = {
    "weights_alone": WeightsAlone,
    "data_not_spun": DataNotSpun,
    "batch_kept": BatchKept,
    "schedule_by_duration": ScheduleByDuration,
    "latest_link": LatestLink,
}

if __name__ == "__main__":
    MISTAKES[os.environ["MISTAKE"]](arguments().parse_args()).train()
