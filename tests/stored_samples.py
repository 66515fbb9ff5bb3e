"""Results of earlier releases (tests/samples), as tests use them."""

import shutil
from pathlib import Path

HERE = Path(__file__).parent / "samples"
STORED = "/checkout/tests/samples"
NAMES = tuple(sorted(folder.name for folder in HERE.glob("schema*")))


def copied(name: str, folder: Path) -> Path:
    """A copy of a stored sample, whose files name the place where the copy lies."""
    copy = folder / name
    shutil.copytree(HERE / name, copy)
    for path in copy.rglob("*.json"):
        path.write_text(path.read_text().replace(STORED, str(folder)))
    return copy
