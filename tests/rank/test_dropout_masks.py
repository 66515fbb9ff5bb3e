"""What dropout keeps, seen from outside: every call, no change of training, ranks that agree."""

import functools

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from probed_loop import STEPS, lines_of, microbatches, write_job
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from converge_harness.probe import Probe
from converge_harness.rank.recorder.dropout_masks import Kept, MaskWatch

DROP = {
    "module": nn.Dropout(0.25),
    "in place": lambda x: nn.Dropout(0.25, inplace=True)(x.clone()),
    "function": lambda x: nn.functional.dropout(x, 0.25),
    "keywords": lambda x: nn.functional.dropout(input=x, training=True, p=0.25),
    "torch": lambda x: torch.dropout(x, 0.25, train=True),
    "attention weights": lambda x: nn.MultiheadAttention(8, 1, 0.25, batch_first=True)(
        *[x.view(4, 8, 8)] * 3
    )[1],
}
ONES = torch.ones(256)


def watch(*modules, device="cpu"):
    return MaskWatch(modules, torch.device(device))


def seen(masks, draw, *, seed=3):
    torch.manual_seed(seed)
    masks.begin()
    result = draw()
    return masks.end(), result, torch.get_rng_state()


@pytest.mark.parametrize("how", DROP)
def test_a_mask_is_seen_and_training_goes_on_as_without(how):
    masks, x = watch(), torch.linspace(1, 2, 256)
    found, result, state = seen(masks, lambda: DROP[how](x))
    torch.manual_seed(3)
    expected = DROP[how](x)
    assert torch.equal(result, expected)
    assert torch.equal(state, torch.get_rng_state())
    assert found.units == 256
    if how != "attention weights":
        assert found.kept == expected.count_nonzero()


def test_sums_are_those_of_the_places_kept_in_the_order_of_the_calls():
    masks, drop = watch(), nn.Dropout(0.5)
    first, _, _ = seen(masks, lambda: drop(ONES))
    # Zeros in the input hide nothing, and neither does its type.
    for x in (torch.zeros(256), ONES.double().requires_grad_()):
        assert seen(masks, lambda x=x: drop(x))[0] == first
    other, _, _ = seen(masks, lambda: drop(ONES), seed=4)
    assert other.sums != first.sums

    def both(one, two):
        def draw():
            for seed in (one, two):
                torch.manual_seed(seed)
                drop(ONES)

        return seen(masks, draw)[0]

    assert both(3, 4).units == 512
    assert both(3, 4).kept == both(4, 3).kept == first.kept + other.kept
    assert both(3, 4).sums not in (both(4, 3).sums, first.sums)


