"""Every set of docs/rl.md by a real run: eight right updates, sixteen published mistakes."""

import tomllib

import pytest
from rl_runs import EXPERIMENTS, RIGHT, WRONG, judged, require_told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_every_right_update_passes_and_every_mistake_fails_by_its_cause(tmp_path):
    for name, sets in (("rl", RIGHT), ("rl_mistakes", WRONG)):
        file = tomllib.loads((EXPERIMENTS / f"{name}.toml").read_text())
        assert [test["name"] for test in file["test"]] == list(sets)
    tests = judged(tmp_path, *RIGHT, *WRONG, timeout_s=3500)
    assert len(tests) == 24
    require_told(tests)
