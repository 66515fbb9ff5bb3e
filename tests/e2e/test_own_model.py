"""docs/own-model.md as it stands: its model passes, its bug fails, an edit is seen."""

import re

import pytest
from real_matrices import ROOT, Matrix
from warm_toolchains import warm_toolchains

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "own-model.md"


def write_example(folder):
    """Every block of the page that names a file."""
    found = re.findall(r"^```\w+ (\S+)\n((?:.*\n)*?)```$", PAGE.read_text(), re.MULTILINE)
    for name, text in found:
        (folder / name).write_text(text)
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own model")
    assert write_example(folder) == {
        "my_llm.py",
        "our_llama.toml",
        "wrong.toml",
        "experiment.toml",
    }
    matrix = Matrix(
        folder / "experiment.toml", folder / "store", folder / "report", warm_toolchains()
    )
    return matrix, matrix.converge("run")


def test_a_model_of_ones_own_passes_and_its_bug_under_tp_fails(trained):
    matrix, result = trained
    assert result.returncode == 1, result.stdout + result.stderr
    tests = matrix.tests()
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {"tp2": "PASS", "wrong_tp2": "FAIL"}
    assert "ffn_norm.weight" in tests["wrong_tp2"]["cause"]


def test_an_edited_model_is_trained_again(trained):
    matrix, _ = trained
    code = matrix.experiment.with_name("my_llm.py")
    before = code.read_text()
    again = matrix.converge("run", "--only", "tp2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "tp2: started" not in again.stdout + again.stderr
    code.write_text(before.replace("eps=1e-5", "eps=1e-6"))
    edited = matrix.converge("run", "--only", "tp2")
    code.write_text(before)
    assert edited.returncode == 0, edited.stdout + edited.stderr
    assert "tp2: started" in edited.stdout + edited.stderr
    assert "seed" in edited.stdout + edited.stderr
