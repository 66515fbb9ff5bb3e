"""The counter-based hash is SplitMix64."""

import torch

from converge_harness.rank.recorder.bits import mixed


def test_published_outputs():
    """The first outputs for seed 1234567, as published implementations print them."""
    bits = mixed(torch.arange(1, 6), 1234567).tolist()
    assert [value % (1 << 64) for value in bits] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_counter_does_not_depend_on_its_neighbours():
    counters = torch.tensor([0, 5, -1, 1 << 62])
    alone = torch.cat([mixed(counter[None], 7) for counter in counters])
    assert torch.equal(mixed(counters, 7), alone)
    assert counters.tolist() == [0, 5, -1, 1 << 62]  # not changed in place
