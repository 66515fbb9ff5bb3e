"""Processes that have computed on fake tensors and taken a backward pass, forked as ranks are."""

import subprocess
import sys

import pytest

FORK = """
import os, sys, torch
from converge_harness.rank.cpu import stay_forkable
{stay}
torch.set_num_threads(1)
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.empty(3) + 1
weight = torch.ones(3, requires_grad=True)
weight.sum().backward()
child = os.fork()
if child == 0:
    try:
        weight.square().sum().backward()
        os._exit(0)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def fork(stay):
    """Exit code of a fork that trains, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", FORK.format(stay=stay)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_fork_of_a_process_that_stays_forkable_trains():
    code, said = fork("stay_forkable()")
    assert code == 0, said


def test_a_torch_with_cuda_needs_it():
    import torch

    if not torch.backends.cuda.is_built() or torch.cuda.is_available():
        pytest.skip("needs torchtitan 0.3 on a torch with CUDA, and no GPU")
    code, said = fork("")
    assert code == 7
    assert "fork-based multiprocessing" in said
