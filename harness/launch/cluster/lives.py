"""How a batch script begins, begins again and ends: what of its run folder counts. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.model import Job
from harness.run_folder.layout import COMPILED, ENDED, OF_THE_PASSES, OF_THE_RANKS
from harness.trainers import comes_in_passes

_OF_A_LIFE = (ENDED, COMPILED)


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
        "$code" "${{SLURM_RESTART_COUNT:-0}}" > "$run_folder/{ENDED}.part"
    mv "$run_folder/{ENDED}.part" "$run_folder/{ENDED}"
    exit "$code"
}}
trap finish EXIT
trap 'exit 143' TERM"""


def start() -> str:
    """What an earlier job left, as one that was submitted twice, is no evidence of this one."""
    return f"""\
# A job that begins takes nothing that lies here for its own.
if [ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ]; then
    (cd "$run_folder" && rm -rf {" ".join((*_OF_A_LIFE, *OF_THE_RANKS, *OF_THE_PASSES))})
fi"""


def restart(job: Job) -> str:
    """What an earlier life left must not be taken for evidence of this one."""
    files = " ".join(_OF_A_LIFE if comes_in_passes(job) else (*_OF_A_LIFE, *OF_THE_RANKS))
    how = "goes on from its newest checkpoint" if comes_in_passes(job) else "starts over"
    return f"""\
# A job that Slurm has requeued {how}.
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$run_folder" && rm -rf {files})
fi"""
