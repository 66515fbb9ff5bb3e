"""Options of sbatch and srun that a ``[cluster]`` may add, and those that it may not.

sbatch and srun read their options by ``getopt_long``, which takes any beginning of a long option
for the whole: ``--out=x`` is ``--output=x``. So a beginning of what is refused is refused too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic_core import PydanticCustomError

OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?=[= ]|\Z)")
BY_SCRIPT = "the batch script of a job sets it"
BY_DEGREES = "a set's degrees and ranks_per_node decide it"
BY_GPUS = "use gres or gpus_per_node"
BY_HARNESS = "converge submits by itself"
BY_REQUEUE = "use requeue"

SBATCH: Mapping[str, str] = {
    "account": "use account",
    "array": "every set is a job of its own",
    "chdir": BY_SCRIPT,
    "cluster": "converge follows the jobs of one cluster, the default of its commands",
    "clusters": "converge follows the jobs of one cluster, the default of its commands",
    "constraint": "use constraint",
    "cpus-per-task": "use cpus_per_rank",
    "dependency": "converge knows what a job needs; max_jobs limits how many run at once",
    "error": BY_SCRIPT,
    "export": "use environment",
    "export-file": "use environment",
    "gpus": BY_GPUS,
    "gpus-per-node": BY_GPUS,
    "gpus-per-socket": BY_GPUS,
    "gpus-per-task": BY_GPUS,
    "gres": "use gres",
    "help": BY_HARNESS,
    "job-name": "a job is found again by the name that converge gives it",
    "kill-on-invalid-dep": BY_SCRIPT,
    "mem": "use memory_per_node",
    "no-requeue": BY_REQUEUE,
    "nodes": BY_DEGREES,
    "ntasks": BY_DEGREES,
    "ntasks-per-core": BY_DEGREES,
    "ntasks-per-gpu": BY_DEGREES,
    "ntasks-per-node": BY_DEGREES,
    "ntasks-per-socket": BY_DEGREES,
    "open-mode": BY_SCRIPT,
    "output": BY_SCRIPT,
    "parsable": BY_HARNESS,
    "partition": "use partition",
    "qos": "use qos",
    "quiet": BY_HARNESS,
    "requeue": BY_REQUEUE,
    "test-only": BY_HARNESS,
    "time": "use time",
    "usage": BY_HARNESS,
    "verbose": BY_HARNESS,
    "version": BY_HARNESS,
    "wait": BY_HARNESS,
    "wrap": BY_SCRIPT,
}
"""Long option of sbatch to why it is refused."""
SRUN: Mapping[str, str] = {
    **{
        option: why
        for option, why in SBATCH.items()
        if option.startswith(("nodes", "ntasks", "gpus", "gres", "export", "help", "usage"))
    },
    "chdir": BY_SCRIPT,
    "error": "logs stay in the run folder",
    "exact": BY_SCRIPT,
    "het-group": BY_SCRIPT,
    "jobid": BY_SCRIPT,
    "kill-on-bad-exit": BY_SCRIPT,
    "multi-prog": BY_SCRIPT,
    "output": "logs stay in the run folder",
    "overlap": BY_SCRIPT,
    "pty": BY_SCRIPT,
    "relative": BY_SCRIPT,
    "version": BY_HARNESS,
}
"""The same of srun, which starts one agent on every node."""


def check_sbatch(line: str) -> str:
    """An option as on a ``#SBATCH`` line: ``--exclusive``, ``--mail-type=END``.

    Raises pydantic's errors, which become problems of the file.
    """
    if "#" in line:
        raise PydanticCustomError("option", "must hold no #: sbatch ends the line there")
    if not line.isascii():
        raise PydanticCustomError("option", "must be ASCII")
    if any(word.startswith("-") for word in line.split()[1:]):
        raise PydanticCustomError("option", "must be one option: each has a line of its own")
    return _checked(line, SBATCH)


def check_srun(argument: str) -> str:
    """An argument of srun: ``--container-image=…``.

    Raises pydantic's errors, which become problems of the file.
    """
    return _checked(argument, SRUN)


def _checked(text: str, refused: Mapping[str, str]) -> str:
    found = OPTION.match(text)
    if found is None:
        raise PydanticCustomError("option", "must be a long option, as --name or --name=value")
    name = found[1]
    whole = [name] if name in refused else [each for each in refused if each.startswith(name)]
    if whole:
        raise PydanticCustomError(
            "option",
            "--{option} is not set here: {why}",
            {"option": whole[0], "why": refused[whole[0]]},
        )
    return text
