"""Toolchains: the Python environments that ranks train in.

::

    find.py        finds toolchains on disk and reads their versions without starting them
    user_python.py  a Python of the user's, by its path: asked what it would import
    pinned.py      what is installed in a Python, as lines of a requirements file
    recipes.py     what each toolchain contains
    installer.py   uv or pip, by the settings of pip
    this_package.py  this converge, as a package for other environments
    build.py       builds, checks and removes toolchains; whether one is up to date
"""
