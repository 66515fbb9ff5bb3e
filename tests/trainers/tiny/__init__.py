"""A whole trainer in one folder: linear regression by one process, which leaves a curve.

``register("tiny", "tiny")`` makes it known. As TOML::

    [trainer]
    kind = "tiny"
    rate = 0.1                       # its own key: the learning rate
    [trainer.config]
    training = { steps = 20, local_batch_size = 2 }
    mistake = "none"
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from converge_harness.model import TrainerSpec
from converge_harness.trainers import CurveFile, InlineTable, SourceFile, Trainer, TrainerOfFile

LOOP = Path(__file__).parent / "loop.py"
CURVE = "curve.csv"


class TinyTable(InlineTable):
    """``[trainer]`` of it."""

    kind: str = "tiny"
    rate: float = 0.1


@dataclass(frozen=True)
class TinySettings:
    rate: float


class Tiny(Trainer):
    """What converge asks of it; everything else is as by default."""

    kind = "tiny"
    table = TinyTable

    def of_file(self, table, where, folders, problems):
        settings = TinySettings(table.rate)
        return TrainerOfFile(TrainerSpec(self.kind, settings=settings), sys.executable)

    def identity(self, spec, surroundings):
        digests = [surroundings.sources[LOOP]]
        return {"trainer": self.kind, "rate": spec.trainer.settings.rate, "sources": digests}

    def sources(self, spec):
        return (SourceFile(LOOP, LOOP.parent, "kind"),)

    def argv(self, job, folder, options):
        chosen = {
            "ranks": job.world_size,
            "batch": job.local_batch_size,
            "steps": job.steps,
            "seed": job.seed,
            "rate": job.spec.trainer.settings.rate,
            "mistake": job.spec.setting("mistake"),
            "curve": folder / CURVE,
        }
        arguments = (f"--{name}={value}" for name, value in chosen.items())
        return (str(job.toolchain.python), str(LOOP), *arguments)

    def curve(self, job, folder):
        return folder / CURVE

    def curve_of(self, folder, job):
        return CurveFile(folder / CURVE, {})

    def is_complete(self, job, folder):
        return (folder / CURVE).is_file()


TRAINER = Tiny()
