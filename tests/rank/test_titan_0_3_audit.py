"""What the audit of torchtitan 0.3 takes for a sign of an SPMD backend."""

from types import SimpleNamespace

import pytest
import titan_0_3_jobs as jobs

jobs.require_titan_0_3()


def trainer_of(module):
    """A trainer whose model is distributed by a function of that module."""
    spec = SimpleNamespace(parallelize_fn=SimpleNamespace(__module__=module))
    return SimpleNamespace(config=SimpleNamespace(model_spec=spec))


@pytest.fixture
def backends():
    jobs.preload()
    from converge_harness.rank.titan.v0_3.audit import _backends

    return _backends


@pytest.mark.parametrize(
    ("asked", "mesh_dims", "dtensor_logits", "seen"),
    [
        ("partial_dtensor", {"fsdp", "tp"}, True, {"partial_dtensor"}),
        ("partial_dtensor", {"fsdp"}, False, {"partial_dtensor"}),
        ("spmd_types", {"dp_shard", "tp"}, False, {"spmd_types"}),
        ("spmd_types", {"dp_replicate", "dp_shard_cp"}, False, {"spmd_types"}),
        ("spmd_types", {"dp_shard"}, None, {"spmd_types"}),  # an earlier pipeline stage
        ("full_dtensor", {"dp_shard"}, True, {"full_dtensor"}),
        # What is asked for and what is there are two things.
        ("spmd_types", {"fsdp", "tp"}, False, {"spmd_types", "partial_dtensor"}),
        ("full_dtensor", {"dp_shard"}, False, {"full_dtensor", "spmd_types"}),
        ("partial_dtensor", {"dp_shard"}, True, {"partial_dtensor", "full_dtensor"}),
    ],
)
def test_a_backend_is_known_by_its_traces(
    monkeypatch, backends, asked, mesh_dims, dtensor_logits, seen
):
    from torchtitan.distributed import utils as distributed_utils

    monkeypatch.setattr(distributed_utils, "get_spmd_backend", lambda: asked)
    probe = SimpleNamespace(saw_dtensor_logits=dtensor_logits)
    titan = trainer_of("torchtitan.models.llama3.parallelize")
    assert backends(titan, dict.fromkeys(mesh_dims, 2), probe) == seen
    # Code of one's own may shard as it likes.
    assert backends(trainer_of("my_package.parallelize"), mesh_dims, probe) == {asked}
