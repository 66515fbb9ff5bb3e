"""converge's command line as forks of a server, imports done, for tests that call it often.

Its imports are half of what a command on a small matrix costs. Tests of a process' start, of its
end or of what is installed call the real one.
"""

import atexit
import functools
import importlib
import os
import sys
import time
from pathlib import Path

from converge_harness.launch.warm import ServerState, start_server
from converge_harness.rank.start.parent import die_with_parent
from converge_harness.rank.start.warm import Server, leave_imports_at_exit, require_forkable

HERE = Path(__file__).parent
MODULES = (
    *("cli.main", "cli.progress", "cli.verdicts", "history.overview", "history.page"),
    *("judge", "matrix.against", "matrix.judge", "matrix.run", "report"),
)
"""Of ``converge_harness``: what commands import once they know what to do."""


@functools.cache
def warm_python():
    """A stand-in for this Python, as ``warm_python() -m converge_harness run …``.

    Its server starts at the first use in a process that runs tests.
    """
    path = os.pathsep.join(map(str, (HERE.parent / "src", HERE)))
    # A library that starts threads while it is imported could not be forked.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    server = start_server(Path(sys.executable), (), environment, module="warm_converge")
    atexit.register(server.close)
    while server.state() is ServerState.STARTING:
        time.sleep(0.05)
    assert server.state() is ServerState.READY, server.complaint()
    return str(server.python)


def serve(address):
    die_with_parent()
    for name in MODULES:
        importlib.import_module(f"converge_harness.{name}")
    require_forkable()
    leave_imports_at_exit()
    Server(address, {}).serve()


if __name__ == "__main__":
    serve(Path(sys.argv[sys.argv.index("--socket") + 1]))
