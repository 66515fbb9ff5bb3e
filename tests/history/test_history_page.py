"""The page of the history: what it says, and that it opens offline in a real browser."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import CHROMIUM, MISSING
from history_samples import deviation, night, nights_with_a_step, result
from playwright.sync_api import sync_playwright

from converge_harness.history import Changed, History
from converge_harness.history.overview import overview
from converge_harness.history.page import changes_text, headline, to_page
from converge_harness.history.trend import DEFINITION
from converge_harness.model import Judgement

GENERATED = datetime(2026, 4, 1, tzinfo=UTC)
HOSTILE = (
    """</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">'"|`$x$`[a](b)"""
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """One set with a step, and one whose every name is hostile, with gaps, zero and NaN."""
    history = History(tmp_path_factory.mktemp("history") / "history.sqlite")
    nights = []
    for day, each in enumerate(nights_with_a_step(40, at=30)):
        crashed = day in (20, 21)
        sizes = (deviation(HOSTILE, 0.0 if day < 15 else 1e-8), deviation("bad", float("nan")))
        hostile = result(
            HOSTILE,
            Judgement.ERROR if crashed else Judgement.PASS,
            measurements=() if crashed else sizes,
        )
        facts = each.circumstances | {HOSTILE: f"{HOSTILE}{day >= 15}"}
        nights.append(replace(each, results=(*each.results, hostile), circumstances=facts))
    history.append_all(nights)
    return overview(history)


@pytest.fixture(scope="module")
def page_file(sets, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "history.html"
    path.write_text(to_page(sets, source_file=HOSTILE, generated=GENERATED), encoding="utf-8")
    return path


def test_the_headline_says_how_it_stands_and_since_when(sets):
    assert headline(sets) == (
        "1 of 2 test sets does not pass; over 40 nights, the last step upwards was in the night of "
        "2026-03-31."
    )
    assert headline(()) == "No night is in the history."


def test_a_quiet_history_says_so(tmp_path):
    history = History(tmp_path / "history.sqlite")
    history.append_all(night(day) for day in range(10))
    (quiet,) = overview(history)
    assert quiet.moves == ()
    assert headline([quiet]) == (
        "1 test set, and nothing but PASS; over 10 nights, no deviation went up for good."
    )
    assert "Nowhere: in every test set" in to_page(
        [quiet], source_file="history.sqlite", generated=GENERATED
    )


def test_a_history_too_young_for_a_trend_claims_none(tmp_path):
    history = History(tmp_path / "history.sqlite")
    history.append_all(night(day) for day in range(4))
    sets = overview(history)
    assert headline(sets) == (
        "1 test set, and nothing but PASS; over 4 nights, too few to tell a trend."
    )
    page = to_page(sets, source_file="history.sqlite", generated=GENERATED)
    assert "Too few nights to tell: steps are looked for from night 5 on." in page
    assert "Nowhere" not in page


def test_what_changed_is_listed_versions_first():
    changed = (
        Changed("commit", "a" * 40, "b" * 40 + "-dirty"),
        Changed("driver", "570.1", "580.2"),
        Changed("torch", "", "2.13.0"),
    )
    assert changes_text(changed) == (
        "driver 570.1 → 580.2, torch unknown → 2.13.0, commit aaaaaaaaaa → bbbbbbbbbb-dirty"
    )
    assert changes_text(changed, 1) == "driver 570.1 → 580.2 and 2 more"
    assert changes_text((Changed(DEFINITION, "x", "y"),)) == "the experiment file"
    assert changes_text(()) == "nothing that is recorded; look at the machine"


def test_signals_that_move_in_one_night_are_one_row(tmp_path):
    history = History(tmp_path / "history.sqlite")
    for each in nights_with_a_step(30, at=20):
        (loss, _) = each.results[0].measurements
        both = (loss, replace(loss, check="gradients-envelope", measured=loss.measured * 3))
        history.append(replace(each, results=(replace(each.results[0], measurements=both),)))
    (one,) = overview(history)
    assert [len(move.steps) for move in one.moves] == [2]
    assert one.verdict_since.day == 21


def test_since_and_newest_leave_out_nights(tmp_path):
    history = History(tmp_path / "history.sqlite")
    history.append_all(night(day) for day in range(10))
    assert len(overview(history, newest=3)[0].nights) == 3
    assert len(overview(history, since=night(6).finished)[0].nights) == 4
    assert overview(history, since=night(20).finished) == ()


def test_the_page_names_no_other_host_but_in_plotly(page_file):
    whole = page_file.read_text(encoding="utf-8")
    ours = whole[: whole.index('id="plotly"')]
    assert "http:" not in ours
    assert "https:" not in ours
    assert HOSTILE not in whole


@pytest.mark.skipif(not CHROMIUM, reason=MISSING)
@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_offline_and_draws_its_trends_with_hostile_names_inert(page_file, width):
    complaints, requests = [], []
    with sync_playwright() as playwright:
        # --no-sandbox: CI containers run as root, where Chromium's sandbox refuses to start.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(offline=True, viewport={"width": width, "height": 900})
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{page_file.as_uri()}#%")  # a link that somebody broke
        page.locator("html[data-ready]").wait_for(state="attached", timeout=60_000)
        rows = page.locator(".moves tbody tr")
        assert "torch 2.12.0 → 2.13.0" in rows.first.inner_text()
        assert rows.first.locator("th").inner_text() == "2026-03-31"
        # The other set: from zero to something, in its sixteenth night.
        assert "0 → 1e-8" in rows.nth(1).inner_text()
        for plot in page.locator(".plot").all():
            plot.scroll_into_view_if_needed()
            plot.locator(".scatterlayer .trace path.js-line").first.wait_for(
                state="attached", timeout=30_000
            )
        labels = page.locator(".annotation-text").all_text_contents()
        assert any("torch 2.12.0 → 2.13.0" in label for label in labels)
        assert any("<img src=x" in label for label in labels)
        assert page.evaluate("window.pwned") is None
        assert page.locator("img, iframe, svg a").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        tags = ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]
        rules = Axe().run(page, options={"runOnly": {"type": "tag", "values": tags}}).response
        assert [each["id"] for each in rules["violations"]] == []
        browser.close()
    assert complaints == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in requests)
