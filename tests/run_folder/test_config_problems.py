"""The answer of a rank that checks configs."""

import pytest

from converge_harness.run_folder.config_problems import answer, read_answer

PROBLEM = {"job": "/a/job.json", "key": "training.step", "message": "no such key", "valid": ["x"]}


def test_what_is_printed_is_read():
    for problems in ([], [PROBLEM, {**PROBLEM, "key": "", "valid": []}]):
        assert read_answer(answer(problems)) == problems


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"problems": {}}', '{"problems": ["x"]}', '{"problems": [{}]}'),
        answer([{**PROBLEM, "valid": "x"}]),
        answer([{key: value for key, value in PROBLEM.items() if key != "job"}]),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the caller shows the log instead
        read_answer(text)
