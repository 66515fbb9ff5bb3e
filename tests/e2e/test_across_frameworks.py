"""Megatron-Core judged by torchtitan: the same Llama passes, and mistakes of a move are named."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("megatron-core-0.16.1")
    return tmp_path_factory.mktemp("across_frameworks")


def test_the_same_model_is_the_same_in_both(folder):
    sets = ("dp2", "tp2", "pp2", "bf16_tp2")
    tests = run_some(folder, "across_frameworks", *sets)
    assert verdicts(tests) == dict.fromkeys(sets, "PASS")
