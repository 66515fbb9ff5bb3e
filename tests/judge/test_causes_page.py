"""docs/causes.md says what every class of cause means, and of no other."""

import re
from pathlib import Path

from converge_harness.model import CauseClass

PAGE = Path(__file__).parents[2] / "docs" / "causes.md"


def test_every_class_of_cause_has_its_section():
    titles = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(title.lower() for title in titles) == sorted(map(str, CauseClass))


def test_every_section_says_how_to_look_further():
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert [each.partition("\n")[0] for each in sections if "**Look further.**" not in each] == []
