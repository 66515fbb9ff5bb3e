"""Results of earlier releases and commits (tests/samples), as tests use them."""

import json
import shutil
import tarfile
from pathlib import Path

HERE = Path(__file__).parent / "samples"
STORED = "/checkout/tests/samples"
NAMES = tuple(sorted(folder.name for folder in HERE.glob("schema*")))


def copied(name: str, folder: Path) -> Path:
    """A copy of a stored sample, whose files name the place where the copy lies."""
    copy = folder / name
    if (packed := HERE / f"{name}.tar.gz").is_file():
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")
    else:
        shutil.copytree(HERE / name, copy)
    # Runs of a packed sample are sealed: readers have to find them in another place.
    for path in (copy / "report" if packed.is_file() else copy).rglob("*.json"):
        path.write_text(path.read_text().replace(STORED, str(folder)))
    return copy


def judged(folder):
    """What a report.json says of every set and check; sentences may become better."""
    document = json.loads((folder / "report" / "report.json").read_text())
    return {
        test["name"]: (
            test["verdict"],
            test["cause_class"],
            test["onset_step"],
            {check["name"]: check["outcome"] for check in test["checks"]},
        )
        for test in document["tests"]
    }


def measured(folder):
    document = json.loads((folder / "report" / "report.json").read_text())
    return {
        (test["name"], check["name"]): check["measured"]
        for test in document["tests"]
        for check in test["checks"]
        if check["measured"] is not None
    }
