"""Toolchains: the Python environments that ranks train in.

::

    find.py        finds toolchains on disk and reads their versions without starting them
    recipes.py     what each toolchain contains
    installer.py   uv or pip, by the settings of pip
    own.py         this converge, as a package for other environments
    build.py       builds, checks and removes toolchains; whether one is up to date
"""
