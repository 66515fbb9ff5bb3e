"""Which random generators a step drew from, in a real process: theirs, ours, and those of hooks."""

import functools
import random

import numpy as np
import pytest
import torch
from probed_loop import lines_of, microbatches, write_job
from torch import nn

from converge_harness.probe import Probe
from converge_harness.rank.recorder.random_states import (
    RandomStates,
    combined,
    halves,
    held_generators,
    shared,
    watched,
)
from converge_harness.rank.recorder.trainer_view import TrainerView

GLOBAL = torch.Generator()


class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.dice = torch.Generator()

    def forward(self, x):
        return super().forward(x) + torch.rand(2, generator=GLOBAL)


class Part:
    """A part of a checkpoint, as programs write it for a generator."""

    def __init__(self, generator):
        self.generator = generator


def view(*modules, stateful=(), frames_steps=True):
    return TrainerView(
        model_parts=modules,
        dp_rank=0,
        first_of_dp=True,
        has_last_stage=True,
        tp_rank=0,
        tp_group=None,
        vocab_size=0,
        device=torch.device("cpu"),
        optimizers=(),
        learning_rate=lambda: 0.0,
        stateful=lambda: stateful,
        frames_steps=frames_steps,
    )


def test_generators_of_the_program_are_found_where_it_holds_them():
    kept, closed_over, given, bound, saved = (torch.Generator() for _ in range(5))
    module = Noisy()
    module.dice = kept

    def hook(_module, _inputs, output):
        return output + torch.rand(2, generator=closed_over)

    def with_generator(_module, _inputs, output, generator):
        return output + torch.rand(2, generator=generator)

    class Mask:
        def __init__(self):
            self.generator = bound

        def drop(self, _module, inputs):
            return inputs

    module.register_forward_hook(hook)
    module.register_forward_hook(functools.partial(with_generator, generator=given))
    module.register_forward_pre_hook(Mask().drop)
    found = [*held_generators([nn.Sequential(module)], [Part(saved), object()])]
    assert {id(each) for each in found} == {
        id(each) for each in (kept, closed_over, given, bound, saved, GLOBAL)
    }
    watched = RandomStates(view(module, stateful=[Part(kept)])).generators
    assert watched[0] is torch.default_generator
    assert len(watched) == len(set(map(id, watched))) == 6


def step_of(states, draw):
    states.begin()
    draw()
    return states.end()


def test_a_step_is_known_by_the_states_that_it_drew_from():
    own = torch.Generator().manual_seed(3)
    states = RandomStates(view(stateful=[Part(own)]))

    def draw():
        torch.rand(3, generator=own)

    before = own.get_state()
    first, second = (step_of(states, draw) for _ in range(2))
    assert 0 not in (first, second)
    assert first != second
    assert step_of(states, lambda: (random.random(), torch.ones(2).sum())) == 0
    own.set_state(before)
    torch.manual_seed(8)  # a generator that nobody draws from does not count
    assert step_of(states, draw) == first
    kept = states.copies()
    third = step_of(states, draw)
    states.put_back(kept)
    assert step_of(states, draw) == third


DRAW = {
    "python": (random.random, random.gauss, lambda: random.seed(3)),
    "numpy": (np.random.rand, np.random.randn, lambda: np.random.seed(3)),  # noqa: NPY002
}


@pytest.mark.parametrize("library", DRAW)
def test_global_generators_of_python_and_numpy_are_watched_each_alone(library):
    draw, half, seed = DRAW[library]
    states = watched(view())
    mine = states.pop(library)
    seed()
    first, second = step_of(mine, draw), step_of(mine, draw)
    assert 0 not in (first, second)
    assert first != second
    assert step_of(mine, lambda: torch.rand(2)) == 0
    assert all(step_of(other, draw) == 0 for other in states.values())
    seed()
    assert step_of(mine, draw) == first
    # A normal number that is kept for the next call is part of the state.
    seed()
    half()
    kept = step_of(mine, half)
    assert kept != 0
    assert step_of(mine, half) != kept


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox])
def test_numpys_generator_may_be_of_another_kind(kind):
    states, before = watched(view())["numpy"], np.random.get_bit_generator()
    np.random.set_bit_generator(kind(3))
    try:
        assert step_of(states, np.random.rand) not in (0, step_of(states, np.random.rand))
    finally:
        np.random.set_bit_generator(before)


def test_what_is_drawn_between_steps_counts_where_steps_are_not_framed():
    own = torch.Generator().manual_seed(3)
    framed, loose = (
        RandomStates(view(stateful=[Part(own)], frames_steps=frames)) for frames in (True, False)
    )
    for states in (framed, loose):
        states.begin()
        states.end()
    torch.rand(3, generator=own)
    assert step_of(framed, lambda: None) == 0
    assert step_of(loose, lambda: None) != 0


def test_ranks_with_equal_states_count_once():
    a, b = halves(2**63 + 7), halves(5)
    assert combined([(0, 0), (0, 0)]) == ""
    assert combined([a, a, (0, 0)]) == combined([a]) != combined([a, b]) == combined([b, a, b])


@pytest.mark.parametrize(
    ("ranks", "alike"),
    [
        ([(0, (1, 2)), (1, (1, 2))], True),
        ([(0, (1, 2)), (1, (1, 3))], False),
        ([(0, (1, 2)), (0, (1, 2)), (1, (1, 3)), (1, (1, 3))], False),  # TP ranks share
        ([(0, (1, 2)), (0, (4, 4)), (1, (1, 2)), (1, (4, 4))], True),  # stages draw apart
        ([(0, (1, 2)), (0, (4, 4)), (1, (4, 4)), (1, (1, 2))], False),  # other layers' numbers
        ([(0, (1, 2)), (0, (1, 2))], None),
        ([(0, (1, 2)), (1, (0, 0))], None),
        ([(0, (0, 0)), (1, (0, 0))], None),
    ],
)
def test_data_parallel_coordinates_are_compared_as_wholes(ranks, alike):
    assert shared(ranks) is alike


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_loop_with_dropout_records_what_it_draws(tmp_path, monkeypatch, hooks, rate):
    monkeypatch.setattr("converge_harness.probe.loop._probed", set())
    monkeypatch.setenv("CONVERGE_JOB", str(write_job(tmp_path / "run")))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 4), nn.Dropout(rate), nn.Linear(4, 13))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Probe.from_env(model, optimizer, hooks=hooks)
    for step in (1, 2, 3):
        for inputs, labels in microbatches(step):
            probe.batch(inputs, labels)
            model(inputs).square().mean().backward()
        optimizer.step()
        if not hooks:
            probe.step(loss=1.0)
        optimizer.zero_grad()
    lines = lines_of(tmp_path / "run")
    found = [line["random_state"] for line in lines]
    assert len(set(found)) == (3 if rate else 1)
    assert ("" in found) == (not rate)
    assert {line["random_shared"] for line in lines} == {None}
    for key in ("python_random_state", "numpy_random_state"):
        assert {line[key] for line in lines} == {""}
