"""Verdicts to one exit code, which is all that a CI gate needs, and the help text on it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

from converge_harness.model import Judgement, Verdict

if TYPE_CHECKING:
    from converge_harness.report import Against

EXIT_CODES = """\
exit codes: 0 every test set PASS; 1 at least one FAIL; 2 usage or configuration error, nothing was
launched; 3 no FAIL, but a test set INVALID, INCONCLUSIVE or ERROR, or an error of converge after
jobs were launched (a full disk); 130 interrupted."""


GIT_BISECT = "--git-bisect"


class ExitCode(IntEnum):
    """The process's exit code; part of the public interface."""

    PASS = 0
    """Every test set is PASS."""
    FAIL = 1
    """At least one FAIL."""
    USAGE = 2
    """Usage or configuration error; nothing was launched."""
    UNDECIDED = 3
    """No FAIL, but something INVALID, INCONCLUSIVE or ERROR, or no verdict at all, for example
    because the disk filled up while jobs ran."""
    SKIP = 125
    """With ``--git-bisect``: this commit cannot be judged."""
    INTERRUPTED = 130


def for_git_bisect(code: int) -> int:
    """An exit code as ``git bisect run`` reads it: it takes 2 and 3 for a bad commit, too.

    Interrupted, it ends (git-bisect's manual: "a code greater than 127 will abort").
    """
    return ExitCode.SKIP if code in (ExitCode.USAGE, ExitCode.UNDECIDED) else code


def exit_code(verdicts: Iterable[Verdict], against: Against | None = None) -> ExitCode:
    """FAIL beats undecided beats PASS; no verdict at all is undecided, never PASS.

    With ``against``, the comparison with the earlier revision alone decides.
    """
    if against is not None:
        return ExitCode.PASS if against.is_same else ExitCode.FAIL
    judgements = {verdict.judgement for verdict in verdicts}
    if Judgement.FAIL in judgements:
        return ExitCode.FAIL
    if judgements == {Judgement.PASS}:
        return ExitCode.PASS
    return ExitCode.UNDECIDED
