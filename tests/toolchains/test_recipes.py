"""Every toolchain's recipe, and the versions that it is built with."""

import re
import tomllib
from pathlib import Path

import pytest

from converge_harness.errors import ToolchainError
from converge_harness.toolchains.recipes import (
    RECIPES,
    TRAIN,
    constraints_of,
    recipe_of,
    torchtitan_of,
)

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def pins(text):
    return dict(re.findall(r"(?m)^([a-z0-9-]+)==(.*)$", text))


def test_every_recipe_has_one_version_of_all_that_constraints_pin():
    for name, recipe in RECIPES.items():
        instead = {**recipe.instead, "torchtitan": recipe.torchtitan}
        found = pins(constraints_of(CONSTRAINTS, instead))
        expected = pins(CONSTRAINTS) | {key: each for key, each in instead.items() if each}
        if not recipe.torchtitan:
            del expected["torchtitan"]
        assert found == expected, name


def test_a_package_that_constraints_do_not_pin_is_not_replaced():
    with pytest.raises(ValueError, match="pins no tourch"):
        constraints_of(CONSTRAINTS, {"tourch": "2.13.0"})


def test_torchtitans_requirements_are_those_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["train"]
    assert sorted(TRAIN) == sorted(name for name in extra if name != "torchtitan")


@pytest.mark.parametrize(
    "name", ["torchtitan-0.3", "mine", "torchtitan-0.3.0@", "torchtitan-0.3.0@a/b", "../x", ""]
)
def test_a_name_without_a_recipe_is_refused_with_those_that_have_one(name):
    with pytest.raises(ToolchainError, match="there is no recipe") as caught:
        recipe_of(name)
    assert "torchtitan-0.3.0" in str(caught.value)


def test_a_revision_is_one_of_a_clone_that_has_it(tmp_path):
    assert torchtitan_of("0.3.0", "", None) == "torchtitan==0.3.0"
    with pytest.raises(ToolchainError, match="set CONVERGE_CHECKOUT=FOLDER"):
        torchtitan_of("0.3.0", "main", None)
    with pytest.raises(ToolchainError, match="not a clone of torchtitan that has main"):
        torchtitan_of("0.3.0", "main", str(tmp_path))
