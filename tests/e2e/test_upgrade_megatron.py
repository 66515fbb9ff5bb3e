"""The newest Megatron-Core against the one before it, each in its toolchain."""

import pytest
from cut_down import need, run_some, verdicts

pytestmark = pytest.mark.slow


def test_layouts_of_the_newest_release_compute_what_the_older_one_does(tmp_path):
    for name in ("megatron-core-0.16.1", "megatron-core-0.19.2"):
        need(name)
    names = ("dp2", "tp2_sp", "ep2")
    tests = run_some(tmp_path, "upgrade_megatron", *names)
    assert verdicts(tests) == dict.fromkeys(names, "PASS")
    for name in names:
        outcomes = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        for check in ("same-initial-parameters", "gradients-first-steps", "updates-first-steps"):
            assert outcomes[check] == "PASS", (name, check)
