"""Megatron-LM's own ``pretrain_gpt.py``, watched: layouts pass, and an error is named."""

import os
from pathlib import Path

import pytest
from cut_down import need, run_some, verdicts
from warm_toolchains import TOOLCHAINS

pytestmark = pytest.mark.slow

TOOLCHAIN = "megatron-core-0.16.1"
CHECKOUT = os.environ.get("MEGATRON_LM")
NEEDED = (
    "needs a checkout of Megatron-LM: set MEGATRON_LM to the folder of core_v0.16.1, and converge "
    f"toolchain build {TOOLCHAIN} --with pydantic pyyaml regex six tqdm"
)


@pytest.fixture(scope="module")
def tests(tmp_path_factory):
    need(TOOLCHAIN)
    packages = (TOOLCHAINS / TOOLCHAIN / "lib").glob("*/site-packages/six.py")
    if not (CHECKOUT and (Path(CHECKOUT) / "pretrain_gpt.py").is_file() and any(packages)):
        pytest.skip(NEEDED)
    names = ("tp2_sp", "distributed_optimizer", "no_ranks_for_sp", "norms_not_summed")
    return run_some(tmp_path_factory.mktemp("megatron_lm"), "megatron_lm", *names)


def test_layouts_are_the_control_by_all_evidence(tests):
    for name in ("tp2_sp", "distributed_optimizer"):
        assert tests[name]["verdict"] == "PASS"
        outcomes = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        for check in (
            *("same-initial-parameters", "same-data", "loss-recomputed-envelope"),
            *("gradients-first-steps", "updates-first-steps", "optimizer-state-first-steps"),
            *("reported-grad-norm-is-recomputed", "replicas-agree"),
        ):
            assert outcomes[check] == "PASS", (name, check)


def test_what_it_turned_off_by_itself_is_not_judged_as_what_was_named(tests):
    assert tests["no_ranks_for_sp"]["verdict"] == "INVALID"
    named = "--sequence-parallel is named, and the program switched it off"
    assert named in tests["no_ranks_for_sp"]["cause"]


def test_an_error_in_it_fails_at_the_first_step_with_its_cause(tests):
    assert verdicts(tests)["norms_not_summed"] == "FAIL"
    assert tests["norms_not_summed"]["onset_step"] == 1
    assert "a reduction of these gradients over tp is missing" in tests["norms_not_summed"]["cause"]
