"""What the stubs of the warm-start tests stand for."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(what, *rest):
    if what == "show":
        sys.stderr.write("to stderr\n")
        seen = {
            "argv": sys.argv[1:],
            "stdin": sys.stdin.read(),
            "cwd": str(Path.cwd()),
            "path": sys.path[0],
            "environment": dict(os.environ),
        }
        json.dump(seen, sys.stdout)
    elif what == "exit":
        return int(rest[0])
    elif what == "raise":
        raise ValueError("as told")
    elif what == "die":
        os.kill(os.getpid(), int(rest[0]))
    elif what == "catch":

        def caught(_number, _frame):
            sys.stdout.write("caught\n")
            sys.exit(5)

        signal.signal(signal.SIGTERM, caught)
    if what in ("catch", "sleep"):
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
        time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
