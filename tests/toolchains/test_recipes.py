"""Every toolchain's recipe, and the versions that it is built with."""

import re
import tomllib
from pathlib import Path

import pytest
from own_fork import git

from converge_harness.errors import ToolchainError
from converge_harness.toolchains.recipes import (
    RECIPES,
    TRAIN,
    at_revision,
    constraints_of,
    pinned_by,
    recipe_of,
    require_checkout,
    upstream_of,
    without,
)

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def pins(text):
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==(.*)$", text))


def test_every_recipe_has_one_version_of_all_that_constraints_pin():
    for name, recipe in RECIPES.items():
        # A branch is installed from a checkout, so nothing pins it.
        release = None if recipe.branch else recipe.torchtitan
        instead = {**recipe.instead, "torchtitan": release}
        found = pins(constraints_of(CONSTRAINTS, instead))
        expected = pins(CONSTRAINTS) | {key: each for key, each in instead.items() if each}
        if not release:
            del expected["torchtitan"]
        assert found == expected, name


def test_a_package_that_constraints_do_not_pin_is_not_replaced():
    with pytest.raises(ToolchainError, match="tourch: not a package"):
        constraints_of(CONSTRAINTS, {"tourch": "2.13.0"})


def test_torchtitans_requirements_are_those_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["train"]
    assert sorted(TRAIN) == sorted(name for name in extra if name != "torchtitan")


def test_another_version_of_one_package_replaces_what_is_pinned():
    found = recipe_of("torchtitan-0.3.0-torch-2.13+torchao-0.17.0@abc")
    assert found.revision == "abc"
    pinned = pins(constraints_of(CONSTRAINTS, found.recipe.instead))
    assert (pinned["torch"], pinned["torchao"]) == ("2.13.0", "0.17.0")
    # Which triton a torch needs is its own business.
    other = recipe_of("torchtitan-0.3.0+torch-2.14.1").recipe
    pinned = pins(constraints_of(CONSTRAINTS, other.instead))
    assert pinned["torch"] == "2.14.1"
    assert "triton" not in pinned
    assert recipe_of("torchtitan-0.3.0+torchtitan-0.2.2").recipe.torchtitan == "0.2.2"


@pytest.mark.parametrize(
    "name",
    [
        *("torchtitan-0.3", "mine", "torchtitan-0.3.0@", "torchtitan-0.3.0@a/b", "../x", ""),
        *("torchtitan-0.3.0+", "torchtitan-0.3.0+torch", "mine+torch-2.14.1"),
        *("torchtitan-0.3.0+torch-", "torchtitan-0.3.0+torch-../../x"),
        "torchtitan-0.3.0+torchtitan-0.2.2@main",
        "megatron-core-0.19.2+megatron-core-0.18.2@main",
        "megatron-core-0.19.2+megatron_core-0.18.2@main",
        "megatron-core-main+megatron-core-0.18.2",
        "transformers-5.23.0@main",
    ],
)
def test_a_name_without_a_recipe_is_refused_with_those_that_have_one(name):
    with pytest.raises(ToolchainError, match="there is no recipe") as caught:
        recipe_of(name)
    assert "torchtitan-0.3.0" in str(caught.value)


TITAN, MEGATRON = upstream_of("torchtitan-main"), upstream_of("megatron-core-0.19.2")


def test_a_toolchain_is_named_after_the_package_of_which_it_has_commits():
    assert (TITAN.repository, MEGATRON.repository) == ("torchtitan", "Megatron-LM")
    assert upstream_of("transformers-5.23.0") is None


def test_a_revision_is_one_of_a_clone_that_has_it(tmp_path):
    with pytest.raises(
        ToolchainError, match=r"Megatron-LM at main of .* set CONVERGE_CHECKOUT=FOLD"
    ):
        at_revision(MEGATRON, "main", ())
    with pytest.raises(ToolchainError, match="no clone of torchtitan that has main"):
        at_revision(TITAN, "main", (tmp_path,))


