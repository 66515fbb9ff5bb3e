"""Everything that converge raises on purpose, in one tree.

::

    ConvergeError
    ├── ConfigError        the experiment or train config is wrong: exit code 2
    ├── ToolchainError     a named Python environment is missing or broken: exit code 2
    ├── StoreError         one of converge's files cannot be read or written: exit code 2
    ├── HistoryError       the history file cannot be read or written: exit code 2
    ├── EvidenceError      curves given to a reader cannot be understood: exit code 2
    ├── ClusterError       a scheduler cannot be reached or understood: exit code 2
    └── Interrupted        the user or a signal stopped converge: exit code 130

Exit code 2 says that nothing was launched. An error after jobs were launched (such as a full disk)
gives exit code 3.

A user's mistake ends in one of these, never in a traceback. The message names the value, the place,
what is allowed and the next command to run.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass

from converge_harness import DISTRIBUTION

MAX_LISTED = 24
"""A message lists the valid words only if there are at most this many."""


def suggest(word: str, valid: Collection[str]) -> str:
    """A hint for an unknown word: the nearest valid one, and all of them if they are few."""
    nearest = difflib.get_close_matches(word, list(valid), n=1)
    meant = f"did you mean {nearest[0]!r}?" if nearest else ""
    listing = f"valid: {', '.join(valid)}" if 0 < len(valid) <= MAX_LISTED else ""
    return "; ".join(part for part in (meant, listing) if part)


def installing(extra: str) -> str:
    """The command that installs an extra of converge into the Python that runs it."""
    return shlex.join([sys.executable, "-m", "pip", "install", f"{DISTRIBUTION}[{extra}]"])


class ConvergeError(Exception):
    """Base class: the message is meant for the user's eyes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a file: where, what, and what would be right."""

    where: str
    """File and dotted key, as in ``experiments/smoke.toml: test[2].parallelism.tp``."""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(ConvergeError):
    """One or more problems, all of them found before anything was launched."""

    def __init__(self, problems: Problem | list[Problem] | tuple[Problem, ...]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ToolchainError(ConvergeError):
    """A toolchain (a Python environment with given versions) is missing or does not start."""


class CheckoutError(ConvergeError):
    """A git checkout lacks what is asked of it."""


class StoreError(ConvergeError):
    """One of converge's files is missing, unreadable, of a newer schema, or cannot be written."""


class HistoryError(ConvergeError):
    """The history file is missing, damaged, from a newer release, or cannot be written."""


class EvidenceError(ConvergeError):
    """Foreign curves cannot be read as evidence."""


class ClusterError(ConvergeError):
    """A scheduler is missing, or does not answer as expected."""


class Interrupted(ConvergeError):  # noqa: N818 - an interruption is not an error
    """Stopped by Ctrl-C or a signal; everything finished so far is kept."""
