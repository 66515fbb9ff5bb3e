"""Evidence from any training loop: a library that a program calls inside its ranks.

::

    from converge_harness.probe import Probe

    probe = Probe.from_env(model, optimizer)          # once the model is wrapped
    probe.batch(inputs, labels)                       # every microbatch
    probe.step(loss=loss, grad_norm=norm)             # at the end of every optimizer step

Programs that are resumed also call ``probe.loaded(step)`` and ``probe.saved(step)``.

See docs/probe.md. Without ``$CONVERGE_JOB`` every call returns at once, and imports neither the
rank code nor torch.

::

    interface.py     what programs call; imports the rest only if converge runs the program
    loop.py          turns the calls into evidence, with ``converge_harness.rank.recorder``
    starting_weights.py  moves the initial weights of an ulp repeat
    seed_weights.py  loads the checkpoint of another trainer's model, and has its names
    wrapping.py      what the probe needs to know about a wrapped model
    recognising.py   finds out how a model is wrapped: plain, DDP, FSDP 2;
    fsdp1.py         FSDP 1; deepspeed.py: ZeRO
    megatron_lm.py   what ``pretrain_gpt.py`` of Megatron-LM calls
    megatron_loop.py its training loop, watched
    coordinates.py   which part of the global batch a rank trains on
    watches.py       hooks: gradients before torch clips them; batches and losses of a loop
                     that cannot be edited
    faults.py        the faults of a job's script
    write_limit.py   breaks off what is written, as a full disk does
    leaving.py       lets gloo's threads finish before the interpreter exits
    errors.py        ProbeError
    data.py          for programs: the samples of converge's corpus, in its order
"""

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.interface import Probe, initial_weights, load_seed_checkpoint

__all__ = ["Probe", "ProbeError", "initial_weights", "load_seed_checkpoint"]
