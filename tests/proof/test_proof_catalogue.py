"""What a bug's docstring and its matrix have to say, and that everything wrong is said at once."""

from pathlib import Path

import pytest
from proof.catalogue import read_catalogue

from converge_harness.errors import ConfigError
from converge_harness.model import CauseClass

ROOT = Path(__file__).parents[2]
BUGS = '''\
from elsewhere import scale


def doubled(trainer):
    """Gradients are summed where an average was meant.

    A paragraph may say why: it is not read.

    Reference: torchtune issue 2172
    Class: C1
    Technique: FSDP 2
    First step: 1
    Needs: uneven valid tokens
    Signature: every gradient twice the control's, which is a sentence of
        two lines
    Cause: gradient scale | gradient scale of a group
    Says: valid tokens | World Size
    """


def helper(trainer, size):
    """Takes more than the trainer, so it is no bug."""


def feature(trainer):
    """Switch dropout on, as control and test both have it."""


def scaled_1e_4(_):
    """Gradients are too large by 1e-4.

    Reference: class of torchtune issue 2172
    Class: C7
    Technique: FSDP 2
    First step: 3
    Signature: none may be left
    Cause: gradient scale
    Magnitude: 1e-4
    """
'''
MATRIX = f"""\
schema = 1
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
[control]
parallelism.dp_shard = 2
inject = "c1_scale.py:feature"
waive = ["inject"]
"""
TEST = """
[[test]]
name = "{0}"
parallelism.dp_shard = 2
"""


def injecting(name: str, function: str | None = None, file: str = "c1_scale.py") -> str:
    return TEST.format(name) + f'inject = "{file}:{function or name}"\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c1_scale.py").write_text(BUGS)
    (tmp_path / "c1.toml").write_text(MATRIX + injecting("doubled") + injecting("scaled_1e_4"))
    (tmp_path / "correct.toml").write_text(MATRIX + TEST.format("ddp2"))
    return tmp_path


def problems(folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_catalogue(folder)
    return [str(problem).replace(f"{folder}/", "") for problem in raised.value.problems]


def test_docstrings_become_bugs(folder):
    doubled, scaled = read_catalogue(folder).bugs
    assert (doubled.id, doubled.kind, doubled.first_step) == ("doubled", "C1", 1)
    assert doubled.summary == "Gradients are summed where an average was meant."
    assert doubled.causes == (CauseClass.GRADIENT_SCALE, CauseClass.GROUP_SCALE)
    assert doubled.says == ("valid tokens", "World Size")
    assert doubled.signature.endswith("a sentence of two lines")
    assert doubled.needs == "uneven valid tokens"
    assert (doubled.magnitude, scaled.magnitude, scaled.first_step) == (None, 1e-4, 3)


def test_a_bug_may_say_what_it_changes(folder):
    text = BUGS.replace("    Needs:", "    Place: Optimizer.step\n    Needs:")
    (folder / "c1_scale.py").write_text(text)
    assert [bug.place for bug in read_catalogue(folder).bugs] == ["Optimizer.step", ""]


def test_correct_set_ups_are_marked_by_the_file(folder):
    matrices = {matrix.name: matrix for matrix in read_catalogue(folder).matrices}
    assert list(matrices) == ["c1", "correct"]
    assert [matrix.correct for matrix in matrices.values()] == [False, True]


def test_single_matrices_are_bugs_or_right_as_they_are_asked_for(folder):
    right = folder / "layouts.toml"
    (folder / "correct.toml").rename(right)
    given = read_catalogue(folder / "c1.toml", correct=[right])
    found = {matrix.name: (matrix.correct, matrix.sets) for matrix in given.matrices}
    assert found == {"c1": (False, ("doubled", "scaled_1e_4")), "layouts": (True, ("ddp2",))}
    assert [bug.id for bug in given.bugs] == ["doubled", "scaled_1e_4"]
    with pytest.raises(ConfigError, match=r"layout\.toml: holds no matrix"):
        read_catalogue(folder / "c1.toml", correct=[folder / "layout.toml"])


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        (["doubled"], ["doubled"]),
        (["C7"], ["scaled_1e_4"]),
        (["correct", "doubled"], ["doubled", "ddp2"]),
        ([], ["doubled", "scaled_1e_4", "ddp2"]),
    ],
)
def test_a_part_is_a_set_a_matrix_or_a_class(folder, words, sets):
    part = read_catalogue(folder).select(words)
    assert [name for matrix in part.matrices for name in matrix.sets] == sets
    assert {bug.id for bug in part.bugs} == set(sets) - {"ddp2"}


def test_a_part_that_is_not_there_is_refused(folder):
    with pytest.raises(ConfigError, match="did you mean 'doubled'"):
        read_catalogue(folder).select(["dobuled"])


def test_every_problem_is_reported_with_its_file_and_line(folder):
    text = BUGS.replace("Cause: gradient scale |", "Cause: gradient scales |", 1)
    text = text.replace("    Technique: FSDP 2\n", "", 1).replace("Needs:", "Need:")
    text = text.replace("First step: 3", "First step: soon").replace("Class: C7", "Class: C8")
    (folder / "c1_scale.py").write_text(text + '\n\ndef alone(trainer):\n    """Nobody."""\n')
    others = injecting("tripled") + injecting("other_name", "doubled") + TEST.format("nothing")
    (folder / "c1.toml").write_text((folder / "c1.toml").read_text() + others + injecting("ddp2"))
    found = problems(folder)
    for expected in (
        "c1_scale.py:4: doubled: has an unknown field 'Need' (did you mean 'Needs'?",
        "c1_scale.py:4: doubled: has no field 'Technique'",
        "c1_scale.py:4: doubled: Cause: there is no class 'gradient scales' (did you mean",
        "c1_scale.py:28: scaled_1e_4: Class: there is no 'C8'",
        "c1_scale.py:28: scaled_1e_4: First step: 'soon' is not a step",
        "c1_scale.py:41: alone is injected by no test set",
        "c1.toml:20: 'tripled' injects tripled, which takes no trainer there",
        "c1.toml:25: 'other_name' injects doubled: a set has its function's name",
        "c1.toml:30: 'nothing' injects nothing (what must pass is in correct*.toml)",
        "c1.toml:34: 'ddp2' injects ddp2, which takes no trainer there",
        "correct.toml:10: 'ddp2' is also a test set of c1.toml",
    ):
        assert any(problem.startswith(expected) for problem in found), (expected, found)
    assert len(found) == 11


def test_a_matrix_that_cannot_be_read_is_one_of_the_problems(folder):
    (folder / "c2.toml").write_text(MATRIX.replace("dp_shard", "dp_shards"))
    assert any("c2.toml: control.parallelism.dp_shards" in problem for problem in problems(folder))


def test_the_benchmark_is_as_large_as_it_claims():
    catalogue = read_catalogue(ROOT / "benchmarks" / "bugs")
    bugs = [bug for bug in catalogue.bugs if bug.magnitude is None]
    correct = [name for matrix in catalogue.matrices if matrix.correct for name in matrix.sets]
    assert len(bugs) >= 36
    assert len(correct) >= 30
    assert {bug.kind for bug in catalogue.bugs} == {f"C{number}" for number in range(1, 8)}
    assert sum(bug.first_step > 2 for bug in bugs) >= 6
    assert sum(bool(bug.needs) for bug in bugs) >= 4
