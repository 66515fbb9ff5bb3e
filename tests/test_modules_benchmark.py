"""How the benchmark grades the module that a verdict names."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FOLDERS = ("bugs", "held_out", "held_out_mixed", "held_out_modules")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("modules", BENCHMARKS / "modules.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["modules"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["modules"]
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(
    ("where", "named", "grade"),
    [
        ("layers.*.attention.rope", "layers.2.attention.rope", "RIGHTLY"),
        ("layers.*.attention.rope", "layers.2.attention", "AROUND"),
        ("layers.*.attention.rope", "layers.2", "AROUND"),
        ("layers.*.attention.rope", "layers.2.attention.inner_attention", "AROUND"),
        ("layers.*.attention.rope", "layers.2.feed_forward", "WRONGLY"),
        ("layers.*.attention.rope", "lm_head", "WRONGLY"),
        ("layers.*.attention.rope", "", "SILENT"),
        ("norm", "lm_head", "AROUND"),
        ("norm", "layers.3.ffn_norm", "WRONGLY"),
        ("none", "", "RIGHTLY"),
        ("none", "norm", "WRONGLY"),
        ("the model", "the model", "RIGHTLY"),
        ("loss", "norm", "WRONGLY"),
    ],
)
def test_a_module_is_graded_by_where_the_bug_is(bench, where, named, grade):
    bug = SimpleNamespace(id="bug", modules=(where,))
    assert bench.Named(bug, named, "said").grade == getattr(bench, grade)


def test_the_loss_is_named_by_its_sentence(bench):
    bug = SimpleNamespace(id="bug", modules=("loss",))
    said = "the gradient of the loss by the output of lm_head is off"
    assert bench.Named(bug, "the model", said).grade == bench.RIGHTLY
    assert bench.Named(bug, "the model", "the input of layers.0 is off").grade == bench.AROUND


def test_every_forward_and_backward_bug_says_where_it_is(bench):
    docstrings = sys.modules["proof.docstrings"]
    bugs = [
        bug
        for folder in FOLDERS
        for file in docstrings.bug_files(BENCHMARKS / folder)
        if file.name.startswith(("c2_", "c4_"))
        for function in docstrings.functions(file)
        if (bug := docstrings.read_bug(function, lambda _: None))  # not what a control injects
    ]
    assert len(bugs) > 70
    assert [bug.id for bug in bugs if not bug.modules] == []
