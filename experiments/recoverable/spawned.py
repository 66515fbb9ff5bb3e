"""train.py without a launcher: the program starts its ranks itself, by torch.multiprocessing.

python spawned.py --ranks 2 --checkpoints FOLDER
"""

from __future__ import annotations

import argparse
import os
import signal

import torch.multiprocessing as mp
from mistakes import MISTAKES
from train import Training, arguments, main


def rank(number: int, args: argparse.Namespace) -> None:
    """Train in one rank."""
    os.environ.update(RANK=str(number), WORLD_SIZE=str(args.ranks))
    main({"none": Training, **MISTAKES}[os.environ.get("MISTAKE", "none")], args)


def start(args: argparse.Namespace) -> None:
    """Start all ranks and wait for them. If one dies, the others are ended and this raises."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    # "fork" is quick; ranks that use GPUs need "spawn".
    ranks = mp.start_processes(rank, (args,), args.ranks, join=False, start_method="fork")

    def tell_ranks(*_: object) -> None:
        for process in ranks.processes:
            process.terminate()

    signal.signal(signal.SIGTERM, tell_ranks)  # whoever stops the program knows of no ranks
    while not ranks.join():
        continue


if __name__ == "__main__":
    options = arguments()
    options.add_argument("--ranks", type=int, default=2)
    start(options.parse_args())
