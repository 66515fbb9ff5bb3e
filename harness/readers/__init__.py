"""Evidence from run folders of ours, and from curves that other tools left.

::

    curves.py     any path as evidence: a run folder, or a curve of another tool
    run_folder/   run folders of ours
    foreign/      curves of other tools, each format in a module
    lines.py      text files line by line, with errors that name the line
    points.py     what a source says of each signal, every step once
"""

from converge_harness.readers.curves import read_curves, same_path
from converge_harness.readers.foreign.in_memory import read_table
from converge_harness.readers.foreign.mllog import read_convergence
from converge_harness.readers.foreign.rcp_tables import read_reference_points
from converge_harness.readers.run_folder.run import read_run, read_spec

__all__ = [
    "read_convergence",
    "read_curves",
    "read_reference_points",
    "read_run",
    "read_spec",
    "read_table",
    "same_path",
]
