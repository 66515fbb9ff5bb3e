"""Environment variables by which launchers tell a process its place among the ranks.

A job must not inherit those of a launcher around converge: it would take its ranks for that
launcher's. No file may set them, because a job's own launcher does.
"""

from __future__ import annotations

import re

_OF_LAUNCHERS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_|BASE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|LOCAL_SIZE"
    r"|MASTER_(ADDR|PORT)|PYTHON_EXEC|(TORCHELASTIC|PET|OMPI_COMM_WORLD)_.*"
    r"|PMI_(RANK|SIZE|FD)|PMIX_RANK)"
)
"""Of torchrun, Composer, Open MPI and Slurm's PMI."""


def is_of_launcher(name: str) -> bool:
    """Whether a launcher sets this variable."""
    return _OF_LAUNCHERS.fullmatch(name) is not None
