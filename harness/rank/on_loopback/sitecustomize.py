"""Keep the stores of a program's ranks to loopback, whatever starts them.

With this folder first on ``PYTHONPATH`` every Python of a program imports this file at its start
(``site``), before the program's first line. It imports nothing of torch: it waits until the program
does. Then it makes way for the environment's own ``sitecustomize``, which it stands before.
"""

# ruff: noqa: INP001  a folder for PYTHONPATH, not a package

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
RENDEZVOUS = "torch.distributed.rendezvous"


class Waiting:
    """Finds no module itself; changes the one that makes stores as soon as it is loaded."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            _keep_to_loopback(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _keep_to_loopback(module: ModuleType) -> None:
    """By the file beside this folder: this environment may not have its package."""
    from runpy import run_path

    run_path(str(HERE.parent / "loopback.py"))["keep_to_loopback"](module)


def make_way() -> None:
    """Import the ``sitecustomize`` that would have been imported without this one, if any."""
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    this = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


sys.meta_path.insert(0, Waiting())
make_way()
