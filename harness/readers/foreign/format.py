"""The interface of a format of curves, and the file or folder that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from converge_harness.errors import EvidenceError
from converge_harness.model import Evidence
from converge_harness.readers.foreign.names import Columns
from converge_harness.readers.lines import NoRowError, decode_json, read_text

_JSON_LINES = (".jsonl", ".ndjson")


class Source:
    """A file or folder that may contain a curve; its text is read on first use."""

    def __init__(
        self, path: Path, columns: Columns, readable: str, *, unfinished: bool = False
    ) -> None:
        """Set the path and the user's column names.

        ``readable`` lists all formats, for error messages. ``unfinished``: somebody still writes
        the file, or was killed while writing, so a last line or record without its end is left out.
        A ``.json`` is one value.
        """
        self.path = path
        self.columns = columns
        self.readable = readable
        self.unfinished = unfinished and path.suffix != ".json"

    @cached_property
    def text(self) -> str:
        """The file's text; raises EvidenceError when it is empty, or not UTF-8."""
        text = read_text(self.path, hint=self.readable, whole_lines=self.unfinished)
        if not text.strip():
            raise NoRowError(f"{self.path}: is empty; {self.readable}")
        return text

    @cached_property
    def is_json(self) -> bool:
        """Whether the text is a JSON object, or one per line."""
        return self.path.suffix in _JSON_LINES or self.text.lstrip().startswith("{")

    @cached_property
    def document(self) -> Any:
        """The text as one JSON object; None for other texts, including JSONL.

        Raises EvidenceError for a file that should be one JSON object and is not.
        """
        if not self.is_json:
            if self.path.suffix == ".json":
                raise EvidenceError(f"{self.path}: is not a JSON object; {self.readable}")
            return None
        if self.path.suffix in _JSON_LINES:
            return None
        try:
            return decode_json(self.text)
        except ValueError as error:
            # "Extra data" is the second line of a JSONL file. In a document over several lines, any
            # other error counts unless it is in the first line.
            first_line = self.text.lstrip().split("\n", 1)[0]
            meant = self.path.suffix == ".json" or first_line == "{"
            if meant and not str(error).startswith("Extra data"):
                raise EvidenceError(f"{self.path}: not JSON: {error}") from error
            return None


def _nothing_in(_folder: Path) -> Sequence[Path]:
    return ()


def _no_name(_path: Path) -> bool:
    return False


def _no_content(_source: Source) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Format:
    """How curves of one format are recognised and read.

    A folder is recognised by ``files_in``; a file by ``has_name`` if that is enough, else by
    ``has_content``. If several formats recognise a path, the first one in the registry reads it.
    """

    name: str
    """Its name in the list of readable formats."""
    read: Callable[[Source], Evidence]
    """Raises EvidenceError, naming the place, for content that it cannot understand."""
    files_in: Callable[[Path], Sequence[Path]] = _nothing_in
    """The files of this format in or below a folder."""
    reads_folders: bool = True
    """Whether ``read`` takes the folder; if not, its first file is read."""
    has_name: Callable[[Path], bool] = _no_name
    has_content: Callable[[Source], bool] = _no_content
