"""The upstream bugs that this dialect repairs, each by a name that a job may leave out.

Importable without torch, so that converge can check names before anything is launched.
``without_fixes`` of a test set takes these names: the repair is then not made and the bug shows.
The functions are those repairs that are not a matter of one technique alone.
"""

from __future__ import annotations

import functools
import unittest.mock
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ACT_GRAD = "act-grad"
RS_SCATTER = "rs-scatter"
SYMM_MEM = "symm-mem"
FLOAT8_TP = "float8-tp"
CP_ROTATION = "cp-rotation"
INITIAL_LOAD = "initial-load"

FIXES: Mapping[str, str] = MappingProxyType(
    {
        ACT_GRAD: (
            "TP with torch.compile: AOTAutograd waits on the asynchronous input of a compiled block"
            " and loses its requires_grad, so tok_embeddings gets no gradient"
            " (pytorch#179849, repaired by pytorch PR #191113; torch 2.13)."
        ),
        RS_SCATTER: (
            "Float8 with async TP: the fused scaled matmul and reduce-scatter scatters rows of the"
            " batch instead of the sequence once the local batch holds more than one sample"
            " (torch 2.13, torch.distributed._symmetric_memory; no public report known)."
        ),
        SYMM_MEM: (
            "async TP never fuses: symmetric memory is not enabled for the TP group, which"
            " Inductor's pass asks for (pytorch#193027, torchtitan#4045; torchtitan 0.2.2 on torch"
            " 2.13)."
        ),
        FLOAT8_TP: (
            "Float8 all-gathers of TP are out of reach: llama3 looks for a converter named float8,"
            " and the only registered name is quantize.linear.float8 (torchtitan 0.2.2,"
            " models/llama3/infra/parallelize.py)."
        ),
        CP_ROTATION: (
            "parallelism.context_parallel_rotate_method is read by nothing: context parallel always"
            " rotates by all-gather (torchtitan 0.2.2, distributed/context_parallel.py)."
        ),
        INITIAL_LOAD: (
            "A restart whose checkpoint folder holds no whole checkpoint loads nothing, not even"
            " checkpoint.initial_load_path, says nothing, and trains on from random weights"
            " (torchtitan 0.2.2, components/checkpoint.py, load; 0.3.0 falls back)."
        ),
    }
)
"""Name of a fix to one sentence: what goes wrong without it, where, and the upstream reference."""


def keep_requires_grad() -> None:
    """Fix ``act-grad``: let AOTAutograd see that an asynchronous input requires a gradient.

    Before it traces, ``process_inputs`` replaces every AsyncCollectiveTensor by the result of its
    ``trigger_wait()``, which is a plain tensor with ``requires_grad=False``. The first compiled
    block under TP gets the embedding's output in this form and so returns no gradient for it:
    ``tok_embeddings`` is never trained (pytorch#179849, repaired by pytorch PR #191113). The
    examples that are traced get the flag back here; at run time nothing changes.
    """
    from torch._functorch import aot_autograd
    from torch._functorch._aot_autograd import frontend_utils
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    process_inputs = frontend_utils.process_inputs
    trigger_wait = AsyncCollectiveTensor.trigger_wait

    def wait_and_keep(tensor: Any) -> Any:
        waited = trigger_wait(tensor)
        return waited.detach().requires_grad_() if tensor.requires_grad else waited

    def process_and_keep(*args: Any, **kwargs: Any) -> Any:
        # Only while inputs are prepared: elsewhere waiting must stay what it is.
        with unittest.mock.patch.object(AsyncCollectiveTensor, "trigger_wait", wait_and_keep):
            return process_inputs(*args, **kwargs)

    frontend_utils.process_inputs = process_and_keep
    aot_autograd.process_inputs = process_and_keep


def fall_back_to_initial_load() -> None:
    """Fix ``initial-load``: load that path also when the checkpoint folder holds no whole one.

    torchtitan 0.2.2 looks there only when the folder does not exist (components/checkpoint.py,
    ``load``): after death in the middle of the first save it loads nothing at all. 0.3.0 falls
    back as this does.
    """
    from torchtitan.components.checkpoint import CheckpointManager

    load = CheckpointManager.load

    @functools.wraps(load)
    def load_or_start(checkpointer: Any, step: int = -1) -> Any:
        if step != -1 or checkpointer._find_load_step() != -1:
            return load(checkpointer, step)
        folder = checkpointer.folder
        checkpointer.folder = f"{folder}/none"  # does not exist
        try:
            return load(checkpointer, step)
        finally:
            checkpointer.folder = folder

    CheckpointManager.load = load_or_start
