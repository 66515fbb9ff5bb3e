"""What squeue and sacct print of jobs, in our words. Pure."""

from __future__ import annotations

import re

from harness.launch.cluster.backend import JobState, Phase

JOB_WIDTH = 24
_COLUMNS = (
    ("JobID", JOB_WIDTH),
    ("State", 24),
    ("RestartCnt", 12),
    ("exit_code", 16),
    ("TimeUsed", 24),
    ("Reason", 256),
    ("NodeList", 1024),
    ("Name", 256),  # last: letters of others' jobs may be wider than a byte
)
SQUEUE_FORMAT = "--Format=" + ",".join(f"{name}:{width}" for name, width in _COLUMNS)
"""Columns of a fixed width, as every Slurm since 2016 has them; a reason may have any character."""
SACCT_FORMAT = "--format=JobIDRaw,State,ExitCode,ElapsedRaw,NodeList,JobName"

_PENDING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"),
    }
)

_NEVER = re.compile(
    r"DependencyNeverSatisfied|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|DeadLine"
    r"|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|MaxMemPerLimit"
    r"|(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+"
)
"""Reasons of pending jobs that ask for more than they may ever have. Limits that other jobs use up
(``…Grp…``, ``…PerUser…``) pass, nodes that are down come back, a held job can be released.
``PartitionConfig`` is what Slurm 22.05 says first, and something else a second later."""


def unknown() -> JobState:
    """Of a job that Slurm does not know any more."""
    return JobState(Phase.UNKNOWN)


def read_squeue(output: str) -> dict[str, JobState]:
    """By job id, what squeue printed in ``SQUEUE_FORMAT``; lines of something else are skipped."""
    states = {}
    for line in output.splitlines():
        job_id, word, restarts, code, used, reason, nodes, name = _cut(line)
        if job_id.isdecimal():
            states[job_id] = _state(
                word,
                reason="" if reason in ("None", "(null)") else reason,
                restarts=int(restarts) if restarts.isdecimal() else 0,
                exit_code=_exit_code(code),
                ran_s=_seconds(used),
                nodes=nodes,
                name=name,
            )
    return states


def read_sacct(output: str) -> dict[str, JobState]:
    """By job id, what sacct printed in ``SACCT_FORMAT``; of a requeued job its last life."""
    states = {}
    for line in output.splitlines():
        job_id, word, code, elapsed, nodes, name = (line.split("|", 5) + [""] * 6)[:6]
        if job_id.isdecimal():
            states[job_id] = _state(
                word,
                exit_code=_exit_code(code),
                ran_s=float(elapsed) if elapsed.isdecimal() else None,
                nodes="" if nodes == "None assigned" else nodes,
                name=name,
            )
    return states


def _cut(line: str) -> list[str]:
    fields, start = [], 0
    for _, width in _COLUMNS:
        fields.append(line[start : start + width].strip())
        start += width
    return fields


def _state(
    word: str,
    *,
    reason: str = "",
    restarts: int = 0,
    exit_code: int | None = None,
    ran_s: float | None = None,
    nodes: str = "",
    name: str = "",
) -> JobState:
    word, _, detail = word.partition(" ")  # "CANCELLED by 1000"
    word = word.rstrip("+")
    phase = phase_of(word)
    signalled = word in ("CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE")
    return JobState(
        phase=phase,
        word=word,
        reason=reason or detail,
        never=phase is Phase.PENDING and bool(_NEVER.fullmatch(reason)),
        restarts=restarts,
        exit_code=exit_code if phase is Phase.ENDED and not signalled else None,
        ran_s=ran_s,
        nodes=nodes,
        name=name,
    )


def phase_of(word: str) -> Phase:
    """Where a job in a state of Slurm's is.

    Whatever is neither pending nor over counts as running: RUNNING CONFIGURING RESIZING SIGNALING
    STAGE_OUT STOPPED SUSPENDED, states of a Slurm to come, COMPLETING, from which a job may also
    come back to the queue, and REVOKED, when another cluster of a federation runs it.
    """
    if word in _PENDING:
        return Phase.PENDING
    return Phase.ENDED if word in _ENDED else Phase.RUNNING


def _exit_code(text: str) -> int | None:
    """Of ``3:0`` (code and signal), or of the status that wait(2) gives (squeue: 3 is 768)."""
    code, colon, signal = text.partition(":")
    if not code.isdecimal() or (colon and not signal.isdecimal()):
        return None
    if colon:
        return None if int(signal) else int(code)
    status = int(code)
    return None if status & 0x7F else status >> 8


def _seconds(text: str) -> float | None:
    """``1-02:03:04``, ``02:03:04`` or ``03:04``, in seconds."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
