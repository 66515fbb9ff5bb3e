"""MosaicML Streaming as it is, in a process that is one of torchtitan's ranks.

What the package takes for granted, and what is done about it (streaming 0.13.0):

- ``import streaming`` imports ``streaming/vision/base.py``, which wants two names of torchvision.
  PyPI's torchvision registers its operators with a CUDA build of torch, so beside a CPU torch its
  import fails. Nothing of it is used here: a stand-in is there while streaming is imported.
- ``streaming/base/distributed.py`` reads a rank's place from torchrun's environment and takes
  every rank for one that reads samples of its own. Under tensor, context or pipeline parallelism
  only data-parallel ranks do: it gets the rank's place among those. (Its own ``replication`` needs
  ranks that read the same to be neighbours, which torchtitan's pipeline stages are not.)
- Names in ``/dev/shm`` start with the first number that is free (``streaming/base/shared/
  prefix.py``), which two jobs that start at once may both take, and which a killed job keeps. Here
  they start with a prefix unique to the job, so that jobs, starts of a job, and simulated nodes
  share nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

PACKAGE = "streaming"
TOOLCHAIN = "torchtitan-0.3.0-streaming"
"""Where the package is (``noxfile.py``)."""


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def import_streaming() -> types.ModuleType:
    """The package ``streaming``.

    Raises ImportError when it is not in this toolchain.
    """
    # It looks for torchvision itself, and must not find the stand-in.
    importlib.import_module("transformers.models.auto.tokenization_auto")
    missing = importlib.util.find_spec("torchvision") is None
    stand_in = _torchvision() if missing else {}
    sys.modules.update(stand_in)
    try:
        return importlib.import_module(PACKAGE)
    finally:
        for name in stand_in:
            del sys.modules[name]


def _torchvision() -> dict[str, types.ModuleType]:
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms")
    modules = {name: types.ModuleType(name) for name in names}
    functional = types.ModuleType("torchvision.transforms.functional")
    vars(modules["torchvision.datasets"])["VisionDataset"] = type("VisionDataset", (), {})
    vars(functional)["to_tensor"] = None
    return {**modules, functional.__name__: functional}


@dataclass(frozen=True, slots=True)
class StreamingRank:
    """A data-parallel rank, as ``StreamingDataset`` is to see it."""

    rank: int
    degree: int
    ranks_per_node: int
    """Data-parallel ranks of a node: neighbours by rank."""
    word: str
    """What the names of all that the ranks of a node share start with."""


def find_place(dp_rank: int, dp_degree: int, ranks_per_node: int | None) -> StreamingRank:
    """This rank's place. Collective over the world, if there is one.

    ``ranks_per_node`` None takes nodes as torchrun has them; a number simulates nodes of so many
    data-parallel ranks on one host.

    Raises ValueError when the degree is not a whole number of nodes.
    """
    word, node = uuid.uuid4().hex[:12], int(os.environ.get("GROUP_RANK", "0"))
    mine, everyone = (dp_rank, node, word), [(dp_rank, node, word)]
    if dist.is_initialized():
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    # Ranks that read the same samples: one of each makes a replica, which shares nothing with
    # the others.
    replicas = [
        sum(other[0] == rank[0] for other in everyone[:index])
        for index, rank in enumerate(everyone)
    ]
    replica = replicas[dist.get_rank() if dist.is_initialized() else 0]
    if ranks_per_node is None:
        ranks_per_node = sum(
            other == replica and rank[1] == node
            for other, rank in zip(replicas, everyone, strict=True)
        )
    if dp_degree % ranks_per_node:
        raise ValueError(
            f"{dp_degree} data-parallel ranks are not a whole number of nodes of {ranks_per_node}"
        )
    word = f"{everyone[0][2]}-{replica}-{dp_rank // ranks_per_node}"
    return StreamingRank(dp_rank, dp_degree, ranks_per_node, word)


@contextmanager
def seen_from(place: StreamingRank, locks: Path) -> Iterator[None]:
    """Tell the package its place, for good, and where to keep lock files, for now."""
    distributed = importlib.import_module("streaming.base.distributed")
    _replace(distributed, "get_rank", lambda: place.rank)
    _replace(distributed, "get_world_size", lambda: place.degree)
    _replace(distributed, "get_local_rank", lambda: place.rank % place.ranks_per_node)
    _replace(distributed, "get_local_world_size", lambda: place.ranks_per_node)
    for user in ("streaming.base.shared.prefix", "streaming.base.dataset"):
        _replace(
            importlib.import_module(user),
            "_get_path",
            lambda number, name: f"{place.word}-{number:06}_{name}",
        )
    before = tempfile.tempdir
    locks.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(locks)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _replace(module: types.ModuleType, name: str, value: Any) -> None:
    """Raises AttributeError when the module has no such name: another release of the package."""
    getattr(module, name)
    setattr(module, name, value)
