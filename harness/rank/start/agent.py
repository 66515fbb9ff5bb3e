"""``python -m converge_harness.rank.start.agent ARGUMENTS``: torchrun that dies with its starter.

Some things that ``python -m torch.distributed.run`` does not do: keep the store of ranks on this
machine to loopback, make a new one for ranks that are started again, end when the converge that
started it is killed, leave in ``$CONVERGE_FAILURES`` (a JSON file) how each rank failed, where
torchrun only prints it, wait with the rendezvous for the agents of the nodes that are to start
together (``$CONVERGE_TOGETHER``), rendezvous without delay in a process with many modules, and
outlive a rank's error file that is not whole.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from converge_harness.rank.start.loopback import listen_on_loopback
from converge_harness.rank.start.parent import die_with_parent
from converge_harness.run_folder.failures import FailureDocument, write_failures
from converge_harness.run_folder.layout import (
    FAILURES_VARIABLE,
    PARENT_VARIABLE,
    TOGETHER_VARIABLE,
    read_together,
)

_POLL_SECONDS = 0.02


def main(arguments: list[str]) -> int:
    die_with_parent()
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # asks ranks for their stacks (converge_harness.rank.start.entry)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks' parent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    listen_on_loopback()
    _renew_store()
    _quicken_rendezvous()
    _outlive_torn_error_files()
    _wait_for_others()
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        _write_failures(error)
        print(error, file=sys.stderr)
        return 1
    return 0


def _renew_store() -> None:
    """Give restarted ranks a new store, as torch intends.

    torch (to 2.15 at least) makes one at the first rendezvous and keeps it. A rank that is quicker
    than rank 0 then finds where rank 0 listened before it was started again, cannot connect, and
    ends, until no restart is left (pytorch issue 135712).
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    meet = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(handler: Any) -> Any:
        handler._bootstrap_store_info = handler._shared_tcp_store_server = None
        return meet(handler)

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous


def _quicken_rendezvous() -> None:
    """Name the callers of rendezvous actions without ``inspect.stack()``.

    torch 2.13 (``dynamic_rendezvous.get_method_name``) calls it for every action, between reading
    the shared state and writing it back if nobody else has meanwhile. It looks through all modules
    of the process, which takes a fork of the warm server some 0.5 s: heartbeats of other nodes
    then win every time, and a node that wants to join may never get in, or miss the last call.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _outlive_torn_error_files() -> None:
    """Take a rank's error file that is not whole for none.

    When a rank dies, torchrun sends SIGTERM to the others, which are then writing down that they
    have lost it. torch (to 2.15 at least, ``ProcessFailure.__post_init__``) reads what they have
    written, and ends with the error of the JSON parser instead of starting the ranks again
    (``reports/upstream/torchrun_torn_error_file``).
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    read = ProcessFailure.__post_init__

    def read_if_whole(failure: Any) -> None:
        try:
            json.loads(Path(failure.error_file).read_bytes())
        except (OSError, ValueError):
            failure.error_file = ""
        read(failure)

    ProcessFailure.__post_init__ = read_if_whole  # type: ignore[method-assign]


def _wait_for_others() -> None:
    """Enter the rendezvous together with the other agents, whenever their imports end.

    torchrun's own last call would have to outlast that, and be waited out after every loss. The
    harness ends an agent that waits for one that has ended, or until the start-up timeout.
    """
    value = os.environ.get(TOGETHER_VARIABLE)
    if not value:
        return
    own, others = read_together(value)
    own.touch()
    while not all(other.exists() for other in others):
        time.sleep(_POLL_SECONDS)


def _write_failures(error: object) -> None:
    path = os.environ.get(FAILURES_VARIABLE)
    if path is None:
        return
    failures: list[FailureDocument] = [
        {
            "rank": rank,
            "exitcode": failure.exitcode,
            "timestamp": failure.timestamp,
            "error_file": failure.error_file,
        }
        for rank, failure in error.failures.items()  # type: ignore[attr-defined]
    ]
    write_failures(Path(path), failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
