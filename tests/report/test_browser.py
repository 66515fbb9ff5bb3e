"""The page in a real browser, offline: what a person sees and does."""

import re
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import CHROMIUM, MISSING
from pass_samples import resumed_view
from playwright.sync_api import expect, sync_playwright
from report_samples import foreign_view, hostile_view, sample_view

from converge_harness.report import write_reports

pytestmark = [pytest.mark.longest, pytest.mark.skipif(not CHROMIUM, reason=MISSING)]
VIEWS = {
    "sample": sample_view,
    "hostile": hostile_view,
    "foreign": foreign_view,
    "resumed": resumed_view,
}


def wait_until_ready(page):
    # Generous: the machine may be busy.
    page.locator("html[data-drawn]").wait_for(state="attached", timeout=60_000)


def wait_until(page, condition):
    """Wait for a JavaScript condition.

    Not by playwright's wait_for_function: it polls through eval, which the page's own security
    policy forbids.
    """
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"not within 30 s: {condition}")


def violations(page):
    """Rules of axe-core that the page breaks: rule to elements."""
    tags = ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]
    # Without a selector for every element that is right, which takes most of the time.
    only = {"runOnly": {"type": "tag", "values": tags}, "resultTypes": ["violations"]}
    found = Axe().run(page, options=only).response
    return {each["id"]: [node["html"] for node in each["nodes"]] for each in found["violations"]}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # --no-sandbox: CI containers run as root, where Chromium's sandbox refuses to start.
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    return {name: write_reports(view(), folder / name)[0].as_uri() for name, view in VIEWS.items()}


