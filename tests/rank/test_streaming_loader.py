"""``loader = "streaming"``: MosaicML Streaming in real jobs, where the toolchain has it."""

import importlib.util

import pytest
import titan_0_3_jobs as jobs

jobs.require_titan_0_3()
if importlib.util.find_spec("streaming") is None:
    pytest.skip("needs toolchain torchtitan-0.3.0-streaming", allow_module_level=True)

DEGREES = {
    "two": {},
    "one": {"dp_shard": 1},
    "four": {"dp_shard": 4, "overrides": {"training.local_batch_size": 2}},
    "staged": {"pp": 2, "pipeline_schedule": "1F1B"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("streaming"))


def digests(steps):
    assert all(line["batch_agrees"] for line in steps)
    return [line["batch_digest"] for line in steps]


@pytest.mark.slow
def test_the_order_depends_on_no_degree(runs):
    by_degree = {
        name: digests(runs.run(name, loader="streaming", **changes)[0])
        for name, changes in DEGREES.items()
    }
    assert len(set(by_degree["two"])) == 3
    assert by_degree == dict.fromkeys(DEGREES, by_degree["two"])
