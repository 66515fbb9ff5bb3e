"""Size of report.html and its time to ready in headless Chromium: ``nox -s bench -- report``.

Curves are synthetic (a matrix of 12 test sets, a control and 3 repeats, with four signals each);
the usual code makes the report from them. A page is ready when its verdict table reacts and the
figures on its first screen are drawn, counted from the start of the navigation. The other figures
of the overview follow, and those of a test set when they are scrolled to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from converge_harness.judge import calibrate, compare_runs, curve_differences
from converge_harness.model import JUDGED_SIGNALS, Evidence, Judgement, Verdict
from converge_harness.report import ReportView, build_view
from converge_harness.report.renderers.html_page import to_html

SETS, REPEATS = 12, 3
MEGABYTE = 1e6
LIMIT_MB, LIMIT_S = 6.0, 2.0
READY = "document.documentElement.dataset.ready"


def view_of(steps: int) -> ReportView:
    """A matrix whose sets differ from the control by noise only."""
    rng = np.random.default_rng(0)
    at = np.arange(1, steps + 1)
    clean = 3 + np.exp(-at / steps * 5) + 0.02 * rng.normal(size=steps)

    def run(name: str, noise: float) -> Evidence:
        signals = {each: clean * (1 + noise * rng.normal(size=steps)) for each in JUDGED_SIGNALS}
        return Evidence(name, name, at, signals)

    control = run("control", 0.0)
    repeats = [run(f"repeat-{index}", 1e-7) for index in range(REPEATS)]
    tests = [run(f"set-{index}", 1e-7) for index in range(SETS)]
    learnt = calibrate(control, repeats)
    return build_view(
        title=f"{SETS} sets x {steps} steps",
        verdicts=[Verdict(test.name, "control", Judgement.PASS) for test in tests],
        evidences=[control, *repeats, *tests],
        comparisons={test.name: compare_runs(test, control, learnt) for test in tests},
        calibrations={"control": learnt},
        repeats={each.name: curve_differences(each, control) for each in repeats},
        entropy_floor=2.9,
    )


def seconds_to_ready(page_file: Path, chromium: str, rounds: int) -> list[float]:
    """Times of page loads in a running browser, without a cache."""
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(rounds):
            context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.locator("html[data-ready]").wait_for(state="attached", timeout=120_000)
            found.append(int(page.evaluate(READY)) / 1e3)
            context.close()
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="page loads per size")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no browser: apt-get install chromium (or google-chrome on the PATH)")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for steps in (3_000, 100_000):
            view = view_of(steps)
            started = time.perf_counter()
            page = to_html(view).encode()
            rendered = time.perf_counter() - started
            page_file = Path(folder) / f"{steps}.html"
            page_file.write_bytes(page)
            ready = seconds_to_ready(page_file, chromium, arguments.rounds)
            rows.append(
                {
                    "curves": SETS,
                    "steps": steps,
                    "megabytes": round(len(page) / MEGABYTE, 2),
                    "render_s": round(rendered, 2),
                    "ready_s": {
                        "best": min(ready),
                        "median": statistics.median(ready),
                        "worst": max(ready),
                    },
                }
            )
    load = os.getloadavg()[0]
    print(f"{'curves':>7} {'steps':>8} {'MB':>6} {'render s':>9}   ready s, best/median/worst")
    for row in rows:
        times = "/".join(f"{value:.2f}" for value in row["ready_s"].values())
        print(
            f"{row['curves']:>7} {row['steps']:>8} {row['megabytes']:>6} {row['render_s']:>9}   "
            f"{times}"
        )
    print(f"wanted: under {LIMIT_MB:.0f} MB for 3,000 steps, ready in {LIMIT_S:.0f} s")
    print(f"load average {load:.1f} on {os.cpu_count()} cores: other work makes times longer")
    if arguments.out:
        arguments.out.write_text(json.dumps({"load": load, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
