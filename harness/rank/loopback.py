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
from pathlib import Path
from typing import Any

LOOPBACK = frozenset({"127.0.0.1", "localhost"})


def listen_on_loopback() -> None:
    """Have stores that this process makes for ranks on this machine listen on loopback only.

    Of torchrun's agent that is the store that ranks share, of a rank the one that rank 0 makes
    where they share none. A torch that has neither (before 2.4) keeps its own way.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # By its whole name: a function of the package has the same.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    tcp_store = rendezvous.TCPStore

    def store(**given: Any) -> Any:
        if not given.get("is_master") or given["host_name"] not in LOOPBACK:
            return tcp_store(**given)
        listener = _listener(given["port"])
        if listener is None:
            return tcp_store(**given)
        given |= {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
        return tcp_store(**given)

    def of_agent(_handler: object, master_addr: str, master_port: int) -> Any:
        return store(host_name=master_addr, port=master_port, is_master=True, multi_tenant=True)

    rendezvous.TCPStore = store  # type: ignore[attr-defined]
    dynamic_rendezvous.DynamicRendezvousHandler._create_tcp_store_server = of_agent


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
