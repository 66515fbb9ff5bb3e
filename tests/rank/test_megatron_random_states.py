"""Random states that Megatron-Core keeps by name, and its dropout, on tensor-parallel ranks."""

import warnings

import pytest
from gloo_ranks import run_on_ranks
from megatron_models import NEEDED, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.dropout_masks import MaskWatch
from converge_harness.rank.recorder.random_states import RandomStates, named_states
from converge_harness.rank.recorder.trainer_view import TrainerView

pytestmark = pytest.mark.filterwarnings("ignore")
ONES = torch.ones(256)
NOTHING = torch.zeros(256)


def states():
    return RandomStates(
        TrainerView(
            model_parts=(),
            dp_rank=0,
            first_of_dp=True,
            has_last_stage=True,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_group=None,
            vocab_size=0,
            device=torch.device("cpu"),
            optimizers=(),
            learning_rate=lambda: 0.0,
        )
    )


def replicated():
    """Hidden dropout: of an activation that all tensor-parallel ranks have."""
    get_bias_dropout_add(training=True, fused=False)((ONES, None), NOTHING, 0.5)


def split():
    """Of each rank's own part, as in attention: from the state by name."""
    with get_cuda_rng_tracker().fork(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.functional.dropout(ONES, 0.5)


def step_of(watched, draw):
    """The digest of the states drawn from, and the sums of the masks."""
    masks = MaskWatch((), torch.device("cpu"))
    watched.begin()
    masks.begin()
    draw()
    return watched.end(), masks.end().sums


def rank_draws():
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    assert b"model-parallel-rng" in named_states()
    watched = states()
    (whole, mask), (named, part) = step_of(watched, replicated), step_of(watched, split)
    assert 0 not in (whole, named, mask, part)
    by_rank = [world.everyones(each) for each in (whole, mask, named, part)]
    assert [len(set(each)) for each in by_rank] == [1, 1, 2, 2]
    # It goes on; and a resume that restores torch's own states alone would start it over.
    assert step_of(watched, split) != (named, part)
    saved = watched.now()
    model_parallel_cuda_manual_seed(1)
    assert watched.now() != saved
    assert step_of(states(), split) == (named, part)
    assert step_of(watched, lambda: None) == (0, 0)


def test_states_by_name_are_drawn_from_on_their_own_and_tp_ranks_share_the_others():
    run_on_ranks(rank_draws, 2)


def rank_names():
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    watched, tracker = states(), get_cuda_rng_tracker()
    old = tracker.get_states()

    def forget():
        tracker.set_states(old)

    for change in (lambda: tracker.add("more", 7), forget):
        watched.begin()
        change()
        assert watched.end() == 0
    drawn, saved = step_of(watched, split)[0], watched.now()
    model_parallel_cuda_manual_seed(1)
    tracker.set_states(dict(reversed(tracker.get_states().items())))
    assert list(tracker.get_states()) == list(old)[::-1] != list(old)
    again = states()
    assert step_of(again, split)[0] == drawn
    assert again.now() == saved


def test_names_that_come_and_go_are_no_draws_and_their_order_is_nothing():
    run_on_ranks(rank_names, 2)
