"""DeepSpeed's ZeRO, the real package, against FSDP 2 as torchtitan shards."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("deepspeed-0.19.8")
    return tmp_path_factory.mktemp("zero")


def test_zero_2_with_accumulation_and_zero_3_are_fsdp_2_by_all_evidence(folder):
    tests = run_some(folder, "zero", "zero2_accumulate2", "zero3")
    assert verdicts(tests) == {"zero2_accumulate2": "PASS", "zero3": "PASS"}
    for test in tests.values():
        outcomes = {check["name"]: check["outcome"] for check in test["checks"]}
        for name in ("gradients-first-steps", "updates-first-steps", "optimizer-state-first-steps"):
            assert outcomes[name] == "PASS"


def test_zero_2_loses_the_gradients_that_only_the_loop_accumulates(folder):
    tests = run_some(folder, "zero_bugs", "zero2_by_loop")
    assert verdicts(tests) == {"zero2_by_loop": "FAIL"}
    assert tests["zero2_by_loop"]["onset_step"] == 1
