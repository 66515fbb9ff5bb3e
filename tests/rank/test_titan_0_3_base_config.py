"""Which config function a job starts from, and what is said where there is none."""

import sys

import pytest
import titan_0_3_jobs as jobs

from converge_harness.rank.settings import SettingError

jobs.require_titan_0_3()
OWN = """
import helper_of_it
from torchtitan.models.llama3.config_registry import llama3_debugmodel

def mine(vocab_size: int = 2048, lr: float = 1e-3):
    config = llama3_debugmodel()
    config.training.steps = helper_of_it.STEPS
    config.model_spec.model.vocab_size = vocab_size
    return config

def raises():
    return 1 / 0

def other():
    return {"a": 1}
"""


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    jobs.preload()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "own_llm.py").write_text(OWN)
    (tmp_path / "helper_of_it.py").write_text("STEPS = 17")
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def base(folder):
    from converge_harness.rank.titan.v0_3.base_config import base_config

    def base(module="own_llm", config="mine", *, own=True, **arguments):
        table = {
            "path": "t.toml",
            "module": module,
            "config": config,
            "arguments": arguments,
            **({"import_from": str(folder)} if own else {}),
        }
        return base_config(jobs.job(folder / "run", train_config=table))

    return base


def said(base, *arguments, **more):
    with pytest.raises(SettingError) as caught:
        base(*arguments, **more)
    return str(caught.value)


def test_an_own_module_is_imported_from_its_folder_with_what_lies_beside_it(base):
    found = base(vocab_size=512)
    assert found.module == "own_llm"
    assert found.trainer.training.steps == 17
    assert found.trainer.model_spec.model.vocab_size == 512


@pytest.mark.parametrize(
    "module", ["llama3", "torchtitan.models.llama3", "torchtitan.models.llama3.config_registry"]
)
def test_modules_are_those_that_torchtitan_takes(base, module):
    found = base(module, "llama3_debugmodel", own=False)
    assert found.module == "torchtitan.models.llama3.config_registry"


def test_a_module_that_is_not_there(base):
    text = said(base, "lama3", own=False)
    assert "converge.module: 'lama3' is no model of torchtitan and no module" in text


def test_one_that_torchtitan_lists_and_does_not_ship(base):
    assert "only lists its name" in said(base, "autoparallel.llama3", own=False)


def test_a_missing_package_is_named_with_the_command_that_installs_it(base):
    text = said(base, "qwen3_5", own=False)
    assert "'qwen3_5' needs 'fla'" in text
    assert "models/qwen3_5/model.py:" in text
    assert f"uv pip install --python {sys.executable} flash-linear-attention" in text


def test_one_that_asks_for_a_gpu_when_it_is_imported(base, folder):
    (folder / "own_llm.py").write_text("import torch\nHERE = torch.zeros(1, device='cuda')\n")
    text = said(base)
    assert f"'own_llm' cannot be imported: {folder / 'own_llm.py'}:2" in text
    assert "a run on a CPU has no GPU: ask for one in a function" in text


def test_one_that_ends_the_process(base, folder):
    (folder / "own_llm.py").write_text("raise SystemExit(3)")
    assert "own_llm.py:1: SystemExit: 3" in said(base)


def test_one_with_the_name_of_an_installed_one(base, folder):
    (folder / "einops.py").write_text(OWN)
    text = said(base, "einops")
    assert f"einops is in {folder}, and an installed one of that name" in text
    assert "rename one of them" in text


def test_a_function_that_is_not_there(base):
    assert "'mini' is no config of own_llm (mine, raises, other)" in said(base, config="mini")


def test_an_argument_that_it_does_not_take(base):
    text = said(base, width=3)
    assert "converge.arguments" in text
    assert "'width'" in text
    assert "mine(vocab_size: int = 2048, lr: float = 0.001)" in text


def test_a_function_that_raises(base, folder):
    text = said(base, config="raises")
    assert f"raises of own_llm raises at {folder / 'own_llm.py'}:12: ZeroDivisionError" in text


def test_a_function_that_returns_something_else(base):
    assert "other of own_llm returns builtins.dict, which is no" in said(base, config="other")


def test_a_model_without_a_vocabulary(base):
    text = said(base, "flux", "flux_debugmodel", own=False)
    assert "vocab_size" in text or "needs" in text


def test_a_spec_of_ones_own_is_not_rebuilt(folder):
    from converge_harness.rank.titan.v0_3.config import build_config

    table = {
        "path": "t.toml",
        "module": "own_llm",
        "config": "mine",
        "import_from": str(folder),
        "model": {"dim": 64},
    }
    with pytest.raises(SettingError, match=r"not llama3 of own_llm: write a config function"):
        build_config(jobs.job(folder / "run", train_config=table))


def test_of_a_loss_that_calls_its_function_several_times_only_the_first_call_is_looked_at():
    from types import SimpleNamespace

    from converge_harness.rank.titan.v0_3.hooks import _watch_loss

    class Loss:
        def __init__(self):
            self.fn = lambda logits, labels: logits + labels

        def __call__(self, logits, labels):
            return self.fn(logits, labels) + 0.5 * self.fn(10 * logits, labels)

    seen = []
    recorder = SimpleNamespace(on_logits=lambda logits, labels: seen.append((logits, labels)))
    loss = Loss()
    _watch_loss(SimpleNamespace(loss_fn=loss), recorder)
    assert [loss(1, 2), loss(3, 4)] == [3 + 0.5 * 12, 7 + 0.5 * 34]
    assert seen == [(1, 2), (3, 4)]


def test_a_loss_without_a_function_is_refused():
    from types import SimpleNamespace

    from converge_harness.rank.titan.v0_3.hooks import _watch_loss

    with pytest.raises(SettingError, match=r"its loss SimpleNamespace has no fn"):
        _watch_loss(SimpleNamespace(loss_fn=SimpleNamespace()), None)
