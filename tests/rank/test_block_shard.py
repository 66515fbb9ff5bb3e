"""Blocks of a tensor: they sketch to the whole, and say which entries they are."""

import pytest
import torch

from converge_harness.rank.recorder.block_shard import BlockShard
from converge_harness.rank.recorder.fetched_shard import FetchedShardError
from converge_harness.rank.recorder.grad_norm import placement_problem, shard_key
from converge_harness.rank.recorder.placement import held, local_shard
from converge_harness.rank.recorder.sketch import WIDTH, Sketcher, hashed_parts

CPU = torch.device("cpu")
GATED = ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))
"""The rows of the two ranks of a gated weight of 8 rows."""


def block(whole, *runs):
    rows = torch.tensor([at for run in runs for at in run])
    return BlockShard(whole.shape, (runs, (range(whole.shape[1]),)), lambda: whole[rows])


def sketched(shard):
    parts = hashed_parts("w", held(shard), CPU)
    into = torch.zeros(1, WIDTH, dtype=torch.float64)
    Sketcher(4, CPU).add([(0, part.hash, part.of(local_shard(shard))) for part in parts], into)
    return into


def test_the_blocks_of_a_gated_weight_sketch_to_the_whole():
    # Powers of two: any entry counted twice, not at all or in another place changes the sums.
    whole = (2.0 ** torch.arange(24, dtype=torch.float64)).view(8, 3)
    first, second = (block(whole, *runs) for runs in GATED)
    assert torch.equal(sketched(first) + sketched(second), sketched(whole))
    assert not torch.equal(2 * sketched(first), sketched(whole))


def test_the_same_block_has_the_same_key_and_no_other():
    whole = torch.zeros(8, 3)
    first, second = (block(whole, *runs) for runs in GATED)
    assert shard_key("w", first) == shard_key("w", block(whole, *GATED[0]))
    assert shard_key("w", first) != shard_key("w", second)
    assert shard_key("w", block(whole, range(8))) == ("w", ())


def test_a_gradient_of_other_entries_is_no_gradient_of_the_block():
    whole = torch.zeros(8, 3)
    first, second = (block(whole, *runs) for runs in GATED)
    assert placement_problem(first, block(whole, *GATED[0])) == ""
    assert "its parameter" in placement_problem(first, second)


def test_what_is_fetched_is_what_the_block_says():
    with pytest.raises(FetchedShardError, match="are not in shape"):
        block(torch.zeros(8, 3), range(6, 9))
    with pytest.raises(FetchedShardError, match="now has 3 entries"):
        BlockShard((8, 3), ((range(2),), (range(3),)), lambda: torch.zeros(3)).local()


def test_states_of_another_size_are_no_shards():
    states = {"exp_avg": torch.ones(6), "step": torch.tensor(2.0)}
    shard = BlockShard(
        (8, 3), ((range(2),), (range(3),)), lambda: torch.zeros(6), states=lambda: states
    )
    kept = shard.kept()
    assert kept["exp_avg"].local().shape == (2, 3)
    assert kept["step"] is states["step"]
