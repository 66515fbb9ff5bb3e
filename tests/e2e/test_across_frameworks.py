"""Megatron-Core judged by torchtitan: the same Llama passes, and mistakes of a move are named."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("megatron-core-0.19.2")
    return tmp_path_factory.mktemp("across_frameworks")


def test_the_same_model_is_the_same_in_both(folder):
    sets = ("dp2", "tp2", "pp2", "bf16_tp2")
    tests = run_some(folder, "across_frameworks", *sets)
    assert verdicts(tests) == dict.fromkeys(sets, "PASS")
    for name in sets:
        outcomes = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        for check in (
            *("same-data", "same-initial-parameters", "loss-first-step", "gradients-first-steps"),
            *("updates-first-steps", "loss-recomputed-envelope", "gradient-scale"),
        ):
            assert outcomes[check] == "PASS", (name, check)
    frozen = {check["name"]: check["detail"] for check in tests["bf16_tp2"]["checks"]}
    assert "16 frozen batches" in frozen["gradient-errors"]


def test_mistakes_of_a_move_are_named(folder):
    says = {
        "rope_scaling": "in the attention of every layer",
        "norm_epsilon": "the output of layers.0.attention_norm is off",
        "norms_not_decayed": "weight decay differs by -0.1",
        "adam_beta2": "1 - beta2 is 0.02 times the control's",
        "rotary_layout": "qkv_linear.wk.weight and layers.*.attention.qkv_linear.wq.weight differ",
        "gate_and_up": "layers.3.feed_forward.w1.weight looks like the control's",
    }
    tests = run_some(folder, "across_frameworks_mistakes", *says, "tied")
    assert verdicts(tests) == {**dict.fromkeys(says, "FAIL"), "tied": "ERROR"}
    for name, words in says.items():
        assert words in f"{tests[name]['cause']} {tests[name]['first_wrong']}", name
    assert "it has lm_head.weight of shape" in tests["tied"]["cause"]
