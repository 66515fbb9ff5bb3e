"""What CI does with skips, on tests of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = {
    "test_missing_browser": 'def test_one(): pytest.skip("no browser")',
    "test_missing_module": 'pytest.importorskip("no_such_module")',
    "test_as_root": 'def test_one(): pytest.skip("root writes everywhere")',
    "test_other_release": 'pytest.skip("needs torchtitan 0.3, found 0.2", allow_module_level=True)',
}
MISSING = ["test_missing_browser", "test_missing_module"]


def refused(folder, **environment):
    """Names of the examples that do not come out as skipped."""
    kept = {name: value for name, value in os.environ.items() if name != "CONVERGE_NO_SKIPS"}
    listing = ("-q", "-rA", "--continue-on-collection-errors", "-p", "no:cacheprovider")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *listing, str(folder)],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(HERE)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = result.stdout.partition("short test summary info")[2].splitlines()
    skipped, broken = (
        [name for name in EXAMPLES if any(f"{name}.py" in x for x in lines if x.startswith(words))]
        for words in ("SKIPPED", ("FAILED", "ERROR"))
    )
    assert sorted(skipped + broken) == sorted(EXAMPLES), result.stdout
    return broken


def test_what_is_missing_fails_in_ci_and_is_skipped_elsewhere(tmp_path):
    shutil.copy(HERE / "conftest.py", tmp_path)
    for name, text in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(f"import pytest\n{text}\n")
    assert refused(tmp_path) == []
    assert refused(tmp_path, CONVERGE_NO_SKIPS="1") == MISSING
