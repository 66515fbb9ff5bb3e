"""Sees gradients before they are clipped, also where clipping is no longer the trainer's own.

The recorder wraps the trainer's clipping function, and what ``inject`` wraps around it changes
gradients before the recorder sees them, as a bug of the trainer would. A bug may also put another
function in its place. So the trainer's module gets a stand-in for torchtitan's utilities, which
shows the recorder the gradients before it calls a function that it does not know; if that one does
call the recorder's wrapper, what the wrapper sees counts.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from converge_harness.rank.recorder.step_recorder import StepRecorder

_NAME = "clip_grad_norm_"


def watch_clipping(
    utilities: ModuleType, trainer_module: ModuleType, recorder: StepRecorder
) -> None:
    """Watch ``clip_grad_norm_`` of ``utilities``, which the trainer calls ``dist_utils``."""
    clip = getattr(utilities, _NAME)

    @functools.wraps(clip)
    def watched(*args: Any, **kwargs: Any) -> Any:
        recorder.before_clip()
        return clip(*args, **kwargs)

    setattr(utilities, _NAME, watched)
    vars(trainer_module)["dist_utils"] = _StandIn(utilities, watched, recorder)


class _StandIn:
    """The utilities as the trainer sees them; whatever is set on it is set on them."""

    def __init__(self, utilities: ModuleType, watched: Any, recorder: StepRecorder) -> None:
        vars(self).update(_utilities=utilities, _watched=watched, _recorder=recorder)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_utilities"], name)
        return self._shown(value) if name == _NAME and value is not self._watched else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_utilities"], name, value)

    def _shown(self, clip: Any) -> Any:
        @functools.wraps(clip)
        def shown(*args: Any, **kwargs: Any) -> Any:
            self._recorder.before_unknown_clip()
            return clip(*args, **kwargs)

        return shown
