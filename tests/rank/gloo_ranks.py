"""A function run by several real ranks over gloo, for tests of what ranks do together."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(function, world_size, *arguments):
    """Call ``function(*arguments)`` on every rank; an assertion that fails in one fails here.

    Ranks are forked, so that none imports torch again: single-threaded processes may do that.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank,
            args=(world_size, os.path.join(folder, "store"), function, arguments),  # noqa: PTH118
            nprocs=world_size,
            start_method="fork",
        )


def _rank(rank, world_size, store, function, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        function(*arguments)
        dist.barrier()  # no rank may leave while another still talks to it
    finally:
        dist.destroy_process_group()
