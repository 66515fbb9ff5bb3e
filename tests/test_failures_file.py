"""``failures.json``: what torchrun's agent writes is what converge reads, or is refused."""

import json
from pathlib import Path

import pytest

from converge_harness.run_folder.failures import FailureDocument, read_failures, write_failures
from converge_harness.run_folder.layout import FAILURES


def test_what_is_written_is_read(tmp_path: Path) -> None:
    failure: FailureDocument = {
        "rank": 1,
        "exitcode": -9,
        "timestamp": 1_790_000_000,
        "error_file": "/logs/attempt_0/1/error.json",
    }
    write_failures(tmp_path / FAILURES, [failure])
    assert read_failures(tmp_path) == [failure]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "is a list, not a JSON object"),
        ({}, "lacks failures"),
        ({"failures": {}}, "failures"),
        ({"failures": [{"rank": 1}]}, "lacks exitcode"),
        ({"failures": [{"rank": "1", "exitcode": 1}]}, "rank"),
        ({"failures": [{"rank": 1, "exitcode": 1, "error_file": 3}]}, "error_file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, value: object, says: str) -> None:
    (tmp_path / FAILURES).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=says):
        read_failures(tmp_path)
