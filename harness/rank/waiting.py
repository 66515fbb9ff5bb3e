"""Lets the ranks of a run wait after a step until converge lets them train on.

A control and the sets that are judged by it wait for each other at the steps at which the sets may
be stopped, so that none of them trains steps that nobody reads. Every rank waits by itself, between
two steps, so no collective is waited for meanwhile and none can time out.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from converge_harness.run_folder.waits import read_waits

_POLL_SECONDS = 0.1


def wait_after(run_folder: Path, step: int) -> None:
    """Wait while ``wait.json`` names this step."""
    while step in read_waits(run_folder):
        time.sleep(_POLL_SECONDS)


def wait_between_steps(trainer: Any, run_folder: Path) -> None:
    """Let a torchtitan trainer wait once a step has ended and its checkpoint, if due, is complete.

    It also waits after the step of the checkpoint that it has loaded. Call it on every rank, after
    everything else that wraps the trainer's methods.
    """
    if not read_waits(run_folder):
        return
    continues = trainer.should_continue_training  # asked before every step

    @functools.wraps(continues)
    def wait_and_continue() -> bool:
        going_on: bool = continues()
        if going_on:
            wait_after(run_folder, trainer.step)
        return going_on

    trainer.should_continue_training = wait_and_continue
