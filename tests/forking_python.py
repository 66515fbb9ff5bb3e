"""A stand-in for a toolchain's Python whose programs are forks of a server, imports done.

Importing torch takes most of the time of a short job. The numbers are the same
(``tests/launch/test_warm_numbers.py``).
"""

import os
import shlex
import time
from contextlib import contextmanager
from pathlib import Path

from converge_harness.launch.warm import ServerState, start_server

HERE = Path(__file__).parent
STAND_IN = """#!/bin/sh
# A rank of torchrun inherits the variable of its agent, whose parent it names.
[ -z "$CONVERGE_PARENT" ] || export CONVERGE_PARENT=$PPID
for first in "$@"; do [ "$first" = -u ] || break; done
case "$first" in
  -m | [!-]*) exec {fork} -m forked_program "$@" ;;
  *) exec {real} "$@" ;;
esac
"""
"""Other options, such as ``-c`` or ``-I``, are for the interpreter: it starts as always."""


@contextmanager
def forking_python(python, *folders, dialect=None):
    """Yield its path; ``folders`` are searched for the modules that the forks run.

    Without a dialect the forks have only torch imported.
    """
    path = os.pathsep.join(map(str, (HERE.parent / "src", HERE, *folders)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    arguments = ("--dialect", dialect) if dialect else ()
    server = start_server(python, arguments, environment, module="forking_server")
    try:
        while server.state() is ServerState.STARTING:
            time.sleep(0.05)
        assert server.state() is ServerState.READY, server.complaint()
        words = {"fork": server.python, "real": python}
        quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
        stand_in = server.python.with_name("stand-in")
        stand_in.write_text(STAND_IN.format(**quoted))
        stand_in.chmod(0o700)
        yield stand_in
    finally:
        server.close()
