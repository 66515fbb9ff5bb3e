"""What torch's pipeline schedules do besides training."""

from __future__ import annotations

from typing import Any

from converge_harness.rank.recorder.step_recorder import StepRecorder


def stages(schedule: Any) -> list[Any]:
    """The pipeline stages that a schedule runs on this rank."""
    return list(getattr(schedule, "_stages", None) or [schedule._stage])


def ignore_shape_inference(schedule: Any, recorder: StepRecorder) -> None:
    """Keep the recorder from counting the loss that torch computes to learn shapes.

    Before its first step a schedule runs forward, loss and backward once on made-up tensors
    (``PipelineStage._backward_metadata_inference``, since torch 2.12), through the same loss
    function that training uses.
    """
    for stage in stages(schedule):
        infer = getattr(stage, "_backward_metadata_inference", None)
        if infer is not None:
            stage._backward_metadata_inference = _not_counting(infer, recorder)


def _not_counting(infer: Any, recorder: StepRecorder) -> Any:
    def infer_unwatched(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return infer(*args, **kwargs)

    return infer_unwatched
