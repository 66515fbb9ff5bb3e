"""Key-value stores of ranks that are all on this machine: they listen on loopback only.

torch's TCPStore listens on every address of the machine, whatever host it is given. Its contents
say where ranks find each other, torch unpickles some of them, and everybody who reaches the port
can write there.

``python loopback.py TORCHRUN-ARGUMENTS`` is torchrun with such stores, for environments that do
not have this package; it needs nothing of it. For programs that torchrun does not start,
``on_loopback/sitecustomize.py`` brings it in.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

LOOPBACK = frozenset({"127.0.0.1", "localhost"})
_PARAMETERS = (
    *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers"),
    *("multi_tenant", "master_listen_fd", "use_libuv"),
)
"""Of TCPStore, in the order in which some callers give them."""


def listen_on_loopback() -> None:
    """Have stores that this process makes for ranks on this machine listen on loopback only.

    Of torchrun's agent that is the store that ranks share, of a rank the one that rank 0 makes
    where they share none.
    """
    import torch.distributed
    import torch.distributed.rendezvous  # its name is also that of a function of the package

    keep_to_loopback(torch.distributed, LOOPBACK.__contains__)
    module = sys.modules["torch.distributed.rendezvous"]
    module.TCPStore = torch.distributed.TCPStore  # type: ignore[attr-defined]


def keep_to_loopback(distributed: ModuleType, is_here: Callable[[str], bool]) -> None:
    """Have the stores of ``torch.distributed`` whose host is here meet on loopback.

    Modules that imported ``TCPStore`` before keep torch's own. So does everything in a torch before
    2.1, which cannot be given a socket.
    """
    tcp_store: Any = distributed.TCPStore
    if "master_listen_fd" not in (tcp_store.__init__.__doc__ or ""):
        return

    class TCPStore(tcp_store):
        """One whose host is this machine listens, and is looked for, on loopback only."""

        def __init__(self, *positional: Any, **given: Any) -> None:
            given.update(zip(_PARAMETERS, positional))  # noqa: B905 (Python 3.9 knows no strict)
            if is_here(given.get("host_name", "")):
                given["host_name"] = "127.0.0.1"
                listener = _listener(given.get("port", 0)) if given.get("is_master") else None
                if listener is not None:
                    port = listener.getsockname()[1]
                    given.update(port=port, master_listen_fd=listener.detach())
            super().__init__(**given)

    distributed.TCPStore = TCPStore  # type: ignore[attr-defined]


def is_of_this_machine(host: str) -> bool:
    """Whether a name or address is one of this machine's: only those can be bound to."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as each:
                each.bind(address)
        except OSError:
            continue
        return True
    return False


def _listener(port: int) -> socket.socket | None:
    """A socket that is bound to loopback (port 0: a free one); None where the port is taken.

    A store of this process may have it, which torch then shares; otherwise torch raises its error.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As torch: what an earlier store left of its connections does not keep the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def main() -> None:
    """Be torchrun: in ``sys.argv`` are its arguments."""
    here = str(Path(__file__).resolve().parent)
    # Names of modules beside this file must not stand before those of the environment.
    sys.path[:] = [folder for folder in sys.path if folder != here]
    listen_on_loopback()
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
