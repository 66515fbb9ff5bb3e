"""What the recorder costs a training step on a GPU, and that nothing in a step waits for it.

``python tests/gpu/step_cost.py FOLDER`` in a toolchain prints seconds per step as JSON, without the
recorder and with it. With ``--strict`` torch raises where something waits for the device before
the step's end.
"""

import json
import statistics
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView
from converge_harness.run_folder.job import BaseConfig, Degrees, RankJob

STEPS, WARM_UP = 60, 20
VOCABULARY, WIDTH, LAYERS, TOKENS = 32_000, 2048, 8, 4096
SMALL = {"VOCABULARY": 64, "WIDTH": 32, "LAYERS": 2, "TOKENS": 128, "STEPS": 4, "WARM_UP": 1}
"""For a look at the program itself, on a CPU."""


def recorder_of(model, optimizer, folder, device):
    job = RankJob("x", "control", "id", "titan_0_3", folder, 1, STEPS, Degrees(), BaseConfig("x"))
    view = TrainerView(
        model_parts=(model,),
        dp_rank=0,
        first_of_dp=True,
        has_last_stage=True,
        tp_rank=0,
        tp_group=None,
        vocab_size=VOCABULARY,
        device=device,
        optimizers=(optimizer,),
        learning_rate=lambda: 1e-4,
    )
    return StepRecorder(view, job)


class Unwatched:
    """In the recorder's place: the same calls, which do nothing but wait where a step ends."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return lambda *_: None

    def forward_backward(self):
        return nullcontext()

    def end_step(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def raising_where_it_waits(strict):
    if strict:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if strict:
            torch.cuda.set_sync_debug_mode("default")


def seconds_per_step(folder, device, *, recorded, strict):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH), *layers, torch.nn.Linear(WIDTH, VOCABULARY)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    recorder = recorder_of(model, optimizer, folder, device) if recorded else Unwatched(device)
    inputs = torch.randint(VOCABULARY, (8, TOKENS // 8), device=device)
    labels = inputs.roll(-1, dims=1)
    durations = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        recorder.begin_step(step)
        with raising_where_it_waits(strict):
            for _ in range(2):
                recorder.on_batch(inputs, labels)
                with recorder.forward_backward():
                    logits = model(inputs)
                    recorder.on_logits(logits, labels)
                    torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), labels.flatten()
                    ).backward()
            recorder.before_clip()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        recorder.end_step()
        durations.append(time.perf_counter() - began)
    recorder.close()
    return statistics.median(durations[WARM_UP:])


def main():
    folder = Path(sys.argv[1])
    strict = "--strict" in sys.argv
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "--small" in sys.argv:
        globals().update(SMALL)
    seconds = {
        name: seconds_per_step(folder, device, recorded=recorded, strict=strict)
        for name, recorded in (("plain", False), ("recorded", True))
    }
    sys.stdout.write(json.dumps(seconds) + "\n")


if __name__ == "__main__":
    main()
