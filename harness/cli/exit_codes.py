"""Verdicts to one exit code: the whole interface of a CI gate, and the help on it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

from converge_harness.model import Judgement, Verdict

if TYPE_CHECKING:
    from converge_harness.report import Against

EXIT_CODES = """\
exit codes: 0 every test set PASS; 1 at least one FAIL; 2 usage or configuration error, nothing was
launched; 3 no FAIL, but something INVALID, INCONCLUSIVE or ERROR, or cut off once jobs ran (a full
disk); 130 interrupted."""


class ExitCode(IntEnum):
    """What the process ends with; part of the public interface."""

    PASS = 0
    """Every gated verdict is PASS."""
    FAIL = 1
    """At least one FAIL."""
    USAGE = 2
    """Usage or configuration error; nothing was launched."""
    UNDECIDED = 3
    """No FAIL, but something INVALID, INCONCLUSIVE or ERROR, or no verdict at all: the disk filled
    up while jobs ran, say."""
    INTERRUPTED = 130


def exit_code(verdicts: Iterable[Verdict], against: Against | None = None) -> ExitCode:
    """FAIL beats undecided beats PASS; no verdict at all is undecided, never PASS.

    ``against`` is what was asked of a change, which alone decides then.
    """
    if against is not None:
        return ExitCode.PASS if against.is_same else ExitCode.FAIL
    judgements = {verdict.judgement for verdict in verdicts}
    if Judgement.FAIL in judgements:
        return ExitCode.FAIL
    if judgements == {Judgement.PASS}:
        return ExitCode.PASS
    return ExitCode.UNDECIDED
