"""What is the same for every release of torchtitan.

::

    audit.py         what is really in force, read from the live objects
    counters.py      fused operators and rotations, counted where they happen
    checkpoints.py   when a trainer writes checkpoints and from which it starts
    training.py      from the recorder to the last step
    frozen_steps.py  forward and backward passes at the initial weights
    clipping.py      sees gradients before they are clipped, by whatever function
    pipelining.py    what torch's pipeline schedules do besides training
    documents.py     the corpus's documents for torchtitan's own text loader
    components.py    names in compile.components that would compile nothing
    cpu.py           what torchtitan assumes of a GPU and a CPU with gloo lacks
"""
