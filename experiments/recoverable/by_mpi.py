"""Start a script as torchrun would, as far as a rank of Open MPI sees: by its environment.

mpirun -n 2 python by_mpi.py train.py --checkpoints FOLDER
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

PLACES = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "LOCAL_RANK"}
"""What ``init_process_group`` reads, and the end of Open MPI's own name for it."""

if __name__ == "__main__":
    for name, of_mpi in PLACES.items():
        os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{of_mpi}"]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