def test_what_is_older_is_installed_as_any_package_until_another_version_is_asked_for():
    """Only metadata of Megatron-Core from 0.17 on ask for a newer Python than ours."""
    assert recipe_of("megatron-core-0.16.1").recipe.python < (3, 11)
    for name in (
        *("megatron-core-0.19.2", "megatron-core-main", "megatron-core-0.16.1@x"),
        "megatron-core-0.16.1+megatron-core-0.18.2",
    ):
        assert recipe_of(name).recipe.python == (3, 12), name


def test_a_branch_is_a_revision_unless_another_is_named():
    assert recipe_of("torchtitan-main").revision == "main"
    assert recipe_of("torchtitan-main@b5bcd76c6").revision == "b5bcd76c6"
    assert recipe_of("torchtitan-main").recipe == recipe_of("torchtitan-main@x").recipe
    assert recipe_of("torchtitan-0.3.0").revision == ""
    assert recipe_of("megatron-core-main").revision == "main"
    assert recipe_of("megatron-core-0.19.2@x").revision == "x"
    assert recipe_of("megatron-core-0.19.2").revision == ""


def clone_with(folder, upstream):
    """A clone whose first commit, on main, has the package, and whose newest has not."""
    held = folder / upstream.holds
    held.parent.mkdir(parents=True)
    held.write_text("")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    git(folder, "branch", "has_it")
    held.rename(folder / "other.py")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "no package")
    return folder


def test_a_bare_clone_is_one_too(tmp_path):
    work = clone_with(tmp_path / "work", TITAN)
    bare = tmp_path / "bare"
    git(tmp_path, "clone", "-q", "--bare", "work", "bare")
    commit = git(bare, "rev-parse", "has_it")
    assert at_revision(TITAN, "has_it", (bare,)) == f"git+{bare.as_uri()}@{commit}"
    with pytest.raises(ToolchainError, match="no clone of torchtitan that has HEAD"):
        at_revision(TITAN, "HEAD", (work,))


def test_of_several_clones_the_one_with_the_package_is_taken(tmp_path, monkeypatch):
    titan = clone_with(tmp_path / "titan", TITAN)
    megatron = clone_with(tmp_path / "megatron", MEGATRON)
    for folder in (titan, megatron):
        git(folder, "switch", "-q", "has_it")
    monkeypatch.setenv("CONVERGE_CHECKOUT", f"{titan}:{megatron}")
    assert require_checkout(TITAN) == titan
    assert require_checkout(MEGATRON) == megatron
    found = at_revision(MEGATRON, "has_it", (titan, megatron))
    assert found.startswith(f"git+{megatron.as_uri()}@")
    monkeypatch.setenv("CONVERGE_CHECKOUT", str(titan))
    with pytest.raises(ToolchainError, match="no clone of Megatron-LM by its HEAD"):
        require_checkout(MEGATRON)
    monkeypatch.setenv("CONVERGE_CHECKOUT", "")
    with pytest.raises(ToolchainError, match="commits of which Megatron-LM"):
        require_checkout(MEGATRON)


def test_that_a_recipe_is_of_a_branch_leaves_other_toolchains_up_to_date():
    """Digests of recipes are of their repr: a toolchain of 6 GB is not built again for a name."""
    assert "branch=" not in repr(RECIPES["torchtitan-main"])
    assert "python=" not in repr(RECIPES["megatron-core-0.19.2"])


def test_what_a_commit_pins_itself_replaces_our_pins(tmp_path):
    folder = tmp_path / "a clone"
    folder.mkdir()
    git(folder, "init", "-q")
    needed = '["spmd_types==0.2.1", "datasets>=3.6", "tokenizers"]'
    (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {needed}\n")
    (folder / "torchtitan").mkdir()
    (folder / "torchtitan" / "__init__.py").write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    titan = at_revision(TITAN, "HEAD", (folder,))
    assert pinned_by(titan) == ("spmd-types",)
    text = without("spmd-types==0.2.3\ndatasets==4.7\n# spmd-types\n", pinned_by(titan))
    assert text == "datasets==4.7\n# spmd-types\n"
    assert pinned_by("torchtitan==0.3.0") == ()
    assert pinned_by(titan.replace("clone", "gone")) == ()
