"""The report on the page of a GitHub Actions job."""

import pytest
from rich.console import Console

from converge_harness.cli.verdicts import show_verdicts
from converge_harness.errors import StoreError
from converge_harness.model import Judgement, Verdict
from converge_harness.report import build_view
from converge_harness.report.renderers.markdown import SUMMARY_BYTES

VIEW = build_view(title="smoke", verdicts=[Verdict("ddp2", "fsdp2", Judgement.PASS)])


def show(monkeypatch, path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    show_verdicts(Console(quiet=True), VIEW, None)


def test_the_report_follows_what_the_summary_holds(monkeypatch, tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    show(monkeypatch, path)
    lines = path.read_text().splitlines()
    assert lines[:2] == ["before", "# ✓ smoke"]


def test_a_full_summary_is_not_made_too_large_to_be_shown(monkeypatch, tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("x" * (SUMMARY_BYTES - 200))
    show(monkeypatch, path)
    assert path.stat().st_size <= SUMMARY_BYTES


def test_a_summary_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    with pytest.raises(StoreError, match=r"GITHUB_STEP_SUMMARY=.*No such file"):
        show(monkeypatch, tmp_path / "none" / "summary.md")


def test_elsewhere_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    show_verdicts(Console(quiet=True), VIEW, None)
    assert list(tmp_path.iterdir()) == []
