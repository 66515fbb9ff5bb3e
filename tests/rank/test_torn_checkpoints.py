"""A job that a scheduler requeued: what its ranks set aside before any of them goes on."""

import pytest
from gloo_ranks import run_on_ranks

from converge_harness.rank.recorder.step_recorder import begin_pass


@pytest.mark.parametrize("requeued", [True, False])
def test_torn_checkpoints_are_gone_before_any_rank_goes_on(tmp_path, requeued):
    (tmp_path / "checkpoint" / "step-4").mkdir(parents=True)  # death in the middle of the save
    state = tmp_path / "passes" / "001" / "state"
    state.mkdir(parents=True)
    (state / "saved-step-00000004.npz").touch()

    def begin():
        this = begin_pass(tmp_path, set_aside=requeued)
        assert this.number == 2
        assert (tmp_path / "checkpoint" / "step-4").exists() is not requeued

    run_on_ranks(begin, 2)
