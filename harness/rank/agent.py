"""``python -m harness.rank.agent TORCHRUN-ARGUMENTS``: torchrun that dies with its starter.

Two things that ``python -m torch.distributed.run`` does not do: end when the harness that started
it is killed, and leave in ``$CONVERGE_FAILURES`` (a JSON file) how each rank failed, where
torchrun only prints it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from harness.rank.parent import PARENT_VARIABLE, die_with_parent

FAILURES_VARIABLE = "CONVERGE_FAILURES"


def main(arguments: list[str]) -> int:
    die_with_parent()
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # asks ranks for their stacks (harness.rank.entry)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks' parent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        _write_failures(error)
        print(error, file=sys.stderr)
        return 1
    return 0


def _write_failures(error: object) -> None:
    """``{"failures": [{"rank", "exitcode", "timestamp", "error_file"}]}``, seconds since 1970."""
    path = os.environ.get(FAILURES_VARIABLE)
    if path is None:
        return
    failures = [
        {
            "rank": rank,
            "exitcode": failure.exitcode,
            "timestamp": failure.timestamp,
            "error_file": failure.error_file,
        }
        for rank, failure in error.failures.items()  # type: ignore[attr-defined]
    ]
    Path(path).write_text(json.dumps({"failures": failures}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
