"""Builds and steps a job of many GPUs in one process without any.

::

    run.py       the rank side of a dry run, and which key an error is about
    meter.py     measures its memory
    sharding.py  checks that parameters are sharded by all degrees
"""
