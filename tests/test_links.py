"""Links between the project's pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("benchmarks/*/*.md"))
)
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"(?m)^#+ (.+)$")


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings: lower case, without punctuation, spaces as hyphens."""
    found: list[str] = []
    for heading in HEADING.findall(CODE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        same = found.count(slug)
        found.append(f"{slug}-{same}" if same else slug)
    return set(found)


def anchors_or_any(target: Path, anchor: str) -> set[str]:
    """The anchors of a page; of anything else, none is asked for."""
    named = anchor and target.suffix == ".md"
    return anchors_of(target.read_text()) if named else {anchor}


def broken_links(page: Path) -> list[str]:
    text = page.read_text()
    broken = []
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or anchor not in anchors_or_any(target, anchor):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_link_to_no_file_and_one_to_no_heading_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One two, `three`\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#one-two-three) [y](b.md#four) [z](c.md) [w](https://x.org/#y)\n")
    assert broken_links(page) == ["b.md#four", "c.md"]
