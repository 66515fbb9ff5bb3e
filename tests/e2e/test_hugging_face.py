"""transformers.Trainer on a tiny Llama, by DDP and by FSDP 2 of accelerate."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    need("transformers-5.23.0")
    return tmp_path_factory.mktemp("hugging_face")


def test_accumulation_and_fsdp_are_the_control_by_all_evidence(folder):
    tests = run_some(folder, "hf", "fsdp2_accumulate4", "one_rank_accumulate2")
    assert set(verdicts(tests).values()) == {"PASS"}
    outcomes = {check["name"]: check["outcome"] for check in tests["fsdp2_accumulate4"]["checks"]}
    for name in ("same-data", "loss-recomputed-envelope", "gradients-first-steps"):
        assert outcomes[name] == "PASS"


def test_a_mean_of_means_is_not_the_mean_and_ddp_is_not_fsdp(folder):
    tests = run_some(folder, "hf_bugs", "mean_of_microbatches_rank1", "fsdp_ignored")
    assert verdicts(tests) == {"mean_of_microbatches_rank1": "FAIL", "fsdp_ignored": "INVALID"}
    assert tests["mean_of_microbatches_rank1"]["onset_step"] == 1
    assert "dp_shard 2 is named, 1 is in force" in tests["fsdp_ignored"]["cause"]
