"""Every class of cause has its section in the page, with its links to the web alone."""

import pytest
from report_samples import sample_view

from converge_harness.model import CauseClass
from converge_harness.report.renderers.html_page import cause_section, to_html


@pytest.mark.parametrize("kind", CauseClass)
def test_every_class_has_a_section_without_links_into_the_project(kind):
    section = cause_section(kind)
    assert "<strong>Look further.</strong>" in section
    assert 'href="http' in section or "href" not in section


def test_a_page_has_the_section_of_each_failed_set():
    view = sample_view()
    kinds = [each.verdict.cause_class for each in view.tests if each.verdict.cause_class]
    page = to_html(view)
    assert kinds
    for kind in kinds:
        assert cause_section(kind) in page
