"""docs/causes.md says what every class of cause means, and of no other."""

import re
from pathlib import Path

import pytest

from converge_harness.model import CauseClass
from converge_harness.report.text import cause_page

PAGE = Path(__file__).parents[2] / "docs" / "causes.md"


def test_every_class_of_cause_has_its_section():
    titles = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(title.lower() for title in titles) == sorted(map(str, CauseClass))


@pytest.mark.parametrize("kind", CauseClass)
def test_reports_lead_to_the_section_of_a_class(kind):
    """By the anchor that GitHub gives its heading."""
    anchors = {
        title.lower().replace(" ", "-")
        for title in re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    }
    page, _, anchor = cause_page(kind).partition("#")
    assert (PAGE.parents[1] / page, anchor in anchors) == (PAGE, True)


def test_every_section_says_how_to_look_further():
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert [each.partition("\n")[0] for each in sections if "**Look further.**" not in each] == []
