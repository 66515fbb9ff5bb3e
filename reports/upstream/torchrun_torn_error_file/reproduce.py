"""torchrun ends instead of restarting its ranks if it stops one that is writing its error file.

``python reproduce.py``. Exit code 1 if torchrun ends with ``--max-restarts=3``. Rank 1 dies of
SIGKILL. Rank 0 fails, too, as ranks do that lose a peer, and ``@record`` writes its error file.
torchrun sees that rank 1 is dead, sends SIGTERM to rank 0, and reads what that has written. The
error here has a long message, so that it is still being written then; with a usual one it is a
race, which torchrun seldom loses.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.errors import record


@record
def train() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        print("restarted", flush=True)
        return
    if os.environ["RANK"] == "0":
        raise RuntimeError("Connection closed by peer" + 50_000_000 * "!")
    written = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "0" / "error.json"
    while not written.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    if "RANK" in os.environ:
        train()
        return 0
    with TemporaryDirectory() as logs:
        torchrun = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node=2", "--max-restarts=3", f"--log-dir={logs}", "--redirects=2"),
                __file__,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    starts = 1 + ("restarted" in torchrun.stdout)
    said = re.findall(r"(?m)^(?:json\.decoder\.)?(JSONDecodeError)", torchrun.stderr)
    print(
        f"exit code of torchrun {torchrun.returncode}, starts of the ranks {starts} of 4, "
        f"its error {said[-1] if said else 'none'}"
    )
    return 1 if torchrun.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
