"""Toolchains: the Python environments that ranks train in.

::

    find.py   finds toolchains on disk and reads their versions without starting them
"""
