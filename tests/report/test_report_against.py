"""What reports say of a change, set beside set."""

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
from report_samples import sample_view

from converge_harness.cli.exit_codes import ExitCode, exit_code
from converge_harness.model import Judgement, Sameness
from converge_harness.report import Against, ChangedSet
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.json_document import to_json
from converge_harness.report.renderers.markdown import to_markdown
from converge_harness.report.text import ABSENT

SCHEMA = json.loads(files("converge_harness.report").joinpath("report.schema.json").read_text())
PASS, FAIL, INVALID = Judgement.PASS, Judgement.FAIL, Judgement.INVALID
SAME = ChangedSet("tp2", Sameness.BITWISE, "every number is the same", PASS, PASS)
CONTROL = ChangedSet("fsdp2", Sameness.BITWISE)
ROUNDED = ChangedSet("pp2", Sameness.ROUNDING, "loss differs by no more than repeats", FAIL, FAIL)
OTHER = ChangedSet("cp2", Sameness.DIFFERENT, "gradients are <b>2</b> times the base's", PASS, FAIL)


def against(*sets):
    return Against("HEAD~1", "0123456789ab", "/home/me/fork", "v1-dirty", sets)


def test_only_what_is_the_same_in_every_number_is_called_bitwise_identical():
    assert against(CONTROL, SAME).headline == (
        "Bitwise identical: 2 sets are the same as at HEAD~1 (0123456789ab), in every number."
    )
    assert against(CONTROL, SAME, ROUNDED, OTHER).headline == (
        "Of 4 sets against HEAD~1 (0123456789ab): 2 bitwise the same, 1 same within rounding, "
        "1 different."
    )


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        ((CONTROL, SAME), ExitCode.PASS),
        ((CONTROL, ROUNDED), ExitCode.PASS),  # FAIL before and after
        ((CONTROL, OTHER), ExitCode.FAIL),
        ((replace(ROUNDED, before=PASS, after=INVALID),), ExitCode.FAIL),
        ((replace(ROUNDED, before=FAIL, after=PASS),), ExitCode.PASS),
        ((replace(SAME, sameness=Sameness.UNKNOWN),), ExitCode.FAIL),
        ((), ExitCode.FAIL),
    ],
)
def test_what_is_different_or_worse_or_not_compared_fails(sets, code):
    assert exit_code([], against(*sets)) is code


def test_every_report_has_each_set_its_change_and_its_verdicts():
    view = replace(sample_view(), against=against(CONTROL, SAME, OTHER))
    told = json.loads(to_json(view))
    jsonschema.Draft202012Validator(SCHEMA).validate(told)
    assert told["against"]["sets"][-1] == {
        "name": "cp2",
        "change": "different",
        "detail": "gradients are <b>2</b> times the base's",
        "verdict_before": "PASS",
        "verdict_after": "FAIL",
    }
    assert told["against"]["same"] is False
    markdown, page = to_markdown(view), to_html(view)
    assert "| cp2 | different | PASS → FAIL |" in markdown
    assert f"| fsdp2 | bitwise the same | {ABSENT} |" in markdown
    for text in (markdown, page):
        assert "1 different" in text
        assert "<b>2</b>" not in text


def test_a_report_of_no_comparison_says_nothing_of_one():
    assert "against" not in json.loads(to_json(sample_view()))
    assert '<table class="against">' not in to_html(sample_view())
    assert '<table class="against">' in to_html(replace(sample_view(), against=against(SAME)))
