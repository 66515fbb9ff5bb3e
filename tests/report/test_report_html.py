import base64
import gzip
import hashlib
import json
import re

import pytest
from report_samples import HOSTILE, SPECS, foreign_view, hostile_view, sample_view

from converge_harness.errors import StoreError
from converge_harness.report import write_reports
from converge_harness.report.renderers.assets import PLOTLY_SHA256, packed_plotly
from converge_harness.report.renderers.html_page import to_html

MEGABYTE = 1_000_000


def payload(page):
    return json.loads(re.search(r'id="payload">(.*?)</script>', page, re.DOTALL)[1])


def test_every_report_is_written(tmp_path):
    paths = write_reports(sample_view(), tmp_path / "new folder")
    assert [str(path.relative_to(tmp_path / "new folder")) for path in paths] == [
        "report.html",
        "report.md",
        "report.json",
        "junit.xml",
        "report.npz",
        "plots/overview.png",
        "plots/overview.svg",
        "plots/differences.png",
        "plots/differences.svg",
        "plots/grad_norm_ratio.png",
        "plots/grad_norm_ratio.svg",
    ]
    assert all(path.stat().st_size > 0 for path in paths)


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        write_reports(foreign_view(), tmp_path / "file" / "reports")


def test_twelve_curves_of_3000_steps_stay_small():
    assert len(to_html(sample_view(3000)).encode()) < 6 * MEGABYTE


def test_the_script_that_is_not_ours_is_the_file_that_was_published():
    script = gzip.decompress(base64.b64decode(packed_plotly()))
    assert hashlib.sha256(script).hexdigest() == PLOTLY_SHA256
    assert b"Licensed under the MIT license" in script[:300]


def test_drawn_curves_are_downsampled():
    drawn = payload(to_html(sample_view(10_000, SPECS[:2])))["series"]
    base64_per_point = 16 / 3
    assert all(
        len(series["y"]["bdata"]) <= 3000 * base64_per_point + 4 for series in drawn.values()
    )


def test_figures_refer_to_series_that_are_there():
    data = payload(to_html(sample_view()))
    used = {trace["series"] for figure in data["figures"].values() for trace in figure["traces"]}
    assert used == set(data["series"])


def test_the_page_names_no_other_place():
    page = to_html(sample_view())
    ours = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", ours)
    assert "http" not in re.sub(r"http-equiv", "", ours)


def test_hostile_names_do_not_leave_their_place():
    page = to_html(hostile_view())
    assert HOSTILE not in page
    assert "<script>window" not in page
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 3


def test_what_to_look_at_stands_under_the_cause_and_tensors_under_their_check():
    page = to_html(sample_view())
    assert "<p>Look at: where gradients are averaged over dp_replicate" in page
    assert '<tr class="deviations fail">' in page
    assert "Where the tolerances come from" in page
    assert page.count('<details class="tensors">') == 11
    assert '<details class="tensors" open' not in page


def test_the_same_view_gives_the_same_page():
    assert to_html(sample_view()) == to_html(sample_view())
