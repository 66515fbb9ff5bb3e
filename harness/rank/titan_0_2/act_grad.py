"""Fix ``act-grad``: compiled blocks keep the gradient of an input that is still in flight."""

from __future__ import annotations

import unittest.mock
from typing import Any


def keep_requires_grad() -> None:
    """Let AOTAutograd see that an asynchronous input requires a gradient.

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
