"""The half of docs/extension.md that runs inside ranks; tests/test_extension.py has the other."""

from extension_page import applied, run_tests


def test_what_it_adds_to_rank_code_works(tmp_path):
    done = run_tests(applied(tmp_path), "tests/rank")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
