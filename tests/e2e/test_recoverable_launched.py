"""docs/resumes.md by real runs: a program under other launchers, resized and interrupted."""

import shutil

import pytest
from cut_down import need, outcomes, run_whole
from warm_toolchains import TOOLCHAINS

LOADED = {
    "resized": ([0, 4, 8],),
    "killed": ([0, 0, 4],),
    "preempted": ([0, 6], [0, 7]),  # it saves the step in which SIGTERM comes
    "hung": ([0, 4],),
    "torn": ([0, 4],),
}
"""By set, the steps that its starts may load."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("name", "toolchain"),
    [
        ("recoverable_mpirun", "torchtitan-0.3.0"),
        ("recoverable_deepspeed", "deepspeed-0.19.8"),
    ],
)
def test_a_program_is_the_same_resized_and_interrupted_under_a_launcher(tmp_path, name, toolchain):
    need(toolchain)
    if name == "recoverable_mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs mpirun (openmpi-bin)")
    judged = run_whole(tmp_path, name, toolchains=TOOLCHAINS)  # mpirun and DeepSpeed start cold
    assert judged.keys() == LOADED.keys()
    for each, loaded in LOADED.items():
        test = judged[each]
        assert test["verdict"] == "PASS", test["cause"]
        assert [one["loaded_step"] for one in test["passes"]] in loaded, each
        found = outcomes(test)
        for check in ("passes-continuous", "state-restored", "data-resumed"):
            assert found[check] == "PASS", (each, check)
