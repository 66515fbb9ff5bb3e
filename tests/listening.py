"""What a process and all that it started listen on, and where they meet, by sampling."""

import ipaddress
import threading
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil

ENDPOINT = "--rdzv-endpoint="
SOCKET = "--socket"


def is_loopback(address):
    return ipaddress.ip_address(address).is_loopback


class Sampled:
    """What was seen so far."""

    def __init__(self):
        self.addresses = {}
        """To the port and the command line of a process that listened there."""
        self.folders = {}
        """Of rendezvous files and of the warm server's socket, with their modes."""

    def on_loopback(self):
        """Whether something was listened on, and nothing but loopback.

        Where ranks share no store torch 2.13 tries a free port on ``::1``, too.
        """
        return bool(self.addresses) and all(map(is_loopback, self.addresses))

    def look(self, process):
        words = process.cmdline()
        for each in process.net_connections(kind="inet"):
            if each.status == psutil.CONN_LISTEN:
                self.addresses.setdefault(each.laddr.ip, (each.laddr.port, words))
        files = [word.removeprefix(ENDPOINT) for word in words if word.startswith(ENDPOINT)]
        files += [after for word, after in pairwise(words) if word == SOCKET]
        for folder in (Path(file).parent for file in files):
            self.folders[folder] = folder.stat().st_mode & 0o777


@contextmanager
def sampling(root):
    """Look at a process and its descendants again and again, as long as the block lasts.

    Not at those that it had before, such as servers that other tests use.
    """
    sampled, over = Sampled(), threading.Event()
    before = set(root.children(recursive=True))

    def sample():
        while not over.wait(0.02):
            for process in family():
                try:
                    sampled.look(process)
                except (psutil.Error, FileNotFoundError):
                    continue  # it has ended meanwhile

    def family():
        try:
            return [root, *(each for each in root.children(recursive=True) if each not in before)]
        except psutil.Error:
            return []

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sampled
    finally:
        over.set()
        thread.join()
