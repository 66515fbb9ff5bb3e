"""Evidence from run folders of ours, and from curves that other tools left."""

from harness.readers.curves import read_curves, same_path
from harness.readers.run_folder import read_run, read_spec

__all__ = ["read_curves", "read_run", "read_spec", "same_path"]
