"""``composer_resume.py`` of experiments/trainers that stands still in its first start."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "trainers"))

import composer_resume


class Held(composer_resume.StopAfter):
    def batch_start(self, state, _logger):
        step = int(state.timestamp.batch) + 1
        if step == int(os.environ["HOLD"]) and not (RUN / "passes" / "002").exists():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            (RUN / "holding").touch()
            time.sleep(600)


if __name__ == "__main__":
    options = composer_resume.arguments().parse_args()
    RUN = options.checkpoints.parent
    composer_resume.StopAfter = Held
    composer_resume.Training(options).train()
