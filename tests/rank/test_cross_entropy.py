"""The float64 loss: whole vocabularies and shards of them, ignored labels, many calls."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from converge_harness.rank.recorder import cross_entropy
from converge_harness.rank.recorder.cross_entropy import CrossEntropySum

VOCABULARY = 37
NEAR = 1e-9
"""Of the sum: each exponential is a float32, off by at most one part in ten million."""


def batch(seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 5, VOCABULARY, generator=random) * 5).to(dtype)
    labels = torch.randint(0, VOCABULARY, (2, 5), generator=random)
    labels[0, 3] = labels[1, 0] = -100
    return logits, labels


def expected(logits, labels):
    return float(
        functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_torchs_in_float64_but_for_the_exponentials(dtype):
    logits, labels = batch(dtype=dtype)
    total = CrossEntropySum(VOCABULARY)
    total.add(logits, labels)
    assert total.take() == pytest.approx(expected(logits, labels), rel=NEAR)


def test_calls_add_up_and_a_new_step_begins_at_zero():
    total = CrossEntropySum(VOCABULARY)
    for seed in (0, 1):
        total.add(*batch(seed))
    assert total.take() == pytest.approx(expected(*batch(0)) + expected(*batch(1)), rel=NEAR)
    assert total.take() == 0


def test_blocks_do_not_change_the_sum(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", {"cpu": 3 * VOCABULARY, "cuda": 0})
    total = CrossEntropySum(VOCABULARY)
    total.add(*batch())
    assert total.take() == pytest.approx(expected(*batch()), rel=NEAR)


def test_large_and_infinite_logits_are_as_torch_has_them():
    logits, labels = batch()
    total = CrossEntropySum(VOCABULARY)
    for changed in (logits * 1e4, logits - 1e5):
        total.add(changed, labels)
        assert total.take() == pytest.approx(expected(changed, labels), rel=NEAR)
    for value in (torch.inf, torch.nan):
        broken = logits.clone()
        broken[0, 0, 0] = value
        total.add(broken, labels)
        assert not math.isfinite(total.take())


def test_a_target_outside_the_vocabulary_is_infinitely_unlikely():
    """What a label shifted out of its range (a known bug of vocabulary sharding) looks like."""
    logits, labels = batch()
    labels[0, 0] = VOCABULARY
    total = CrossEntropySum(VOCABULARY)
    total.add(logits, labels)
    assert total.take() == float("inf")


def test_a_nan_logit_makes_the_sum_nan():
    logits, labels = batch()
    logits[0, 0, 0] = float("nan")
    total = CrossEntropySum(VOCABULARY)
    total.add(logits, labels)
    assert total.take() != total.take()


def sharded_vocabulary(as_dtensor):
    logits, labels = batch()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    placed = distribute_tensor(logits, mesh, (Shard(2),))
    total = CrossEntropySum(VOCABULARY, mesh.get_group())
    for _ in range(2):  # two microbatches, one gather
        if as_dtensor:
            total.add(placed, DTensor.from_local(labels, mesh, (Replicate(),)))
        else:
            total.add(placed.to_local(), labels)
    assert total.take() == pytest.approx(2 * expected(logits, labels), rel=NEAR)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("as_dtensor", [True, False])
def test_vocabulary_shards_give_the_whole_sum(ranks, as_dtensor):
    run_on_ranks(sharded_vocabulary, ranks, as_dtensor)


def other_labels():
    logits, labels = batch()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    shard = distribute_tensor(logits, mesh, (Shard(2),)).to_local()
    total = CrossEntropySum(VOCABULARY, mesh.get_group())
    mine = labels.clone()
    mine[0, 0] = -100 if dist.get_rank() else 5
    total.add(shard, mine)
    assert math.isnan(total.take())
    assert "different labels" in total.problems[0].sentence
    total.add(shard, labels)
    assert total.take() == pytest.approx(expected(logits, labels), rel=NEAR)
    assert not total.problems


def test_ranks_of_one_vocabulary_with_other_labels_have_no_sum():
    run_on_ranks(other_labels, 2)
