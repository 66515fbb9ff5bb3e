"""The environment of a job's processes: what can change numbers is pinned, for any trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from converge_harness.model import Job
from converge_harness.run_folder.launcher_variables import is_of_launcher
from converge_harness.run_folder.layout import (
    COMPILED,
    GPU_OF_RANK,
    JOB_VARIABLE,
    SEGMENT_VARIABLE,
)
from converge_harness.trainers.calls import comes_in_passes

_NOT_INHERITED = frozenset({"CUDA_VISIBLE_DEVICES", GPU_OF_RANK, JOB_VARIABLE, SEGMENT_VARIABLE})
"""Of a scheduler, or of a converge job in which converge itself runs."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable by which ranks under torchrun make a store of their own (1)."""
SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable that allows several ranks on one GPU (NCCL 2.30; its message says so)."""
SMALL_NCCL = {"NCCL_MAX_NCHANNELS": "2", "NCCL_NVLS_ENABLE": "0"}
"""Where ranks share GPUs, unless the user sets them: with NCCL's own values eight ranks ran out of
the 80 GB of an H100, which its buffers filled; with these they took 13 GB.
"""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job gets from the machine.

    ``devices`` are GPU ids, one per local rank, empty on the CPU, None if a scheduler assigns them;
    ``loopback`` is the name of the loopback interface, None to let gloo choose; ``shared`` says
    that other ranks, of this job or another, may use the same GPUs; ``one_node`` says that a
    scheduler places all ranks on one node.
    """

    device: str = "cpu"
    devices: tuple[int, ...] | None = ()
    loopback: str | None = "lo"
    shared: bool = False
    one_node: bool = False


def pinned_environment(
    base: Mapping[str, str],
    resources: Resources,
    folder: Path | None = None,
    job: Job | None = None,
    *,
    offline: bool = True,
) -> dict[str, str]:
    """The environment of a job's processes: ``base``, with what can change numbers pinned.

    ``folder`` is the run folder; it and the job are None for a process that serves several jobs. An
    empty ``base`` gives only the pinned variables. ``offline`` keeps Hugging Face's libraries off
    the network.
    """
    pinned = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # With the cache a later run fails with "Could not resolve the process group", because it
        # stores names of process groups. The FX graph cache would also skip a run's own graph
        # passes, where fused async-TP nodes are counted.
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        # Compile in the rank itself: worker processes would outnumber the cores, and cannot be
        # forked.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if folder is not None:
        # Not shared: Inductor writes compiled kernels in place, so a killed job could leave half a
        # library for the next one to load.
        pinned["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute() / COMPILED)
    if offline:
        pinned |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if resources.loopback is not None:
        pinned["GLOO_SOCKET_IFNAME"] = resources.loopback
    if job is not None and comes_in_passes(job) and job.spec.recovery is not None:
        # torch 2.13: restarts in place and joining nodes race on the agents' own store, which the
        # ranks otherwise share.
        pinned[OWN_STORE] = "1"
    if resources.devices is not None:
        pinned["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, dict.fromkeys(resources.devices)))
        if resources.devices:
            pinned["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the ids are counted here
        if resources.shared:
            pinned[GPU_OF_RANK] = ",".join(map(str, resources.devices))
            pinned |= {name: base.get(name, small) for name, small in SMALL_NCCL.items()}
    kept = {
        name: value
        for name, value in base.items()
        if name not in _NOT_INHERITED and not is_of_launcher(name)
    }
    return {**kept, **pinned}
