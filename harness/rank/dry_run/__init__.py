"""A job of many GPUs built and stepped by one process without any.

::

    run.py       the rank side of a dry run, and which key an error speaks of
    meter.py     its memory
    sharding.py  whether parameters are sharded as the degrees say
"""
