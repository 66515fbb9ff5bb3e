"""Screenshots of a report on a phone, a laptop and a large screen.

``python benchmarks/screenshots.py REPORT.html FOLDER [--set NAME]``: ``NAME`` is the fragment of
a test set's section (``set-float8``), which is then also captured, in light and dark mode, and its
tree of modules, if it has one, on a phone and a laptop.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

WIDTHS = (390, 1280, 1920)
HEIGHT = 1400


def ready(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("html[data-drawn]").wait_for(state="attached", timeout=120_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", dest="section", help="fragment of a test set: set-NAME")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no browser: apt-get install chromium (or google-chrome on the PATH)")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    address = arguments.report.resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": HEIGHT})
            ready(page, address)
            page.screenshot(path=arguments.folder / f"top-{width}.png")
            page.close()
        for scheme in ("light", "dark") if arguments.section else ():
            page = browser.new_page(
                viewport={"width": WIDTHS[1], "height": HEIGHT}, color_scheme=scheme
            )
            ready(page, f"{address}#{arguments.section}")
            section = page.locator(f"#{arguments.section}")
            for plot in section.locator(".plot").all():
                plot.scroll_into_view_if_needed()
                plot.locator(".main-svg").first.wait_for()
            section.screenshot(path=arguments.folder / f"{arguments.section}-{scheme}.png")
            page.close()
        for width in WIDTHS[:2] if arguments.section else ():
            page = browser.new_page(viewport={"width": width, "height": HEIGHT})
            ready(page, f"{address}#{arguments.section}")
            tree = page.locator(f"#{arguments.section} .scroll:has(table.modules)")
            if tree.count():
                tree.screenshot(path=arguments.folder / f"modules-{width}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
