"""Words of a user's that go into a batch script: what sbatch and bash take as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.errors import ConfigError, Problem

_WORD = re.compile(r"[!$-&(-\[\]-~]+")
"""Printable ASCII without what sbatch takes for a quote, an escape or a comment, and no blanks."""
_LINE = re.compile(r"[ -~]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION = re.compile(r"--(?P<long>[A-Za-z][A-Za-z0-9-]*)(=.*)?|-(?P<short>[A-Za-z]).*")

_OURS = (
    *("array", "chdir", "clusters", "dependency", "error", "job-name", "kill-on-invalid-dep"),
    *("nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable"),
    *("requeue", "test-only", "wait", "wrap"),
)
"""Options that the harness needs for itself: another value of them, and it would follow another
job than the one it means."""
_OURS_SHORT = {
    "a": "array",
    "D": "chdir",
    "M": "clusters",
    "d": "dependency",
    "e": "error",
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "W": "wait",
}


def sbatch_option(key: str, option: str, value: str | int) -> str:
    """``--option=value`` for an ``#SBATCH`` line; ``key`` is that of ``[cluster]``.

    Raises ConfigError when sbatch would read something else than the value.
    """
    text = str(value)
    if not _WORD.fullmatch(text):
        raise ConfigError(
            Problem(
                f"cluster.{key}",
                f"{text!r} cannot stand on an #SBATCH line",
                "allowed: printable ASCII without blanks, quotes, backslashes and #",
            )
        )
    return f"--{option}={text}"


def sbatch_path(folder: Path) -> str:
    """A path on an ``#SBATCH`` line, where double quotes keep blanks and ``#``.

    Raises ConfigError when it has what they do not keep.
    """
    text = str(folder)
    if not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigError(
            Problem(
                f"run folder {text!r}",
                "sbatch cannot be told of it",
                "use a --store whose path has no quotes, backslashes and line breaks",
            )
        )
    return f'"{text}"'


def sbatch_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """The user's own ``#SBATCH`` lines, as they are.

    Raises ConfigError when one is not an option, or one that the harness sets itself.
    """
    return tuple(_checked_line(index, line) for index, line in enumerate(lines))


def _checked_line(index: int, line: str) -> str:
    where = f"cluster.sbatch[{index}]"
    option = _OPTION.fullmatch(line.split(maxsplit=1)[0]) if line.strip() else None
    if option is None or not _LINE.fullmatch(line):
        raise ConfigError(
            Problem(
                where, f"{line!r} is no option of sbatch", 'allowed: one line, as "--exclusive"'
            )
        )
    # getopt takes the beginning of a long option for the option.
    given = option["long"] or _OURS_SHORT.get(option["short"], "")
    own = next((name for name in _OURS if given and name.startswith(given)), None)
    if own is not None:
        raise ConfigError(Problem(where, f"{line!r}: converge sets --{own} itself", "leave it out"))
    return line


def variables(values: Mapping[str, str]) -> Mapping[str, str]:
    """``[cluster] environment``, when bash can export it.

    Raises ConfigError otherwise.
    """
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                Problem(
                    "cluster.environment",
                    f"{name!r} is no name of a variable",
                    "allowed: letters, digits and _, not beginning with a digit",
                )
            )
        _without_nul(f"cluster.environment.{name}", value)
    return values


def arguments(key: str, values: Sequence[str]) -> tuple[str, ...]:
    """Arguments of a program, when it can be given them; they are yet to be quoted.

    Raises ConfigError otherwise.
    """
    return tuple(
        _without_nul(f"cluster.{key}[{index}]", value) for index, value in enumerate(values)
    )


def _without_nul(where: str, value: str) -> str:
    if "\0" in value:
        raise ConfigError(Problem(where, f"{value!r} has a NUL character"))
    return value
