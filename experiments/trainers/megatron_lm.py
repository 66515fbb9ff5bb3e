"""Megatron-LM's ``pretrain_gpt.py`` on CPUs, with the probe: ``$MEGATRON_LM`` is the checkout.

On GPUs none of this is needed. There ``pretrain_gpt.py`` has an import and a call more::

    from converge_harness.probe import megatron_lm       # with the other imports

        megatron_lm.watch()                              # before pretrain(...)
        pretrain(...)

Here ``pretrain_gpt.py`` runs as it is, and this script makes the call before it starts. What it
replaces is what a machine without GPUs lacks: ``torch.cuda`` and functions of Megatron-Core (as for
``kind = "megatron"``), the check that there is a GPU, and the compilation of kernels.

    megatron_lm.py BUG ARGUMENTS…     arguments of pretrain_gpt.py

``BUG`` is one of the functions below, which put an error into Megatron-Core, or "none".
"""

import functools
import importlib
import os
import runpy
import sys
import types
from pathlib import Path

from converge_harness.rank.megatron.cpu import prepare_megatron, prepare_torch

CHECKOUT = Path(os.environ["MEGATRON_LM"])
PROGRAM = CHECKOUT / "pretrain_gpt.py"


def main() -> None:
    _, bug, *arguments = sys.argv
    sys.argv = [str(PROGRAM), *arguments]
    # At the end: Megatron-Core is that of the toolchain, which has its index builder compiled.
    sys.path.append(str(CHECKOUT))
    prepare_torch()
    import megatron.core  # noqa: F401 (what follows replaces parts of it)
    import torch

    prepare_megatron()
    _stand_in_for_a_gpu(torch)
    BUGS[bug]()
    from converge_harness.probe import megatron_lm

    megatron_lm.watch()
    runpy.run_path(str(PROGRAM), run_name="__main__")


def _stand_in_for_a_gpu(torch: types.ModuleType) -> None:
    """One device, so that ranks are connected; nothing is compiled for it."""
    from megatron.training import initialize, training

    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9)
    initialize._compile_dependencies = lambda: None
    # It warms fused functions up with random numbers: on a GPU those of the device, and here those
    # that initial weights are drawn from, as many as a tensor-parallel rank has columns.
    training.set_jit_fusion_options = lambda: None
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )


def norms_not_summed() -> None:
    """Gradients of norms are not summed over tensor-parallel ranks under sequence parallelism."""
    # The package has a function of the module's name.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_non_tensor_model_parallel_grads = lambda *_, **__: None


def averaged_twice() -> None:
    """The optimizer gets gradients that were divided by the data-parallel ranks once more."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    scale = DistributedDataParallel.scale_gradients

    def scaled(self: object, factor: float) -> None:
        scale(self, factor / parallel_state.get_data_parallel_world_size())

    DistributedDataParallel.scale_gradients = scaled


BUGS = {
    "none": lambda: None,
    **{each.__name__: each for each in (norms_not_summed, averaged_twice)},
}

if __name__ == "__main__":
    main()
