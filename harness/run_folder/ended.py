"""``ended.json``: how the script of a scheduler's job ended. Bash writes it, in its own trap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from converge_harness.run_folder.documents import SCHEMA
from converge_harness.run_folder.layout import ENDED
from converge_harness.run_folder.shapes import COUNT, TIME, Shape


class EndedDocument(TypedDict, total=False):
    """The file without its schema version."""

    returncode: int
    """Exit code of the script."""
    restart: int
    """How often the scheduler had started the script again by then."""
    ran_s: int
    """Seconds since the first pod of a JobSet started; missing under Slurm, which says it."""


SHAPES: Mapping[str, Shape] = {"returncode": COUNT, "restart": COUNT, "ran_s": TIME}
REQUIRED = ("returncode", "restart")


def shell_lines(
    *, folder: str, returncode: str, restart: str | None = None, ran_s: str | None = None
) -> str:
    """Lines of bash, indented by four spaces, that write the file at once.

    Each argument is an expression of bash for use in double quotes. Without ``restart`` the script
    is never started again; without ``ran_s`` the file lacks it.
    """
    words = {"returncode": returncode, "restart": restart, "ran_s": ran_s}
    keys = [f'"schema": {SCHEMA}', '"returncode": %d']
    keys.append('"restart": 0' if restart is None else '"restart": %d')
    keys += [] if ran_s is None else ['"ran_s": %d']
    values = " ".join(f'"{word}"' for word in words.values() if word is not None)
    return f"""\
    printf '{{{", ".join(keys)}}}\\n' \\
        {values} > "{folder}/{ENDED}.part"
    mv "{folder}/{ENDED}.part" "{folder}/{ENDED}\""""
