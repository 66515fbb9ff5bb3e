import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_samples import HOSTILE, foreign_view, hostile_view, sample_view

from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.markdown import escape, fenced, to_markdown, to_summary

RENDERER = MarkdownIt("gfm-like", {"html": True, "linkify": False})


def test_the_verdict_table_comes_first():
    lines = [line for line in to_markdown(sample_view()).splitlines() if line]
    assert lines[0] == "# ✗ smoke"
    assert lines[2].startswith("| Verdict | Test set |")
    assert lines[4].startswith("| ✗ FAIL | ddp2 |")


def test_columns_that_are_empty_throughout_are_left_out():
    lines = to_markdown(foreign_view()).splitlines()
    assert lines[4:7] == [
        "| Verdict | Test set | Loss-only gate |",
        "| --- | --- | --- |",
        "| ✓ PASS | new.csv | would pass (0.1%) |",
    ]
    page = to_html(foreign_view())
    assert 'data-label="Loss-only gate"' in page
    assert not re.search("<button[^>]*>(Cause|Onset|Degrees|Techniques|Cost)</button>", page)
    assert not re.search('data-label="(Cause|Onset|Degrees|Techniques|Cost)"', page)
    titles = "| Verdict | Test set | Degrees | Techniques | Onset | Loss-only gate | Wall | Cause |"
    assert titles in to_markdown(sample_view())


def test_each_set_that_is_not_pass_has_one_sentence():
    sentences = re.findall(r"^- . \w+ \*\*.*", to_markdown(sample_view()), re.MULTILINE)
    assert len([line for line in sentences if "FAIL" in line]) == 3
    assert any("they are divided by the data" in line for line in sentences)


def test_it_says_where_to_look_and_which_tensors_deviate():
    text = to_markdown(sample_view())
    assert "  - look at: attention.wq, wk and wv" in text
    assert "**What this means:** `docs/causes.md#gradient-scale`\n" in text
    assert "| Tensor | Measured | Limit | Times | Step |" in text
    assert "## Where the tolerances come from" in text
    assert "| fsdp2-rerun | rerun | bit-identical | bit-identical |" in text


def test_it_renders_as_tables_and_details():
    page = RENDERER.render(to_markdown(sample_view()))
    assert page.count("<details>") == page.count("</details>") == 12
    assert "<td>✗ FAIL</td>" in page
    assert "| --- |" not in page


def test_every_row_has_every_cell():
    page = RENDERER.render(to_markdown(hostile_view()))
    for table in re.findall(r"<table>.*?</table>", page, re.DOTALL):
        widths = {len(re.findall(r"<t[hd]", row)) for row in table.split("<tr>")[1:]}
        assert len(widths) == 1


def test_hostile_names_are_inert():
    page = RENDERER.render(to_markdown(hostile_view()))
    assert "<script" not in page
    assert "<img" not in page
    assert "<a " not in page
    assert "&lt;/script&gt;" in page


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp", "Cf"]), min_size=1))
@example("__a__ _b_ c_d :+1: http://e.org @f #1 *g* ~~h~~ [i](j) <k> &amp; \\* | `l`")
def test_escaped_text_renders_as_itself(text):
    (inline,) = MarkdownIt("gfm-like", {"linkify": False}).parseInline(f"x {escape(text)} x")
    assert {child.type for child in inline.children} <= {"text", "text_special"}
    assert "".join(child.content for child in inline.children) == f"x {text} x"


def test_names_stay_readable_in_the_source():
    assert escape("fsdp2_tp2: the control's") == "fsdp2_tp2: the control's"


@pytest.mark.parametrize("text", ["plain", "``` fence", "````", HOSTILE])
def test_a_code_block_holds_any_text(text):
    (block,) = MarkdownIt().parse(fenced(text))
    assert (block.type, block.content) == ("fence", f"{text}\n")


def test_foreign_curves_render_without_details_that_are_not_there():
    text = to_markdown(foreign_view())
    assert "new.csv" in text
    assert "None" not in text


def test_a_summary_that_fits_is_the_whole_report():
    assert to_summary(sample_view()) == to_markdown(sample_view())


@pytest.mark.parametrize("room", [500, 6000, 20_000])
def test_a_summary_is_cut_to_what_fits_and_says_so(room):
    summary = to_summary(sample_view(), room)
    assert len(summary.encode()) <= room
    assert summary.startswith("# ✗ smoke")
    assert "The rest is in report.md" in summary
    page = RENDERER.render(summary)
    assert page.count("<details>") == page.count("</details>")


def test_what_would_change_a_verdict_is_said():
    assert "What would change this verdict:" in to_markdown(sample_view())
