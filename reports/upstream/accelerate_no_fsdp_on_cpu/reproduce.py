"""accelerate wraps a model in DDP where FSDP2 was asked for, on CPUs, and says nothing.

``python reproduce.py``, with two CPU processes. Exit code 1 if the model is not sharded.
``AcceleratorState.__init__`` (accelerate/state.py) turns the distributed type into
``DistributedType.FSDP`` only where it was that of several accelerators. MULTI_CPU is not in the
list, so the plugin is dropped.
"""

import os
import sys

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

RANKS = 2


def on_ranks(rank: int, port: int, found: dict[str, object]) -> None:
    number = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{key: str(each) for key, each in number.items()}}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare_model(torch.nn.Linear(8, 8))
    if rank == 0:
        kind = accelerator.distributed_type.value
        found.update(kind=kind, model=type(model).__name__, sharded=isinstance(model, FSDPModule))
    dist.destroy_process_group()


def main() -> int:
    with mp.Manager() as manager:
        found = manager.dict()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port  # free a moment later
        del store
        mp.spawn(on_ranks, (port, found), nprocs=RANKS)
        print(
            f"accelerate {accelerate.__version__}, torch {torch.__version__}: FSDP2 was asked for, "
            f"the distributed type is {found['kind']}, and the model {found['model']}"
        )
        return 0 if found["sharded"] else 1


if __name__ == "__main__":
    sys.exit(main())
