"""What the repository publishes of real runs tells of no machine and of no person's folders."""

import re
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[2] / "reports"
UPGRADES = ("upgrade/0.2.2-to-0.3.0", "upgrade/torch-2.13-to-2.15")
GUIDE = ("guide/bugs", "guide/drift")
FILES = sorted(
    path
    for part in ("sample", "benchmark", *UPGRADES, *GUIDE)
    for path in (PUBLISHED / part).rglob("*")
    if path.suffix in {".html", ".json", ".md", ".svg", ".xml"}
)
# Of the page's payload only what it holds as text is seen here; the other formats hold the same.
SOMEBODYS = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|var|mnt|data|scratch)/[^\s\"'<]*")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PUBLISHED)))
def test_no_path_of_a_machine_is_published(path):
    assert SOMEBODYS.findall(path.read_text()) == []


@pytest.mark.parametrize("folder", ["sample", "benchmark", *UPGRADES, *GUIDE])
def test_what_is_published_is_there(folder):
    assert [path for path in FILES if PUBLISHED / folder in path.parents]


def test_all_formats_are_published():
    assert {path.name for path in FILES} >= {"report.html", "report.json", "report.md", "junit.xml"}
