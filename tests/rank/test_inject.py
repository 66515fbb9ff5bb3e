"""``inject``: what is called, what cannot be, and what is known without running the file."""

import sys
from types import SimpleNamespace

import pytest

from converge_harness.rank.inject import InjectError, call_injected, inject_problems

SOURCE = """
import math as numbers
from os.path import join

def break_it(trainer):
    trainer.broken = True

if numbers.pi > 3:
    def conditional(trainer):
        def inner():
            pass

alias = break_it
"""


@pytest.fixture
def bugs(tmp_path):
    file = tmp_path / "bugs.py"
    file.write_text(SOURCE)
    return file


def test_the_function_is_called_and_named(bugs):
    trainer = SimpleNamespace()
    assert call_injected(f"{bugs}:break_it", trainer) == f"{bugs}:break_it"
    assert trainer.broken


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "converge_neighbour.py").write_text("def mark(trainer): trainer.marked = True\n")
    file = tmp_path / "bug.py"
    file.write_text("from converge_neighbour import mark\ndef f(trainer): mark(trainer)\n")
    trainer = SimpleNamespace()
    call_injected(f"{file}:f", trainer)
    assert trainer.marked


@pytest.mark.parametrize("name", ["break_it", "conditional", "alias", "join", "numbers"])
def test_a_name_that_the_file_may_bind_is_no_problem(bugs, name):
    assert inject_problems(f"{bugs}:{name}") == []


def test_no_inject_is_no_problem():
    assert inject_problems(None) == []


def test_a_missing_function_is_named_with_those_there(bugs):
    (problem,) = inject_problems(f"{bugs}:break_that")
    assert (problem.key, problem.valid) == ("inject", ("break_it",))
    assert "break_that" in problem.message
    with pytest.raises(InjectError, match="no function 'break_that'"):
        call_injected(f"{bugs}:break_that", None)


def test_the_file_is_not_run(tmp_path):
    file = tmp_path / "exits.py"
    file.write_text("raise SystemExit\ndef f(trainer): pass\n")
    assert inject_problems(f"{file}:f") == []


@pytest.mark.parametrize("text", ["def f(:", "\0"])
def test_a_file_that_is_no_python_is_a_problem(tmp_path, text):
    file = tmp_path / "broken.py"
    file.write_text(text)
    (problem,) = inject_problems(f"{file}:f")
    assert problem.key == "inject"


@pytest.mark.parametrize("target", ["none.py:f", "f", ":f"])
def test_a_missing_file_is_a_problem(target):
    (problem,) = inject_problems(target)
    assert "no such file" in problem.message
    with pytest.raises(InjectError, match="no such file"):
        call_injected(target, None)
