"""A fork of torchtitan, edited and not committed, in a Python of its own: ``--against`` its tag."""

import json

import pytest
from cut_down import need
from own_fork import git, make_fork, make_python, packages_of
from real_matrices import TOOLCHAINS, Matrix
from two_layers import with_two_layers

pytestmark = pytest.mark.slow
TOOLCHAIN = "torchtitan-0.3.0"
EXPERIMENT = """
schema = 1
repeats = ["rerun"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
toolchain = { python = "venv/bin/python" }
set = { "training.steps" = 3 }
[control]
name = "fsdp2"
parallelism = { dp_shard = 2 }
[[test]]
name = "ddp2"
parallelism = { dp_replicate = 2 }
"""
STEP = "            loss = self.forward_backward_step("
WRONG = (STEP, f"            global_valid_tokens = global_valid_tokens * 2\n{STEP}")
"""The loss of every rank, and so its gradients, by half."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    need(TOOLCHAIN)
    folder = with_two_layers(tmp_path_factory.mktemp("own"))
    toolchain = TOOLCHAINS.absolute() / TOOLCHAIN
    fork = make_fork(folder / "fork", packages_of(toolchain) / "torchtitan")
    make_python(folder / "venv", toolchain, fork)
    experiment = folder / "matrix.toml"
    experiment.write_text(EXPERIMENT)
    return Matrix(experiment, folder / "store", folder / "report")


def edit(matrix, old, new):
    file = matrix.experiment.parent / "fork" / "torchtitan" / "trainer.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def right(matrix):
    """A variable of the training loop renamed, and what came of it."""
    edit(matrix, "local_valid_tokens", "valid_tokens_of_this_rank")
    ended = matrix.converge("run", "--against", "v0")
    return ended, json.loads((matrix.out / "report.json").read_text())


@pytest.fixture(scope="module")
def wrong(matrix, right):
    """Then gradients at half of what they should be."""
    edit(matrix, *WRONG)
    ended = matrix.converge("run", "--against", "v0")
    return ended, json.loads((matrix.out / "report.json").read_text())


def test_a_renamed_variable_is_bitwise_identical_to_the_tag(right):
    ended, report = right
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert report["against"]["headline"].startswith("Bitwise identical: 2 sets")
    assert [test["verdict"] for test in report["tests"]] == ["PASS"]
    assert report["versions"]["torchtitan"].startswith("0.0.1.dev0+tree.")
    assert report["versions"]["torchtitan checkout"].startswith("v0, with uncommitted changes")


def test_ranks_of_both_imported_their_own_code(matrix, right):
    ended, _ = right
    store = matrix.store / "runs"
    runs = {json.loads(each.read_text())["name"]: each for each in store.glob("*/record.json")}
    assert set(runs) == {"seed", "fsdp2", "fsdp2.rerun", "ddp2"}
    checkout = str(matrix.experiment.parent / "fork")
    for name in ("seed", "ddp2"):
        imported = [
            [path for path in json.loads(each.read_text())["sources"] if "/trainer.py" in path]
            for each in store.glob(f"{name}-*/record.json")
        ]
        of_the_tree = [path.startswith(checkout) for paths in imported for path in paths]
        assert sorted(of_the_tree) == [False, True]
    assert git(checkout, "worktree", "list").count("\n") == 0
    assert "which runs first" in ended.stdout


def test_wrong_gradients_are_different_from_the_tag_and_the_base_is_not_run_again(wrong):
    ended, report = wrong
    assert ended.returncode == 1
    assert {each["change"] for each in report["against"]["sets"]} == {"different"}
    assert "2 different" in ended.stdout
    assert ended.stdout.count("reused") == 4  # of the tag: seed, control, its repeat, test set
