"""Parses a bug's docstring (format: ``docs/bugs.md``), with ``ast`` because bugs import torch."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from converge_harness.errors import Problem, suggest
from converge_harness.model import CauseClass
from proof.regimes import Regime

REQUIRED = ("Reference", "Class", "Technique", "First step", "Signature", "Cause")
OPTIONAL = ("Place", "Module", "Needs", "Says", "Magnitude", "Regimes")
CLASSES = tuple(f"C{number}" for number in range(1, 8))
Wrong: TypeAlias = Callable[..., None]
"""Takes a message and a hint."""
_FIELD = re.compile(r"([A-Z][a-z]+(?: [a-z]+)?): *(.*)")
_BUG_FILE = re.compile(r"c\d_\w+\.py")
_REGIMES = re.compile(r"([^()]*)\((.+)\)")
_CLASS_LINE = re.compile(r"^ *Class:", re.MULTILINE)
_ARGUMENT = ("trainer", "_trainer", "_")


@dataclass(frozen=True, slots=True)
class Bug:
    """One injected bug as its docstring describes it."""

    id: str
    """Name of the function, and of the test set that injects it."""
    kind: str
    """``C1`` to ``C7``."""
    summary: str
    """What goes wrong, in one sentence."""
    reference: str
    technique: str
    """The technique under which it hides."""
    first_step: int
    """The earliest step at which any effect exists."""
    signature: str
    """The expected evidence."""
    causes: tuple[CauseClass, ...]
    """Classes of cause that are correct answers."""
    says: tuple[str, ...] = ()
    """The cause's sentence must contain one of these, ignoring case; empty: any sentence."""
    needs: str = ""
    """The special configuration without which it hides."""
    magnitude: float | None = None
    """Size of a rung of a detection-limit ladder; None for every other bug."""
    regimes: tuple[Regime, ...] = ()
    """Regimes in which it exists; empty: all."""
    elsewhere: str = ""
    """Why it does not exist in the others."""
    place: str = ""
    """What of the framework is changed; empty: the summary says it."""
    modules: tuple[str, ...] = ()
    """Where the computation is wrong: patterns of module names, `loss`, `the model` or `none`;
    empty: not labelled."""


class Function(NamedTuple):
    """A top-level function that may be injected: its only argument is the trainer."""

    file: Path
    name: str
    line: int
    docstring: str

    @property
    def means_a_bug(self) -> bool:
        """Whether its file's name (``cN_topic.py``) or its fields say that it is a bug."""
        return bool(_BUG_FILE.fullmatch(self.file.name) or _CLASS_LINE.search(self.docstring))


def bug_files(folder: Path) -> list[Path]:
    """A folder's files named after a class of bugs, ``cN_*.py``, in order."""
    return sorted(path for path in folder.glob("c*.py") if _BUG_FILE.fullmatch(path.name))


def functions(path: Path) -> Iterator[Function]:
    """Every public top-level function of a file whose only argument is ``trainer``.

    Raises SyntaxError for a file that is not Python.
    """
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if len(every) == 1 and every[0].arg in _ARGUMENT:
            yield Function(path, node.name, node.lineno, ast.get_docstring(node, clean=False) or "")


def read_bug(function: Function, complain: Callable[[Problem], None]) -> Bug | None:
    """The bug that a function's docstring describes; None if there was a problem."""
    problems: list[Problem] = []

    def wrong(message: str, hint: str = "") -> None:
        place = f"{function.file}:{function.line}"
        problems.append(Problem(place, f"{function.name}: {message}", hint))

    summary, fields = _split(function.docstring, wrong)
    if not summary:
        wrong("has no first line on what goes wrong")
    for name in REQUIRED:
        if not fields.get(name):
            wrong(f"has no field {name!r}", f"required: {', '.join(REQUIRED)}")
    regimes, elsewhere = _regimes(fields.get("Regimes"), wrong)
    bug = Bug(
        id=function.name,
        kind=_kind(fields.get("Class", ""), wrong),
        summary=summary,
        reference=fields.get("Reference", ""),
        technique=fields.get("Technique", ""),
        first_step=_step(fields.get("First step", ""), wrong),
        signature=fields.get("Signature", ""),
        causes=_causes(fields.get("Cause", ""), wrong),
        says=_alternatives(fields.get("Says", "")),
        needs=fields.get("Needs", ""),
        magnitude=_magnitude(fields.get("Magnitude"), wrong),
        regimes=regimes,
        elsewhere=elsewhere,
        place=fields.get("Place", ""),
        modules=_alternatives(fields.get("Module", ""), " or "),
    )
    for problem in problems:
        complain(problem)
    return None if problems else bug


def _split(docstring: str, wrong: Wrong) -> tuple[str, dict[str, str]]:
    """First line and fields. A field is one line and the indented lines below it."""
    lines = inspect.cleandoc(docstring).splitlines()
    summary = lines[0].strip() if lines else ""
    begin = next((i for i, line in enumerate(lines) if line.startswith("Reference:")), len(lines))
    fields: dict[str, str] = {}
    last = ""
    for line in lines[begin:]:
        match = _FIELD.fullmatch(line.rstrip())
        if match is not None:
            last, value = match[1], match[2]
            if last not in (*REQUIRED, *OPTIONAL):
                wrong(f"has an unknown field {last!r}", suggest(last, (*REQUIRED, *OPTIONAL)))
            elif last in fields:
                wrong(f"has {last!r} twice")
            fields[last] = value.strip()
        elif line.startswith(" ") and last:
            fields[last] = f"{fields[last]} {line.strip()}"
        elif line.strip():
            wrong(f"has a line among its fields that is not a field: {line.strip()!r}")
    return summary, fields


def _kind(text: str, wrong: Wrong) -> str:
    if text and text not in CLASSES:
        wrong(f"Class: there is no {text!r}", suggest(text, CLASSES))
    return text


def _causes(text: str, wrong: Wrong) -> tuple[CauseClass, ...]:
    known = [cause.value for cause in CauseClass if cause is not CauseClass.UNKNOWN]
    words = _alternatives(text)
    for word in words:
        if word not in known:
            wrong(f"Cause: there is no class {word!r}", suggest(word, known))
    return tuple(CauseClass(word) for word in words if word in known)


def _alternatives(text: str, between: str = "|") -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(between) if part.strip())


def _regimes(text: str | None, wrong: Wrong) -> tuple[tuple[Regime, ...], str]:
    """``fp32 | float8 (why not in the others)``."""
    if text is None:
        return (), ""
    match = _REGIMES.fullmatch(text)
    words = _alternatives(match[1] if match else text)
    known = [regime.value for regime in Regime]
    for word in words:
        if word not in known:
            wrong(f"Regimes: there is no {word!r}", suggest(word, known))
    if not match or not words:
        wrong("Regimes: name them, and why not the others", "write fp32 | float8 (the reason)")
    return tuple(Regime(word) for word in words if word in known), match[2] if match else ""


def _step(text: str, wrong: Wrong) -> int:
    if text and not text.isdecimal():
        wrong(f"First step: {text!r} is not a step", "write 1, or 0 for wrong initial weights")
    return int(text) if text.isdecimal() else 1


def _magnitude(text: str | None, wrong: Wrong) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        wrong(f"Magnitude: {text!r} is not a positive number", "write 1e-4")
    return value
