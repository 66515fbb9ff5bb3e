"""A Python by its path: what it says it would import."""

import sys
from pathlib import Path

import pytest

import converge_harness
from converge_harness.errors import ToolchainError
from converge_harness.toolchains.user_python import (
    THIS_PACKAGE,
    PythonAnswer,
    ask,
    digest_of,
    digests_of,
    folder_of_this_package,
    has_this_package,
    places_of,
)

PYTHON = Path(sys.executable)


def package(folder, name="fork", code="number = 1\n"):
    made = folder / name
    made.mkdir(parents=True)
    (made / "__init__.py").write_text("raise ImportError('nobody imports this to find it')\n")
    (made / "code.py").write_text(code)
    return made


def test_a_python_says_where_it_would_import_from_and_imports_nothing(tmp_path, monkeypatch):
    made = package(tmp_path / "path")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    answer = ask(PYTHON, ("fork", "nowhere", "json"))
    assert answer.places["fork"] == made
    assert answer.places["nowhere"] is None
    assert answer.release == ".".join(map(str, sys.version_info[:3]))
    assert tmp_path / "path" in answer.sources
    assert not [each for each in answer.sources if "site-packages" in each.parts]
    assert not [each for each in answer.sources if each.name.startswith("python3")]


def test_folders_that_come_first_win(tmp_path, monkeypatch):
    package(tmp_path / "path")
    first = package(tmp_path / "first")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    answer = ask(PYTHON, ("fork",), (tmp_path / "first",))
    assert answer.places["fork"] == first
    assert places_of(answer, "fork") == (first, tmp_path / "path" / "fork")


def test_a_virtual_environment_hides_packages_of_the_python_that_it_was_made_from(tmp_path):
    own, base = package(tmp_path / "own"), package(tmp_path / "base")
    paths = (str(own.parent), str(base.parent))
    answer = PythonAnswer(PYTHON, "3.12.1", paths, (str(base.parent),), (), {"fork": own})
    assert places_of(answer, "fork") == (own,)


def test_what_a_pth_file_prints_is_no_answer(tmp_path):
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\necho \'{{"executable": 1}}\'\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    assert ask(shim, ("json",)).places["json"] is not None


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\necho hello\n", "it ends without an answer"),
        ("#!/bin/sh\necho no such thing >&2; exit 3\n", "no such"),
    ],
)
def test_what_is_no_python_is_reported_in_one_sentence(tmp_path, script, says):
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    with pytest.raises(ToolchainError) as caught:
        ask(program)
    assert str(caught.value).startswith(f"{program} does not start as a Python: {says}")
    assert "\n" not in str(caught.value)


def test_digests_are_those_of_the_source_and_not_of_what_python_caches(tmp_path):
    made = package(tmp_path)
    before = digests_of(made)
    assert set(before) == {"fork/__init__.py", "fork/code.py"}
    (made / "__pycache__").mkdir()
    (made / "__pycache__" / "code.cpython-312.pyc").write_text("")
    (made / ".code.py.swp").write_text("")
    assert digests_of(made) == before
    (made / "code.py").write_text("number = 2\n")
    assert digest_of(digests_of(made)) != digest_of(before)
    (made / "code.py").write_text("number = 1\n")
    (made / "kernel.cu").write_text("")
    assert digest_of(digests_of(made)) != digest_of(before)


def test_a_python_without_converge_gets_it_by_a_folder_that_has_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = folder_of_this_package()
    assert folder == folder_of_this_package()
    assert [each.name for each in folder.iterdir()] == [THIS_PACKAGE]
    answer = ask(PYTHON, (THIS_PACKAGE,), (folder,))
    assert has_this_package(answer)
    assert answer.places[THIS_PACKAGE].resolve() == Path(converge_harness.__file__).resolve().parent
    other = package(tmp_path / "other", THIS_PACKAGE)
    assert not has_this_package(ask(PYTHON, (THIS_PACKAGE,), (other.parent,)))
