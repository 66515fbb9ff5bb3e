"""Keep the stores of a program's ranks to loopback, whatever starts them.

With this folder first on ``PYTHONPATH`` every Python of a program imports this file at its start
(``site``), before the program's first line: whichever Python that is, so nothing here is newer than
Python 3.6. It imports nothing of torch: it waits until the program does. Then it makes way for the
environment's own ``sitecustomize``, which it stands before.
"""
# ruff: noqa: INP001, UP036

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DISTRIBUTED = "torch.distributed"


class RendezvousHook:
    """Finds no module itself; changes ``torch.distributed`` before its first part imports it."""

    def find_spec(self, name: str, *_: object) -> None:
        distributed = sys.modules.get(DISTRIBUTED)
        if name == DISTRIBUTED + ".rendezvous" and hasattr(distributed, "TCPStore"):
            sys.meta_path.remove(self)
            from runpy import run_path

            # By its path: this environment may not have its package.
            loopback = run_path(str(HERE.parent / "loopback.py"))
            loopback["keep_to_loopback"](distributed, loopback["is_of_this_machine"])


def make_way() -> None:
    """Import the ``sitecustomize`` that would have been imported without this one, if any."""
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


if sys.version_info >= (3, 7):  # as loopback.py
    sys.meta_path.insert(0, RendezvousHook())
make_way()
