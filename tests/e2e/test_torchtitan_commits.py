"""docs/bisect.md by a real run: torchtitan's own loop as a program, judged by its curve."""

import pytest
from cut_down import run_whole
from warm_toolchains import TOOLCHAINS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_release_has_neither_of_the_bugs_that_its_commits_had(tmp_path):
    judged = run_whole(tmp_path, "torchtitan_commits", toolchains=TOOLCHAINS)
    assert {name: test["verdict"] for name, test in judged.items()} == {
        "pp2": "PASS",
        "ddp2": "PASS",
    }
    assert judged["pp2"]["degrees"] == "FSDP 2 x PP 2"
