"""Toolchains: the Python environments that ranks train in.

::

    find.py         finds toolchains on disk and reads their versions without starting them
    own_python.py   a Python of the user's own, by its path: asked what it would import
"""
