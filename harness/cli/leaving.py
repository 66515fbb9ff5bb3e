"""Ctrl-C while modules are imported: there is nothing to end, and a traceback says nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def leaving_when_interrupted() -> Iterator[None]:
    """End the process at once, with 130, when SIGINT or SIGTERM comes during the block.

    Not by an exception: what imports a module may take one for a module that is not there.
    Elsewhere than in the main thread, and where somebody ignores the signals, nothing changes.
    """
    ours = threading.current_thread() is threading.main_thread()
    caught = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM)
        if ours and callable(signal.getsignal(number))
    }
    for number in caught:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
