"""Runs of a flattened tensor: they sketch to the whole, wherever they are cut."""

import itertools

import pytest
import torch

from converge_harness.rank.recorder.fetched_shard import FetchedShardError
from converge_harness.rank.recorder.flat_shard import FlatShard
from converge_harness.rank.recorder.placement import HeldRun, held
from converge_harness.rank.recorder.sketch import WIDTH, Sketcher, hashed_parts

CPU = torch.device("cpu")
SHAPES = ((), (7,), (1, 5), (5, 1), (3, 4), (2, 3, 2), (4, 1, 3))


def sketched(tensor):
    """Shape (1, WIDTH): what a tensor, or a run of one, adds to its row."""
    values = tensor.local() if isinstance(tensor, FlatShard) else tensor
    parts = hashed_parts("w", held(tensor), CPU)
    into = torch.zeros(1, WIDTH, dtype=torch.float64)
    Sketcher(4, CPU).add([(0, part.hash, part.of(values)) for part in parts], into)
    return into


def run(whole, start, stop):
    return FlatShard(whole.shape, start, stop, lambda: whole.reshape(-1)[start:stop])


@pytest.mark.parametrize("shape", SHAPES)
def test_two_runs_sketch_to_the_whole_wherever_they_are_cut(shape):
    # Powers of two: any entry counted twice, not at all or in another place changes the sums.
    whole = (2.0 ** torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).view(shape)
    for cut in range(whole.numel() + 1):
        both = sketched(run(whole, 0, cut)) + sketched(run(whole, cut, whole.numel()))
        assert torch.equal(both, sketched(whole)), cut


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_knows_its_entries_of_the_whole(shape):
    numel = torch.Size(shape).numel()
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        found = [index for _, index in HeldRun(shape, start, stop).blocks(3, CPU)]
        assert sum((part.tolist() for part in found), []) == list(range(start, stop))  # noqa: RUF017


def test_what_is_fetched_is_what_the_run_says():
    with pytest.raises(FetchedShardError, match="are not in shape"):
        FlatShard((3, 4), 4, 13, lambda: torch.zeros(9))
    with pytest.raises(FetchedShardError, match="now has 2 entries"):
        FlatShard((3, 4), 4, 7, lambda: torch.zeros(2)).local()


def test_states_of_another_size_are_no_shards():
    states = {"exp_avg": torch.ones(3), "step": torch.tensor(2.0), "row": torch.ones(2)}
    kept = FlatShard((3, 4), 4, 7, lambda: torch.zeros(3), states=lambda: states).kept()
    assert kept["exp_avg"].local().tolist() == [1, 1, 1]
    assert (kept["exp_avg"].start, kept["exp_avg"].shape) == (4, (3, 4))
    assert (kept["step"], kept["row"]) == (states["step"], states["row"])
