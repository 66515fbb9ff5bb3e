"""Every example of docs/extension.md works: its code, its commands, what they print, its tests."""

import ast
import re
import shutil
from pathlib import Path

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


BESIDE = (
    "tests/judge/test_cause_metrics.py",
    "tests/judge/test_curves_alone.py",
    "tests/readers/test_printed_digits.py",
)
"""Tests that its check and its cause broke once: right curves of few decimals, known causes."""


def test_who_follows_it_breaks_no_test_beside_its_own(copy):
    for path in BESIDE:
        shutil.copy(ROOT / path, copy / path)
    for folder in ("judge", "readers"):
        for path in (ROOT / "tests" / folder).glob("*.py"):
            if not path.name.startswith("test_"):
                shutil.copy(path, copy / "tests" / folder)
    done = run_tests(copy, *BESIDE)
    assert done.returncode == 0, done.stdout


def test_its_code_has_no_long_line_and_its_modules_are_named(copy):
    long = [
        line
        for _, block in changes()
        for line in block.text.splitlines()
        if len(line) > 100 + (block.language == "diff")
    ]
    assert not long
    new = [Path(path) for path, _ in changes() if path.startswith("harness/")]
    new = [path for path in new if not (ROOT / path).exists()]
    assert len(new) == 2
    for path in new:
        package = copy.joinpath("converge_harness", *path.parts[1:-1])
        docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        assert path.name in docstring


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
