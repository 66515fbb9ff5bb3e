"""Scripts that break what they promised, each as one changed method of experiments/recoverable."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, os.environ["RECOVERABLE"])
from train import Training, arguments


class Given(Training):
    """Loads what it is given, or the newest checkpoint where nobody says what."""

    def train(self) -> None:
        signal.signal(signal.SIGTERM, self.on_sigterm)
        given = self.newest() if self.args.resume_from is None else self.args.resume_from
        if given:
            self.load(Path(given))
        self.probe.loaded(self.step)
        while self.step < self.args.stop_at and not self.told_to_stop:
            self.train_step()
            self.told_to_stop = self.any_rank(self.told_to_stop)
            due = self.step % self.args.every == 0 or self.step == self.args.stop_at
            if due or self.told_to_stop:
                self.save()


class IgnoresWhatItIsGiven(Given):
    def load(self, path: Path) -> None:
        del path


class SkipsAStep(Given):
    def load(self, path: Path) -> None:
        super().load(path)
        self.step += 1


class NeverWhole(Given):
    def write(self, states: dict[str, Any], path: Path) -> None:
        torch.save(states, path.with_suffix(".tmp"))


class StopsTooLate(Given):
    """torchrun kills what has not ended 30 s after SIGTERM."""

    def save(self) -> None:
        if self.told_to_stop:
            time.sleep(600)
        super().save()


class SavesTooLate(StopsTooLate):
    """The same, of a set that says that it saves."""


class NeverStops(Given):
    def on_sigterm(self, *_: object) -> None:
        pass


class EndsEarly(Given):
    def train(self) -> None:
        self.args.stop_at = min(self.args.stop_at, 6)
        super().train()


class EndsWithZero(Given):
    """Is started by a process that ends with 0 however the training has ended."""


class TwoRanksOnly(Given):
    def train(self) -> None:
        if self.ranks != 2:
            raise ValueError(f"this script is made for 2 ranks, not for {self.ranks}")
        super().train()


class LeavesAtSigterm(Given):
    """Saves nothing on SIGTERM, and says that all is well."""

    def on_sigterm(self, *_: object) -> None:
        os._exit(0)


class KeepsItsPort(Given):
    """A process of rank 0 outlives it, and holds a port."""

    def train(self) -> None:
        if self.rank == 0:
            server = socket.socket()
            server.bind(("127.0.0.1", int(os.environ["OWN_PORT"])))
            server.listen()
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
                os._exit(0)
        super().train()


class KeepsItsPortInPlace(KeepsItsPort):
    """The same, where torchrun starts the ranks again."""


class NeedsAPort(Given):
    """Rank 0 listens on a port as long as it lives."""

    def train(self) -> None:
        if self.rank == 0:
            self.server = socket.create_server(("127.0.0.1", int(os.environ["OWN_PORT"])))
        super().train()


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--resume-from")
    args = parser.parse_args()
    if os.environ["PROGRAM"] == "EndsWithZero" and os.fork():
        os.wait()
        sys.exit(0)
    dist.init_process_group("gloo")
    globals()[os.environ["PROGRAM"]](args).train()
    dist.destroy_process_group()
