"""Evidence from run folders of ours, and from curves that other tools left."""

from harness.readers.curves import read_curves, same_path
from harness.readers.in_memory import read_table
from harness.readers.mllog import read_convergence
from harness.readers.rcp import read_reference_points
from harness.readers.run_folder import read_run, read_spec

__all__ = [
    "read_convergence",
    "read_curves",
    "read_reference_points",
    "read_run",
    "read_spec",
    "read_table",
    "same_path",
]
