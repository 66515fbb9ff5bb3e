"""Ctrl-C while modules are imported: end at once, without a useless traceback.

This module is imported first, so it imports only what every Python has already loaded: importing
``signal``, ``contextlib`` or ``threading`` would take longer than the whole module.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # a C module that typeshed does not know
import os

EXIT_CODE = 130


class leaving_when_interrupted:  # noqa: N801 (as functions of contextlib)
    """End the process at once, with 130, when SIGINT or SIGTERM comes during the block.

    Not by an exception: code that imports a module may take it for a missing module. Outside of the
    main thread, and where the signals are ignored, nothing changes.
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
    os._exit(EXIT_CODE)
