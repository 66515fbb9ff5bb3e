"""The evidence of any training loop: a library that a program calls inside its ranks.

::

    from converge_harness.probe import Probe

    probe = Probe.from_env(model, optimizer)          # once the model is wrapped
    probe.batch(inputs, labels)                       # every microbatch
    probe.step(loss=loss, grad_norm=norm)             # the end of every optimizer step

docs/probe.md tells the rest. Without ``$CONVERGE_JOB`` every call returns at once, and neither the
rank code nor torch is imported for it.

::

    interface.py     what programs call; imports the rest only where the harness runs the program
    loop.py          the calls turned into the evidence of ``converge_harness.rank.recorder``
    starting_weights.py  those of an ulp repeat are moved
    wrapping.py      what the probe needs to know of a wrapped model
    recognising.py   how a model is wrapped: plain, DDP, FSDP 2;
    fsdp1.py         FSDP 1; deepspeed.py: ZeRO
    coordinates.py   which part of the global batch a rank trains on
    watches.py       gradients before torch's functions clip them; batches and losses of a loop
                     that cannot be edited
    leaving.py       lets gloo's threads finish before the interpreter goes
    errors.py        what is said where there is no evidence
"""

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.interface import Probe, initial_weights

__all__ = ["Probe", "ProbeError", "initial_weights"]
