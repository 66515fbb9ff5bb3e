"""Ctrl-C while modules are imported: there is nothing to end, and a traceback says nothing.

This module comes first, so it imports nothing itself but what every Python has loaded by then:
``signal``, ``contextlib`` and ``threading`` take longer than all of it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of C, which typeshed does not know
import os

INTERRUPTED = 130


class leaving_when_interrupted:  # noqa: N801 (as functions of contextlib)
    """End the process at once, with 130, when SIGINT or SIGTERM comes during the block.

    Not by an exception: what imports a module may take one for a module that is not there.
    Elsewhere than in the main thread, and where somebody ignores the signals, nothing changes.
    """

    def __enter__(self) -> None:
        self._before: dict[int, object] = {}
        for number in (_signal.SIGINT, _signal.SIGTERM):
            handler = _signal.getsignal(number)
            if callable(handler):
                try:
                    _signal.signal(number, _leave)
                except ValueError:  # not the main thread
                    return
                self._before[number] = handler

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            _signal.signal(number, handler)


def _leave(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
