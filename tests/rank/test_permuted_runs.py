"""``repeat = "permute"`` in real jobs: the same samples, and the same sums in another order."""

import importlib.metadata

import pytest
from run_folders import largest_difference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs():
    """The jobs of the dialect that this toolchain has."""
    if importlib.metadata.version("torchtitan").startswith("0.2."):
        import titan_0_2_jobs as dialect
    else:
        import titan_0_3_jobs as dialect
    return dialect


@pytest.fixture(scope="module")
def runs(jobs, tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("permuted"))


def test_a_permuted_run_differs_by_rounding_only(jobs, runs):
    control, _ = runs.run("fsdp2")
    permuted, _ = runs.run("permute", repeat="permute")
    for signal in ("batch_digest", "tokens", "batch_agrees"):
        assert [line[signal] for line in permuted] == [line[signal] for line in control]
    assert largest_difference(control, permuted, "loss_recomputed") < 1e-6
    assert 0 < largest_difference(control, permuted, "grad_norm_recomputed") < 1e-6
