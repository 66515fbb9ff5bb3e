"""Key-value stores of ranks that are all on this machine: they listen on loopback only.

torch's TCPStore listens on every address of the machine, whatever host it is given. Its contents
say where ranks find each other, and everybody who reaches the port can write there.

``python loopback.py TORCHRUN-ARGUMENTS`` is torchrun with such stores, for environments that do
not have this package; it needs nothing of it.
"""

from __future__ import annotations

import errno
import importlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

LOOPBACK = frozenset({"127.0.0.1", "localhost"})
RENDEZVOUS = "torch.distributed.rendezvous"


def listen_on_loopback() -> None:
    """Have stores that this process makes for ranks on this machine listen on loopback only.

    Of torchrun's agent that is the store that ranks share, of a rank the one that rank 0 makes
    where they share none. A torch that has neither (before 2.4) keeps its own way.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # By its whole name: a function of the package has the same.
    store = keep_to_loopback(importlib.import_module(RENDEZVOUS))

    def of_agent(_handler: object, master_addr: str, master_port: int) -> Any:
        return store(host_name=master_addr, port=master_port, is_master=True, multi_tenant=True)

    dynamic_rendezvous.DynamicRendezvousHandler._create_tcp_store_server = of_agent


def keep_to_loopback(rendezvous: ModuleType) -> Callable[..., Any]:
    """Have stores that the module ``torch.distributed.rendezvous`` makes keep to loopback.

    Returns what makes them now.
    """
    tcp_store = rendezvous.TCPStore

    def store(*positional: Any, **given: Any) -> Any:
        # Before torch 2.0 it was called with arguments by position.
        if positional or not given.get("is_master") or given["host_name"] not in LOOPBACK:
            return tcp_store(*positional, **given)
        listener = _listener(given["port"])
        if listener is None:
            return tcp_store(**given)
        given |= {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
        return tcp_store(**given)

    rendezvous.TCPStore = store  # type: ignore[attr-defined]
    return store


def _listener(port: int) -> socket.socket | None:
    """A socket that is bound to loopback (port 0: a free one); None where the port is taken.

    By a store of this process, say, which torch then shares; else it complains in its own words.
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
