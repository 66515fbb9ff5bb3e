"""``experiments/recoverable`` that stands still in its first start until Slurm ends it.

It takes its checkpoint from $RESUME_FROM, where it also finds one itself; without it, that one.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "recoverable"))

from mistakes import MISTAKES
from train import Training, arguments, main


def held(kind):
    class Held(kind):
        def load(self, path):
            assert path.exists()
            super().load(Path(os.environ.get("RESUME_FROM", path)))

        def train_step(self):
            run = self.args.checkpoints.parent
            if str(self.step + 1) == os.environ["HOLD"] and not (run / "passes" / "002").exists():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                (run / "holding").touch()
                time.sleep(600)
            super().train_step()

    return Held


if __name__ == "__main__":
    main(held({"none": Training, **MISTAKES}[os.environ["MISTAKE"]]), arguments().parse_args())
