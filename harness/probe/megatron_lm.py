"""The probe in Megatron-LM's own training loop.

::

    from converge_harness.probe import megatron_lm

    megatron_lm.watch()          # in pretrain_gpt.py, before pretrain(...)

Nothing is imported here but what says whether converge started the program; the rest is in
``converge_harness.probe.megatron_loop``.
"""

from __future__ import annotations

import os

from converge_harness.run_folder.layout import JOB_VARIABLE


def watch() -> None:
    """Record the evidence of ``pretrain(...)``, which is called next.

    Call it once in every rank, before ``pretrain``. Without ``$CONVERGE_JOB`` it does nothing, and
    imports nothing.

    Raises ProbeError if this Megatron-LM has other functions than the probe knows; ``pretrain``
    raises it for a model, or a way of training, that cannot be probed.
    """
    path = os.environ.get(JOB_VARIABLE)
    if path:
        from converge_harness.probe.megatron_loop import watch_training

        watch_training(path)
