"""Every example of docs/extension.md works: its code, its commands, what they print, its tests."""

import re

import pytest
from extension_page import PAGE, ROOT, TINY, applied, changes, commands, outputs, run_tests

CODES = {
    "converge compare control.csv stale.csv --out out": 1,
    "grep loss-not-stale out/report.md": 0,
    "converge compare whole.csv cut.csv": 3,
    "converge compare old.log new.log": 1,
    "converge run x.toml": 1,
    "converge signals new.log": 0,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return applied(tmp_path_factory.mktemp("extended"))


@pytest.fixture(scope="module")
def printed(copy):
    lines = [each.line for each in commands()]
    return dict(zip(lines, outputs(copy), strict=True))


@pytest.mark.parametrize("command", commands(), ids=lambda each: each.line)
def test_its_commands_print_what_it_says(printed, command):
    text, code = printed[command.line]
    assert code == CODES[command.line], text
    there = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
    parts = re.split(r"^…$", command.output, flags=re.MULTILINE)
    said = r"(?s:.*)".join(re.escape(part.strip("\n")) for part in parts)
    assert re.fullmatch(said, there), text


def test_all_its_commands_are_run(printed):
    assert printed.keys() == CODES.keys()


def test_its_tests_pass(copy):
    written = {path for path, _ in changes() if re.search(r"/test_\w+\.py$", path)}
    light = sorted(path for path in written if not path.startswith("tests/rank/"))
    done = run_tests(copy, *light)
    assert done.returncode == 0, done.stdout
    assert len(light) == 5
    assert "7 passed" in done.stdout


def test_its_trainer_is_the_one_that_is_tested():
    ((_, block),) = (each for each in changes() if each[0] == TINY)
    assert block.text == (ROOT / TINY).read_text()


def test_every_way_to_extend_has_a_section():
    page = PAGE.read_text()
    sections = re.findall(r"^\| \[(.+?)\]\(#(.+?)\)", page, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    slugs = [each.lower().replace(" ", "-") for each in headings]
    assert [anchor for _, anchor in sections] == slugs[:-1]
    assert len(sections) == 6
