"""Hugging Face's Llama judged by torchtitan: the same model passes, and mistakes are named."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("transformers-5.23.0")
    return tmp_path_factory.mktemp("across_frameworks_hf")


def test_the_same_model_is_the_same_in_both(folder):
    tests = run_some(folder, "across_frameworks_hf", "ddp2")
    assert verdicts(tests) == {"ddp2": "PASS"}
    outcomes = {check["name"]: check["outcome"] for check in tests["ddp2"]["checks"]}
    for check in (
        *("same-data", "same-initial-parameters", "loss-first-step", "gradients-first-steps"),
        *("updates-first-steps", "loss-recomputed-envelope"),
    ):
        assert outcomes[check] == "PASS", check


def test_mistakes_of_a_move_are_named(folder):
    says = {
        "rotary_layout": "wk.weight and layers.*.attention.qkv_linear.wq.weight differ",
        "norms_not_decayed": "weight decay differs by -0.1",
    }
    tests = run_some(folder, "across_frameworks_hf_mistakes", *says)
    assert verdicts(tests) == dict.fromkeys(says, "FAIL")
    for name, words in says.items():
        assert words in f"{tests[name]['cause']} {tests[name]['first_wrong']}", name
