"""Compares the passes of a resumed run with each other: pure questions about one run.

- ``passes``: which checkpoint each pass loaded and where it goes on
- ``faults``: which pass each fault ended, and when training went on
- ``saved_state``: what was loaded against what was saved

The checks that ask them are in ``converge_harness.judge.checks.resume``.
"""