@pytest.fixture
def opened(browser, reports):
    """Open a report offline; in the end it must have asked for nothing and not complained."""
    contexts, complaints, requests = [], [], []

    def open_page(name="sample", fragment="", **options):
        context = browser.new_context(
            offline=True, **({"viewport": {"width": 1280, "height": 900}} | options)
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(reports[name] + fragment)
        wait_until_ready(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in requests)


def visible_rows(page):
    return page.locator(".verdicts tbody tr:visible th").all_inner_texts()


@pytest.mark.parametrize("name", list(VIEWS))
def test_opens_offline_with_its_table_and_plots(opened, name, record_property):
    page = opened(name)
    assert page.locator(".verdicts tbody tr").count() == {"sample": 12, "resumed": 4}.get(name, 1)
    assert page.locator("#overview-loss .scatterlayer .trace").count() >= 2
    assert page.locator(
        "#overview-difference .scatterlayer .trace path.js-line"
    ).first.get_attribute("d")
    record_property("ready_ms", page.evaluate("document.documentElement.dataset.ready"))


def test_hostile_names_are_inert_and_shown_as_they_are(opened):
    page = opened("hostile")
    page.locator(".set summary").first.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, iframe").count() == 0
    assert "<img src=x" in visible_rows(page)[0]
    assert (
        page.locator(".plot a").evaluate_all(
            "links => links.filter((a) => a.closest('svg')).length"
        )
        == 0
    )


def test_a_missed_escape_would_still_not_run(browser, reports, tmp_path):
    # As if a template printed a name unescaped: the policy of the page itself stops the script.
    page_file = tmp_path / "missed.html"
    path = urllib.request.url2pathname(urllib.parse.urlsplit(reports["foreign"]).path)
    whole = Path(path).read_text(encoding="utf-8")
    page_file.write_text(
        whole.replace("</h1>", "<script>window.pwned = 1</script></h1>", 1), encoding="utf-8"
    )
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto(page_file.as_uri())
    wait_until_ready(page)
    assert page.evaluate("window.pwned") is None
    context.close()


def test_the_table_is_filtered_and_sorted(opened):
    page = opened()
    page.get_by_role("button", name="FAIL 3").click()
    assert visible_rows(page) == ["ddp2", "fsdp2_pp2_1f1b", "float8_async_tp"]
    assert page.locator("section.set[data-verdict=PASS]:visible").count() == 0
    page.get_by_role("button", name="all 12").click()
    page.get_by_role("button", name="Test set").click()
    names = visible_rows(page)
    assert names == sorted(names)
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Test set")


def test_sets_are_found_by_any_word_of_their_row(opened):
    page = opened()
    page.keyboard.press("/")
    page.keyboard.type("PP compile")
    assert visible_rows(page) == []
    page.get_by_role("searchbox").fill("pp 2 interleaved")
    assert visible_rows(page) == ["fsdp2_pp2_interleaved"]
    assert page.locator("section.set[data-verdict]:visible").count() == 1


def test_a_set_opens_from_a_deep_link(opened):
    page = opened(fragment="#set-fsdp2-tp2")
    section = page.locator("#set-fsdp2-tp2")
    assert section.locator("> details").get_attribute("open") is not None
    section.locator(".js-line").first.wait_for(timeout=30_000)
    page.locator("html[data-drawn]").wait_for(timeout=30_000)  # charts above it take their places
    assert 0 <= section.locator("h2").bounding_box()["y"] < 100


def test_a_broken_link_still_opens_the_page(opened):
    page = opened("foreign", "#%E0")
    assert page.locator(".verdicts tbody tr").count() == 1


def test_sections_of_passing_sets_are_closed_until_asked_for(opened):
    page = opened()
    assert page.locator("#set-ddp2 > details").get_attribute("open") is not None
    assert page.locator("#set-fsdp2-tp2 > details").get_attribute("open") is None
    page.locator(".verdicts").get_by_role("link", name="fsdp2_tp2", exact=True).click()
    page.locator("#set-fsdp2-tp2 .js-line").first.wait_for(timeout=30_000)


def test_zoom_is_linked_across_panels(opened):
    page = opened()
    page.evaluate("Plotly.relayout('overview-loss', {'xaxis.range': [5, 10]})")
    wait_until(
        page,
        "['overview-difference', 'overview-ratio'].every((id) =>"
        " JSON.stringify(document.getElementById(id).layout.xaxis.range) === '[5,10]')",
    )


def test_a_zoom_ends_on_every_panel_of_its_row(opened):
    page = opened()
    page.evaluate("Plotly.relayout('overview-loss', {'xaxis.range': [5, 10]})")
    zoomed = "document.getElementById('overview-ratio').layout.xaxis.range"
    wait_until(page, f"JSON.stringify({zoomed}) === '[5,10]'")
    page.evaluate("Plotly.relayout('overview-ratio', {'xaxis.autorange': true})")
    wait_until(page, "document.getElementById('overview-loss')._fullLayout.xaxis.range[1] > 19")


def test_a_chart_is_zoomed_and_moved_by_keys(opened):
    page = opened()
    page.locator("#overview-loss").focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    shown = "document.getElementById('overview-ratio').layout.xaxis.range ?? [0, 99]"
    first, last = page.evaluate(shown)
    assert 1 < first < last
    assert last - first < 12
    page.keyboard.press("0")
    assert page.evaluate(shown) != [first, last]


def test_a_pointer_on_one_panel_is_seen_on_the_others_of_its_row(opened):
    page = opened()
    plot = page.locator("#overview-loss")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = page.locator("#overview-difference .cursor span")
    expect(label).to_have_text(re.compile(r"^step 1\d: (0|-?\d\.\d\de-\d+)$"))
    expect(page.locator("#overview-loss .cursor")).to_have_count(0)
    page.mouse.move(0, 0)
    expect(label).to_have_count(0)


def test_the_slider_smooths_losses_and_leaves_what_was_measured_behind(opened):
    page = opened()
    traces = "document.getElementById('overview-loss').data"
    before = page.evaluate(f"{traces}.length")
    page.locator("#smoothing").fill("0.9")
    wait_until(page, f"{traces}.length > {before}")
    rough = page.evaluate(f"Array.from({traces}[0].y).slice(-1)[0]")
    smooth = page.evaluate(f"Array.from({traces}.slice(-1)[0].y).slice(-1)[0]")
    assert smooth > rough + 0.1  # a falling loss: its average lags behind
    assert page.locator("output").inner_text() == "0.9"


def test_gradients_outside_their_limits_are_crossed_on_the_heat_map(opened):
    page = opened()
    plot = page.locator("#set-ddp2-gradients")
    plot.scroll_into_view_if_needed()
    plot.locator(".heatmaplayer image").wait_for(timeout=30_000)
    heat, crosses = (f"document.getElementById('set-ddp2-gradients').data[{i}]" for i in (0, 1))
    assert page.evaluate(f"[{heat}.z.length, {heat}.z[0].length]") == [39, 3]
    assert page.evaluate(f"{crosses}.x.length") == 39 * 3
    assert "tok_embeddings.weight" in plot.locator(".ytick text").all_text_contents()[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_chosen_by_the_system_until_somebody_chooses(opened, scheme):
    page = opened(color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    button = page.get_by_role("button", name="Theme")
    button.click()
    assert page.evaluate(paper) != "rgb(255, 255, 255)"
    button.click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    assert button.inner_text() == "Theme: light"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["sample", "hostile", "resumed"])
def test_accessibility(opened, name, scheme):
    page = opened(name, color_scheme=scheme)
    # Every section open, and every figure drawn.
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    page.locator(".plot .main-svg").first.wait_for(timeout=30_000)
    assert violations(page) == {}


def test_the_accessibility_rules_see_what_is_wrong(opened):
    page = opened("foreign")
    page.evaluate("document.querySelector('#theme').textContent = ''")
    page.evaluate("document.querySelector('h1').style.color = '#ddd'")
    assert {"button-name", "color-contrast"} <= set(violations(page))


@pytest.mark.parametrize("width", [390, 1280])
def test_joints_of_a_run_in_passes_are_labelled_without_overlap(opened, width):
    page = opened("resumed", viewport={"width": width, "height": 900})
    plot = page.locator("#set-battered-difference-grad_norm")
    plot.scroll_into_view_if_needed()
    plot.locator(".js-line").first.wait_for(timeout=30_000)
    # The legend has been lifted over the labels when the picture has made room for both.
    wait_until(
        page,
        "document.getElementById('set-battered-difference-grad_norm').layout.legend.y > 1.1",
    )
    texts = plot.locator(".annotation").all_text_contents()
    assert len(texts) == 6
    assert "after 2: from step 4, FSDP 4 -> FSDP 2" in texts
    boxes = [each.bounding_box() for each in plot.locator(".annotation-text").all()]
    boxes.append(plot.locator(".legend").bounding_box())
    frame = plot.bounding_box()
    for index, one in enumerate(boxes):
        assert one["x"] >= frame["x"]
        assert one["x"] + one["width"] <= frame["x"] + frame["width"]
        for other in boxes[index + 1 :]:
            apart_x = min(one["x"] + one["width"], other["x"] + other["width"]) - max(
                one["x"], other["x"]
            )
            apart_y = min(one["y"] + one["height"], other["y"] + other["height"]) - max(
                one["y"], other["y"]
            )
            assert apart_x <= 0 or apart_y <= 1


def test_ticks_of_a_ratio_of_nearly_equal_curves_are_told_apart(opened):
    plot = opened("resumed").locator("#overview-ratio")
    plot.scroll_into_view_if_needed()
    plot.locator(".ytick text").first.wait_for(timeout=30_000)
    ticks = plot.locator(".ytick text").all_text_contents()
    assert len(set(ticks)) == len(ticks) > 2
    assert "1" in ticks


def test_a_set_can_be_hidden_with_the_keyboard(opened):
    page = opened()
    page.locator(".legend button").first.focus()
    page.keyboard.press("Enter")
    wait_until(
        page,
        "document.getElementById('overview-loss').data.some((trace) => trace.visible === false)",
    )
    assert page.locator(".legend button").first.get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(opened, width, scheme):
    page = opened(viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is (scheme == "light")


def test_without_javascript_the_verdicts_are_still_there(browser, reports):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(reports["sample"])
    assert page.locator(".verdicts tbody tr:visible").count() == 12
    assert page.get_by_text("they are divided by the data-parallel degree").first.is_visible()
    context.close()


def test_it_prints(opened):
    page = opened()
    page.emulate_media(media="print")
    assert page.pdf(print_background=True).startswith(b"%PDF")
