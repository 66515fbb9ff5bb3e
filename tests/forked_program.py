"""``python [-u] -m MODULE …`` or ``python [-u] SCRIPT …`` in a process with torch imported already.

See ``forking_python.py``.
"""

import os
import runpy
import sys
from pathlib import Path

from converge_harness.rank.recorder import imported


def main(arguments):
    # What the server imported has not been edited since; all else is imported from here on.
    imported._IMPORTS_BEGAN = imported.process_began()
    if arguments[0] == "-u":
        del arguments[0]
    # This process's own was read when the server started.
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    is_module = arguments[0] == "-m"
    if is_module:
        del arguments[0]
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
