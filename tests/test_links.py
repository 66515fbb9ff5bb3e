"""Links between the project's pages lead somewhere."""

import re
from collections import Counter
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
    counts: Counter[str] = Counter()
    for heading in HEADING.findall(CODE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.append(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return set(found)


def broken_links(page: Path) -> list[str]:
    text = page.read_text()
    broken = []
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            broken.append(link)
        elif anchor:
            is_page = target.suffix == ".md"
            broken += [link] if is_page and anchor not in anchors_of(target.read_text()) else []
        elif target == page:  # the top of the page that one is on
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    assert broken_links(page) == []


def test_a_link_to_no_file_and_one_to_no_heading_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# One two, `three`\n# a\n# a\n# a\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[x](b.md#one-two-three) [v](b.md#a-2) [u](a.md) [y](b.md#four) [z](c.md) [w](https://x.org/#y)\n"
    )
    assert broken_links(page) == ["a.md", "b.md#four", "c.md"]
