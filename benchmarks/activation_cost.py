"""What looking at modules costs: a forward and backward pass with their hooks, and one without.

``nox -s bench -- activations`` runs both in turn in one process, so that slow phases of the machine
affect both, and prints the ratio of their CPU times. Only the first batches of a run are looked at.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn

from converge_harness.rank.recorder.activations import ActivationSampler
from converge_harness.rank.recorder.trainer_view import TrainerView

VOCABULARY, SAMPLES, LENGTH = 2048, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, action="append", default=[])
    arguments = parser.parse_args()
    for width in arguments.width or (256, 512):
        with_hooks, without = _measured(width, arguments.rounds)
        print(
            f"width {width}, {SAMPLES * LENGTH} tokens: {with_hooks / without:.2f} times a pass "
            f"without hooks ({without:.2f} s of CPU time)"
        )


def _measured(width: int, rounds: int) -> tuple[float, float]:
    """Median CPU seconds of a pass with hooks, and of one without."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), layers, nn.Linear(width, VOCABULARY))
    view = TrainerView(
        model_parts=(model,),
        dp_rank=0,
        first_of_dp=True,
        has_last_stage=True,
        tp_rank=0,
        tp_group=None,
        vocab_size=VOCABULARY,
        device=torch.device("cpu"),
        optimizers=(),
        learning_rate=lambda: 0.0,
    )

    def one_pass() -> None:
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1))
        logits = model(tokens[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()

    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * (rounds + 1)):
        watched = number % 2 == 0
        began = time.process_time()
        if watched:
            samples = ActivationSampler(view, 0, None)
            samples.begin()
            one_pass()
            samples.end_batch()
            samples.finish()
        else:
            one_pass()
        if number > 1:  # the first round fills caches
            seconds[watched].append(time.process_time() - began)
    return median(seconds[True]), median(seconds[False])


if __name__ == "__main__":
    main()
