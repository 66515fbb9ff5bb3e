"""Ctrl-C and signals as a flag that is polled, so that nothing is left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from converge_harness.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Whether converge was asked to stop."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None

    def request(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler. Further signals have no effect: stopping takes a bounded time."""
        self._signal = self._signal or signal.Signals(number)

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self._signal is not None:
            raise Interrupted(f"stopped by {self._signal.name}")


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Catch SIGINT, SIGTERM and SIGHUP during a block.

    Outside the main thread Python delivers no signals: there the block runs without this.
    """
    stop = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.request) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
