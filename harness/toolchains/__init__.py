"""Toolchains: the Python environments that ranks train in.

::

    find.py        finds toolchains on disk and reads their versions without starting them
    own_python.py  a Python of the user's own, by its path: asked what it would import
    recipes.py     what each toolchain contains
    installer.py   uv or pip, by the settings of pip
    own.py         this converge, as a package for other environments
    build.py       builds, checks and removes toolchains; whether one is up to date
"""