def test_what_drops_nothing_in_training_is_not_counted():
    def draw():
        nn.Dropout(0.0)(ONES)
        nn.Dropout(0.5).eval()(ONES)
        nn.functional.dropout(ONES, 1.0)
        torch.dropout(ONES, 0.5, train=False)
        with torch.no_grad():
            nn.Dropout(0.5)(ONES)

    assert seen(watch(), draw)[0] == Kept(0, 0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch 2.13's own
def test_a_compiled_part_of_the_model_is_not_looked_into():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model[0].compile()
    assert seen(watch(model), lambda: nn.Dropout(0.5)(ONES))[0] is None


def test_functions_are_torchs_own_again_afterwards():
    theirs = nn.functional.dropout, torch.dropout
    masks = watch()
    assert masks.end() is None
    masks.begin()
    masks.begin()
    assert nn.functional.dropout is not theirs[0]
    masks.leave()
    assert (nn.functional.dropout, torch.dropout) == theirs


def test_a_function_that_a_program_keeps_looks_no_longer():
    """It has imported or wrapped it in a sampled step, and goes on calling it."""
    masks, theirs = watch(), torch.nn.functional.dropout
    masks.begin()
    kept = nn.functional.dropout
    nn.functional.dropout = functools.partial(kept)
    try:
        assert masks.end() == Kept(0, 0, 0)
        with Operations() as without:
            theirs(ONES, 0.5)
        with Operations() as found:
            kept(ONES, 0.5)
        assert found.names == without.names
        # At the next sampled step a call through it counts once.
        assert seen(masks, lambda: nn.Dropout(0.5)(ONES))[0].units == 256
    finally:
        nn.functional.dropout = theirs


class Operations(TorchDispatchMode):
    """What a dispatch mode sees, such as selective activation checkpointing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The calls of dropout that a function mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function.__name__ == "dropout":
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Operations, Functions])
@pytest.mark.parametrize("place", [nn.functional, torch])
def test_modes_of_the_program_see_only_its_own_calls(mode, place):
    def draw():
        with mode() as found:
            place.dropout(ONES, 0.5, True)
        return found.names

    without = draw()
    assert without
    found, names, _ = seen(watch(), draw)
    assert names == without
    assert found.units == 256


TRANSFORMED = {
    "its argument": lambda x: nn.functional.dropout(x, 0.5),
    "a tensor from outside": lambda x: x * nn.functional.dropout(ONES, 0.5),
}


@pytest.mark.parametrize("what", TRANSFORMED)
def test_a_mask_in_a_transform_is_not_recorded_and_ends_no_training(what):
    def draw():
        return torch.vmap(TRANSFORMED[what], randomness="different")(ONES.expand(3, -1))

    found, result, state = seen(watch(), draw)
    assert found is None
    torch.manual_seed(3)
    assert torch.equal(result, draw())
    assert torch.equal(state, torch.get_rng_state())


def test_a_mask_on_another_device_than_the_models_is_not_recorded():
    assert seen(watch(device="meta"), lambda: nn.Dropout(0.5)(ONES))[0] is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_of_activation_checkpointing_count_again_where_both_have_gradients(reentrant):
    def drop(x):
        return nn.functional.dropout(x, 0.5).exp()

    def draw():
        x = ONES.clone().requires_grad_()
        checkpoint(drop, x, use_reentrant=reentrant).sum().backward()

    assert seen(watch(), draw)[0].units == 256 * (1 if reentrant else 2)


def train(job, monkeypatch, *, seed=0, rate=0.5, wrap=lambda model: model, **from_env):
    monkeypatch.setattr("converge_harness.probe.loop._probed", set())
    monkeypatch.setenv("CONVERGE_JOB", str(job))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 16), nn.Dropout(rate), nn.Linear(16, 13))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    probe = Probe.from_env(wrap(model), optimizer, **from_env)
    for step in range(1, STEPS + 1):
        for inputs, labels in microbatches(step):
            probe.batch(inputs, labels)
            model(inputs).square().mean().backward()
        optimizer.step()
        if not from_env.get("hooks"):
            probe.step(loss=1.0)
        optimizer.zero_grad()


@pytest.mark.parametrize("hooks", [False, True])
def test_a_loop_records_its_masks_at_sampled_steps(tmp_path, monkeypatch, hooks):
    train(write_job(tmp_path / "run"), monkeypatch, hooks=hooks)
    first, second, third = (line.get("dropout_masks") for line in lines_of(tmp_path / "run"))
    assert third is None  # it is not sampled
    assert first["units"] == second["units"] == [8 * 5 * 16]
    assert 200 < first["kept"][0] < 440
    assert first["sums"] != second["sums"]
    assert first["shared"] is None
    train(write_job(tmp_path / "none"), monkeypatch, hooks=hooks, rate=0.0)
    assert not any("dropout_masks" in line for line in lines_of(tmp_path / "none"))


def rank_shares(folder, same_seed, tensor_parallel):
    rank = dist.get_rank()
    place = {"dp_rank": 0, "dp_degree": 1} if tensor_parallel else {}
    wrap = (lambda model: model) if tensor_parallel else DistributedDataParallel
    with pytest.MonkeyPatch.context() as patch:
        train(folder / "job.json", patch, seed=1 if same_seed else rank, wrap=wrap, **place)
    dist.barrier()
    masks = lines_of(folder)[0]["dropout_masks"]
    assert len(set(masks["sums"])) == (1 if same_seed else 2)
    assert masks["shared"] is (None if tensor_parallel else same_seed)


@pytest.mark.parametrize("same_seed", [True, False])
@pytest.mark.parametrize("tensor_parallel", [True, False])
def test_ranks_of_other_samples_share_masks_or_not_and_tp_ranks_may(
    tmp_path, same_seed, tensor_parallel
):
    write_job(tmp_path / "run")
    run_on_ranks(rank_shares, 2, tmp_path / "run", same_seed, tensor_parallel)
