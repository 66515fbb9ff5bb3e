"""What a pipeline's stages train on, and what torch's schedules do besides training."""

from __future__ import annotations

from typing import Any

import torch

from converge_harness.rank.recorder.step_recorder import StepRecorder


def stages(schedule: Any) -> list[Any]:
    """The pipeline stages that a schedule runs on this rank."""
    return list(getattr(schedule, "_stages", None) or [schedule._stage])


def ignore_shape_inference(schedule: Any, recorder: StepRecorder) -> None:
    """Keep the recorder from counting what torch computes to learn shapes.

    Before its first step a schedule runs forward, loss and backward once on made-up tensors
    (``PipelineStage._forward_metadata_inference`` and ``_backward_metadata_inference``, since torch
    2.12), through the same modules and loss function that training uses.
    """
    for stage in stages(schedule):
        for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
            infer = getattr(stage, name, None)
            if infer is not None:
                setattr(stage, name, _not_counting(infer, recorder))


def watch_microbatches(trainer: Any, recorder: StepRecorder) -> None:
    """Tell the recorder which tokens each stage works on: later stages get no tokens.

    torchtitan 0.3 hands its schedule one input per microbatch, 0.2 one for all of them.
    """
    schedule = trainer.pp_schedule
    process = trainer.post_dataloading_process
    inputs: list[torch.Tensor] = []
    began = False
    """Whether the schedule has begun with these inputs: the next ones are those of another call."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal began
        if began:
            inputs.clear()
            began = False
        found = process(*args, **kwargs)
        inputs.append(found[0])
        return found

    def tokens_of(number: int) -> torch.Tensor | None:
        count = schedule._n_microbatches
        parts = inputs[0].tensor_split(count) if len(inputs) == 1 else inputs
        return parts[number] if len(parts) == count else None

    def watch(forward: Any) -> Any:
        def chunk(number: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal began
            began = True
            recorder.on_microbatch(tokens_of(number))
            return forward(number, *args, **kwargs)

        return chunk

    trainer.post_dataloading_process = watched
    for stage in stages(schedule):
        stage.forward_one_chunk = watch(stage.forward_one_chunk)


def _not_counting(infer: Any, recorder: StepRecorder) -> Any:
    def infer_unwatched(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return infer(*args, **kwargs)

    return infer_unwatched
