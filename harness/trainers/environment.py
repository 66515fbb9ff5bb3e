"""The environment of a job's processes: all that shapes numbers is pinned, whatever trains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.model import Job
from harness.run_folder.layout import COMPILED
from harness.trainers.calls import comes_in_passes

_FOREIGN = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_.*|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PYTHON_EXEC|CUDA_VISIBLE_DEVICES)"
)
"""Variables of a torchrun or a scheduler around the harness, which its jobs must not inherit."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job gets from the machine.

    ``devices`` are GPU ids, empty on the CPU, None where a scheduler hands them out; ``loopback``
    names the loopback interface, None to let gloo choose.
    """

    device: str = "cpu"
    devices: tuple[int, ...] | None = ()
    loopback: str | None = "lo"


def pinned_environment(
    base: Mapping[str, str],
    resources: Resources,
    folder: Path | None = None,
    job: Job | None = None,
    *,
    offline: bool = True,
) -> dict[str, str]:
    """The environment of a job's processes: ``base`` with all that shapes numbers pinned.

    ``folder`` is the run folder; it and the job are None for a process that serves several jobs.
    An empty ``base`` gives what is pinned, and nothing else. ``offline`` keeps Hugging Face's
    libraries from the network.
    """
    pinned = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # With it a later run dies with "Could not resolve the process group": the cache keeps
        # names of process groups. The FX graph cache would also hide what a run's own graph
        # passes did (fused async-TP nodes are counted there).
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        # Compile in the rank: worker processes would outnumber the cores, and cannot be forked.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if folder is not None:
        # Of its own: Inductor writes compiled kernels in place, so a killed job would leave
        # half a library behind for the next one to load.
        pinned["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute() / COMPILED)
    if offline:
        pinned |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if resources.loopback is not None:
        pinned["GLOO_SOCKET_IFNAME"] = resources.loopback
    if job is not None and comes_in_passes(job) and job.spec.recovery is not None:
        # torch 2.13: restarts in place and joining nodes race on the agents' own store, which the
        # ranks otherwise share.
        pinned["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if resources.devices is not None:
        pinned["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in resources.devices)
    kept = {name: value for name, value in base.items() if not _FOREIGN.fullmatch(name)}
    return {**kept, **pinned}
