"""Evidence from converge's own run folders, and from curves that other tools wrote.

::

    curves.py     any path as evidence: a run folder, or a curve of another tool
    run_folder/   converge's own run folders
    foreign/      curves of other tools, each format in a module
    lines.py      text files line by line, with errors that name the line
    points.py     the points of each signal, and its last value at every step
"""

from converge_harness.readers.curves import read_curves, same_path
from converge_harness.readers.foreign.in_memory import read_table
from converge_harness.readers.foreign.mllog import read_convergence
from converge_harness.readers.foreign.rcp_tables import read_rcps
from converge_harness.readers.run_folder.operations import read_operations
from converge_harness.readers.run_folder.run import read_run, read_spec
from converge_harness.readers.run_folder.starts import steps_so_far

__all__ = [
    "read_convergence",
    "read_curves",
    "read_operations",
    "read_rcps",
    "read_run",
    "read_spec",
    "read_table",
    "same_path",
    "steps_so_far",
]
