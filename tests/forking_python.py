"""A stand-in for a toolchain's Python whose programs are forks of a server, imports done.

Importing torch takes most of the time of a short job. The numbers are the same
(``tests/launch/test_warm_numbers.py``).
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

from converge_harness.launch.warm import ServerState, start_server

HERE = Path(__file__).parent


@contextmanager
def forking_python(python, *folders, dialect=None):
    """Yield its path; ``folders`` are searched for the modules that the forks run."""
    path = os.pathsep.join(map(str, (HERE.parent / "src", HERE, *folders)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    arguments = ("--dialect", dialect) if dialect else ()
    server = start_server(python, arguments, environment, module="forking_server")
    try:
        while server.state() is ServerState.STARTING:
            time.sleep(0.05)
        assert server.state() is ServerState.READY, server.complaint()
        yield server.python
    finally:
        server.close()
