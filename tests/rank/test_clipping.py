"""When the probe sees gradients, whatever is put over the trainer's clipping function."""

from types import ModuleType

import torch

from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.titan.common.clipping import watch_clipping


class Seen:
    """Notes what a probe's hooks would sample: the gradient at that time."""

    before_clip = StepRecorder.before_clip
    before_unknown_clip = StepRecorder.before_unknown_clip

    def __init__(self):
        self._clipping = False
        self.gradient = torch.full((2,), 4.0)
        self.sampled = None

    def take_gradients(self):
        self.sampled = float(self.gradient[0])


def watched():
    """A trainer's module that calls the utilities as torchtitan does, and what a probe saw."""
    utilities, trainer_module = ModuleType("utils"), ModuleType("trainer")
    seen = Seen()
    utilities.clip_grad_norm_ = seen.gradient.mul_
    trainer_module.dist_utils = utilities
    watch_clipping(utilities, trainer_module, seen)
    return utilities, lambda: trainer_module.dist_utils.clip_grad_norm_(0.5), seen


def test_gradients_are_seen_before_the_trainers_own_clipping():
    _, clip, seen = watched()
    clip()
    assert (seen.sampled, float(seen.gradient[0])) == (4.0, 2.0)


def test_what_an_injected_wrapper_does_before_clipping_is_seen():
    utilities, clip, seen = watched()
    inner = utilities.clip_grad_norm_

    def wrapper(factor):
        seen.gradient.mul_(10)
        return inner(factor)

    utilities.clip_grad_norm_ = wrapper
    clip()
    assert seen.sampled == 40.0


def test_the_first_of_several_calls_counts():
    utilities, clip, seen = watched()
    inner = utilities.clip_grad_norm_
    utilities.clip_grad_norm_ = lambda factor: (inner(factor), inner(factor))
    clip()
    assert (seen.sampled, float(seen.gradient[0])) == (4.0, 1.0)


def test_gradients_are_seen_where_clipping_was_replaced():
    utilities, clip, seen = watched()
    utilities.clip_grad_norm_ = lambda factor: seen.gradient.mul_(factor / 2)
    clip()
    assert (seen.sampled, float(seen.gradient[0])) == (4.0, 1.0)


def test_what_is_set_through_the_trainers_module_is_set_on_the_utilities():
    utilities, trainer_module = ModuleType("utils"), ModuleType("trainer")
    utilities.clip_grad_norm_ = lambda: "clipped"
    watch_clipping(utilities, trainer_module, Seen())
    trainer_module.dist_utils.other = 3
    assert utilities.other == trainer_module.dist_utils.other == 3
