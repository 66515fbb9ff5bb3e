"""What a rank of a dry run prints is checked once, where it is read."""

import json

import pytest

from converge_harness.run_folder.dry_run import answer, read_answer

WHOLE = {"rank": 0, "problems": [], "seconds": 1.5, "peak_rss_bytes": 4096, "peak_bytes": 12}


def test_an_answer_is_read_as_it_was_printed():
    assert read_answer(answer(WHOLE).encode()) == {"schema": 1, **WHOLE}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "is a list"),
        (json.dumps(WHOLE), "schema is None"),
        (answer({**WHOLE, "peak_bytes": "12"}), "peak_bytes is '12', which is not a count"),
        (answer({"rank": 0, "problems": []}), "lacks seconds, peak_rss_bytes"),
        ("Traceback", "Expecting value"),
    ],
)
def test_anything_else_is_no_answer(content, words):
    with pytest.raises(ValueError, match=words):
        read_answer(content.encode())
