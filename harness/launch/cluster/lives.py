"""How a batch script begins, begins again and ends: what of its run folder counts. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.model import Job
from harness.trainers import comes_in_passes

ENDED_FILE = "ended.json"
_OF_A_LIFE = (ENDED_FILE, "inductor")
_OF_A_RUN = (
    *("metrics.jsonl", "metrics.jsonl.part", "tensors", "in_force.json"),
    *("checkpoint", "datasets", "streaming"),
)
_OF_PASSES = ("passes", "faults", "torn", "logs")
"""What ranks leave in a run folder."""


def ending(folder: Path) -> str:
    """How the script leaves its last word, by bash's traps."""
    return f"""\
set -euo pipefail

run_folder={shlex.quote(str(folder))}

# The last word of this script, however it ends: for when Slurm has forgotten the job.
finish() {{
    code=$?
    trap '' TERM
    printf '{{"schema": 1, "returncode": %d, "restart": %d}}\\n' \\
        "$code" "${{SLURM_RESTART_COUNT:-0}}" > "$run_folder/{ENDED_FILE}.part"
    mv "$run_folder/{ENDED_FILE}.part" "$run_folder/{ENDED_FILE}"
    exit "$code"
}}
trap finish EXIT
trap 'exit 143' TERM"""


def start() -> str:
    """What an earlier job left, as one that was submitted twice, is no evidence of this one."""
    return f"""\
# A job that begins takes nothing that lies here for its own.
if [ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ]; then
    (cd "$run_folder" && rm -rf {" ".join((*_OF_A_LIFE, *_OF_A_RUN, *_OF_PASSES))})
fi"""


def restart(job: Job) -> str:
    """What an earlier life left must not be taken for evidence of this one."""
    files = " ".join(_OF_A_LIFE if comes_in_passes(job) else (*_OF_A_LIFE, *_OF_A_RUN))
    how = "goes on from its newest checkpoint" if comes_in_passes(job) else "starts over"
    return f"""\
# A job that Slurm has requeued {how}.
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$run_folder" && rm -rf {files})
fi"""
