"""MosaicML Composer, the real package under its own launcher."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("composer-0.32.1")
    return tmp_path_factory.mktemp("composer")


def test_microbatches_and_fsdp_are_the_control_by_all_evidence(folder):
    tests = run_some(folder, "composer_space_time", "fsdp2_micro1")
    assert verdicts(tests) == {"fsdp2_micro1": "PASS"}
    outcomes = {check["name"]: check["outcome"] for check in tests["fsdp2_micro1"]["checks"]}
    for name in ("same-data", "loss-recomputed-envelope", "gradients-first-steps"):
        assert outcomes[name] == "PASS"


def test_a_wrong_weight_diverges_and_a_wrong_number_does_not(folder):
    tests = run_some(folder, "composer_bugs", "by_samples_micro2", "last_microbatch")
    assert verdicts(tests) == {"by_samples_micro2": "FAIL", "last_microbatch": "FAIL"}
    causes = {name: test["cause_class"] for name, test in tests.items()}
    assert causes["last_microbatch"] == "metric only"
    assert causes["by_samples_micro2"] != "metric only"


def test_by_its_curve_alone_the_last_microbatch_is_a_false_divergence(folder):
    only = ("total_one_rank", "last_microbatch_one_rank")
    tests = run_some(folder, "composer_last_microbatch", *only)
    assert verdicts(tests) == {"total_one_rank": "PASS", "last_microbatch_one_rank": "FAIL"}
