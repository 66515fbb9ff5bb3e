"""The tree of modules: the way to the first wrong one in full, the rest in a row each."""

from dataclasses import replace

import pytest

from converge_harness.judge import ModuleComparison, ModuleDifference
from converge_harness.model import ModuleTensor
from converge_harness.report.view.module_tree import module_tree

NAMES = (
    "embed",
    *(f"layers.{layer}{part}" for layer in range(8) for part in ("", ".attention", ".mlp")),
    "norm",
)


def compared(off, backward=False):
    """Modules whose output, or its gradient, is off if ``off`` says so."""

    def rows(back):
        return tuple(
            ModuleDifference(
                ModuleTensor(name, "out.0", back),
                0.5 if back is backward and off(name) else 1e-8,
                1e-6,
            )
            for name in NAMES
        )

    return ModuleComparison(rows(back=False), rows(back=True), 1.0)


def lines(tree):
    return [f"{'  ' * row.depth}{row.label}: {row.damage.value}" for row in tree.rows]


def since_layer_2(name):
    return name == "norm" or name.startswith(
        ("layers.2.mlp", *(f"layers.{n}" for n in range(3, 8)))
    )


def test_the_way_to_the_first_wrong_module_is_shown_and_layers_are_joined():
    tree = module_tree(compared(since_layer_2), "layers.2.mlp", failed=True)
    assert lines(tree) == [
        "embed: right",
        "layers: contains it",
        "  0 to 1: right",
        "  2: contains it",
        "    attention: right",
        "    mlp: wrong first",
        "  3 to 7: wrong, too",
        "norm: wrong, too",
    ]
    assert tree.modules == len(NAMES)


def test_a_row_has_the_worst_of_the_modules_in_it():
    tree = module_tree(compared(lambda name: name == "layers.5.mlp"), "norm", failed=True)
    layers = next(row for row in tree.rows if row.label == "layers")
    assert layers.output.row.module == "layers.5.mlp"
    assert layers.gradient.distance == 1e-8
    assert not layers.gradient.is_off


def test_a_wrong_gradient_is_shown_beside_right_outputs():
    tree = module_tree(
        compared(lambda name: name == "layers.5.mlp", backward=True), "layers.5.mlp", failed=True
    )
    (first,) = (row for row in tree.rows if row.damage.value == "wrong first")
    assert (first.output.is_off, first.gradient.is_off) == (False, True)


@pytest.mark.parametrize("failed", [True, False])
def test_a_right_set_has_no_rows_but_what_is_furthest(failed):
    tree = module_tree(compared(lambda _: False), "", failed=failed)
    assert tree.rows == ()
    assert tree.furthest.distance == 1e-8
    assert not module_tree(compared(since_layer_2), "", failed=False).rows


@pytest.mark.parametrize("failed", [True, False])
def test_modules_that_could_not_be_compared_are_kept(failed):
    left = replace(compared(since_layer_2), not_compared=("rope", "layers.0.gate\x1b"))
    tree = module_tree(left, "layers.2.mlp", failed=failed)
    assert tree.not_compared == ("rope", "layers.0.gate\N{REPLACEMENT CHARACTER}")


def test_without_modules_there_is_no_tree():
    assert module_tree(None, "", failed=True) is None
