"""Slurm as a backend: calls sbatch, squeue, sacct and scancel, and parses their output.

Also finds the keys of ``[cluster]`` that a refusal is about.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from converge_harness.errors import ClusterError
from converge_harness.launch.scheduler.backend import (
    JobEnd,
    JobState,
    Known,
    NeverStarts,
    Phase,
    Refused,
    ScriptRequest,
    SubmitRequest,
)
from converge_harness.launch.scheduler.batch_step import TERMINATED
from converge_harness.launch.scheduler.result import of_segment, unknown_end, where, with_log
from converge_harness.launch.slurm.batch_script import batch_script
from converge_harness.model import Cluster, RankError
from converge_harness.run_folder.launcher_variables import is_of_launcher
from converge_harness.run_folder.layout import (
    JOB_SCRIPT,
    JOB_VARIABLE,
    LOGS,
    SEGMENT_VARIABLE,
    SLURM_LOG,
    newest_call_logs,
)
from converge_harness.trainers import trainer_of

_TIMEOUT_S = 120.0
"""Longest time of a Slurm command; sbatch itself retries for about a minute."""

_SLOW_S = 5.0
"""After this time converge prints what it is waiting for."""

_SQUEUE = ("squeue", "--me", "--all", "--noheader")
"""``--all``: also in hidden partitions."""

_KEPT = re.compile(r"SLURM_(CONF|CONF_SERVER|CLUSTERS|JWT)")
_SLURMS = re.compile(r"(SLURM|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SALLOC)_.*")
"""Variables that change what these commands request or print, and those of a job in which converge
itself may run, which its jobs must not inherit.
"""

_NOT_INHERITED = frozenset({JOB_VARIABLE, SEGMENT_VARIABLE})

_FOR_NOW = re.compile(
    r"MaxSubmitJob|MaxJobCount|temporarily unable|violates accounting/QOS policy", re.IGNORECASE
)
"""Refusals of sbatch that go away when other jobs have ended …"""
_POLICY = re.compile(r"violates accounting/QOS policy", re.IGNORECASE)
_SUBMIT_LIMIT = re.compile(r"MaxSubmitJob|MaxJobCount", re.IGNORECASE)
_FOR_EVER = re.compile(r"(Assoc|QOS)(Max\w+Per(Job|Node)|Min\w+)")
"""… unless they name one of these limits."""
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|could not establish a configuration source"
    r"|connection refused|zero bytes were transmitted|failure in connecting|munge"
    r"|protocol authentication error|socket timed out",
    re.IGNORECASE,
)
_PERHAPS_TAKEN = re.compile(r"socket timed out|zero bytes were transmitted", re.IGNORECASE)
"""The answer was lost: the job may have been accepted."""
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|slurmdbd|SlurmDBD", re.IGNORECASE)


class Slurm:
    """Jobs of this user on the cluster of Slurm's commands."""

    name: ClassVar[str] = "Slurm"
    to_create: ClassVar[bool] = False
    queue_command: ClassVar[str] = "squeue"
    script_log: ClassVar[str | None] = SLURM_LOG
    ordinary_reasons: ClassVar[frozenset[str]] = frozenset(
        {
            "",
            "None",
            "Priority",
            "Resources",
            "Dependency",
            "BeginTime",
            "Cleaning",
            "WaitingForScheduling",
        }
    )

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Set the environment of Slurm's commands.

        Args:
            environment: for the commands and, through sbatch, for jobs; None: this process's.
            say: called once if Slurm is slow to answer: its commands retry for a minute.
        """
        self._say = say
        self._environment = _environment(os.environ if environment is None else environment)
        self._accounting = True
        """Whether to use accounting; False once sacct has said that there is none."""

    def submit(self, request: SubmitRequest) -> str:
        """Submit a job to Slurm; return its id.

        Raises Refused if sbatch refuses the job, and ClusterError if there is no answer.
        """
        if request.perhaps_there and (there := self._named(request.name)):
            return there
        command = ("sbatch", "--parsable", *_dependency(request), str(request.script))
        try:
            done = self._call(command, cwd=request.script.parent)
            complaint = done.stderr
            lost = done.returncode < 0 or (
                done.returncode != 0 and bool(_PERHAPS_TAKEN.search(complaint))
            )
        except subprocess.TimeoutExpired:
            complaint, lost = f"sbatch gave no answer within {_TIMEOUT_S:g} s", True
        if lost:
            if there := self._named(request.name):
                return there
            raise Refused(_last_lines(complaint), for_now=True)
        if done.returncode != 0:
            self._raise_unreachable("sbatch", complaint)
            passes = bool(_FOR_NOW.search(complaint)) and not _FOR_EVER.search(complaint)
            if passes and _POLICY.search(complaint) and not _SUBMIT_LIMIT.search(complaint):
                # A limit on the number of jobs can only be due to jobs that are still there.
                passes = bool(self._ask(*_SQUEUE, f"--Format=JobID:{JOB_WIDTH}").split())
            raise Refused(_last_lines(complaint), for_now=passes)
        # "1234", or "1234;cluster" with several clusters; wrappers may print lines before it.
        lines = done.stdout.split()
        job_id = lines[-1].partition(";")[0] if lines else ""
        there = job_id if job_id.isdecimal() else self._named(request.name)
        if there is None:
            raise ClusterError(
                f"sbatch should have printed the id of {request.name}: {done.stdout!r}"
            )
        return there

    def poll(self, ids: Collection[str]) -> Mapping[str, JobState]:
        """The states of these jobs: one squeue, and one sacct for jobs that squeue does not know.

        Raises ClusterError if squeue has no answer, or an unreadable one.
        """
        if not ids:
            return {}
        output = self._ask(*_SQUEUE, "--states=all", SQUEUE_FORMAT)
        queue = read_squeue(output)
        # With SLURM_CLUSTERS a line names the cluster first.
        printed = [x for x in output.splitlines() if x.strip() and not x.startswith("CLUSTER:")]
        if printed and not queue:
            raise ClusterError(f"squeue should have printed jobs: {_last_lines(output)!r}")
        found = {job_id: queue[job_id] for job_id in ids if job_id in queue}
        forgotten = [job_id for job_id in ids if job_id not in found]
        if forgotten:
            found |= self._accounted(forgotten)
        return {job_id: found.get(job_id) or unknown_job() for job_id in ids}

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel these jobs, running or waiting; unknown ones are already over.

        Raises ClusterError if Slurm cannot be reached.
        """
        if not ids:
            return
        try:
            done = self._call(("scancel", "--quiet", *ids))
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"scancel gave no answer within {_TIMEOUT_S:g} s") from error
        if done.returncode != 0:  # for example for unknown ids
            self._raise_unreachable("scancel", done.stderr)

    def files(self, request: ScriptRequest) -> dict[str, str]:
        """The batch script of a job.

        Raises ConfigError when the ranks do not fill nodes, and for a path that sbatch cannot take.
        """
        return {JOB_SCRIPT: batch_script(request)}

    def submit_argv(self, folder: Path) -> tuple[str, ...]:
        """The command that submits the script of a run folder, without dependencies."""
        return ("sbatch", str(folder / JOB_SCRIPT))

    def cancel_argv(self, cluster: Cluster) -> tuple[str, ...]:  # noqa: ARG002 - of the interface
        """The command that cancels jobs, without their ids."""
        return ("scancel",)

    def with_keys(self, words: str, cluster: Cluster) -> str:
        """A refusal with the keys that it is about."""
        return with_keys(words, cluster)

    def failed(self, known: Known, returncode: int | None) -> RankError:
        """The error of the rank that failed first; for an elastic set, with its segment.

        Slurm may have forgotten the job.
        """
        forgotten = known.state.phase is Phase.UNKNOWN
        if returncode is None and forgotten:
            gone = f"Slurm no longer knows job {known.submission.job_id}"
            return with_log(known, unknown_end(known, gone))
        if returncode == TERMINATED and forgotten:
            message = (
                "was ended by SIGTERM (time limit, preemption, scancel): Slurm no longer says why"
            )
            return with_log(known, f"{message}, {where(known)}")
        logs, script = newest_call_logs(known.folder / LOGS), known.folder / SLURM_LOG
        error = trainer_of(known.job.spec).error(logs, logs, returncode, script)
        return of_segment(known, error)

    # -------------------------------------------------------------- commands

    def _named(self, name: str) -> str | None:
        """The id of a waiting or running job of that name; of several, the newest."""
        output = self._ask(*_SQUEUE, f"--name={name}", f"--Format=JobID:{JOB_WIDTH}")
        return max((word for word in output.split() if word.isdecimal()), key=int, default=None)

    def _accounted(self, ids: Sequence[str]) -> dict[str, JobState]:
        if not self._accounting:
            return {}
        command = ("sacct", "--noheader", "--parsable2", "--allocations", SACCT_FORMAT)
        try:
            done = self._call((*command, f"--jobs={','.join(ids)}"))
        except (ClusterError, subprocess.TimeoutExpired):
            return {}  # it may answer next time
        if done.returncode != 0:
            self._accounting = not _NO_ACCOUNTING.search(done.stderr)
            return {}
        return read_sacct(done.stdout)

    def _ask(self, *command: str) -> str:
        """The output of a command.

        Raises ClusterError if it fails.
        """
        try:
            done = self._call(command)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{command[0]} gave no answer within {_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            self._raise_unreachable(command[0], done.stderr)
            raise ClusterError(f"{command[0]} failed: {_last_lines(done.stderr)}")
        return done.stdout

    def _call(
        self, command: Sequence[str], cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        self._require_configuration()
        slow = threading.Timer(_SLOW_S, self._say_slow, (command[0],))
        slow.daemon = True
        slow.start()
        try:
            return subprocess.run(
                command,
                env=self._environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not reach sbatch: its answer is needed
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise ClusterError(
                f"{command[0]} is not on the PATH: run converge on a login node of the cluster "
                "(perhaps after `module load slurm`), or with --launcher local"
            ) from error
        except OSError as error:
            raise ClusterError(f"cannot run {command[0]}: {error}") from error
        finally:
            slow.cancel()

    def _require_configuration(self) -> None:
        """Raise ClusterError for a missing file that Slurm's commands would retry for a minute."""
        named = self._environment.get("SLURM_CONF")
        if named and not Path(named).exists():
            raise ClusterError(
                f"SLURM_CONF is {named}, but there is no such file: set it to the cluster's "
                "slurm.conf or unset it, then give the same command again"
            )

    def _say_slow(self, program: str) -> None:
        if self._say is not None:
            self._say(f"waiting at most {_TIMEOUT_S:g} s for Slurm to answer {program}")
            self._say = None

    def _raise_unreachable(self, program: str, complaint: str) -> None:
        if _UNREACHABLE.search(complaint):
            raise ClusterError(
                f"{program} cannot reach Slurm: {_last_lines(complaint)}. Try `scontrol ping`; "
                "submitted jobs go on, and `converge collect` finds them again"
            )


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    def is_kept(name: str) -> bool:
        foreign = _SLURMS.fullmatch(name) or name in _NOT_INHERITED or is_of_launcher(name)
        return bool(_KEPT.fullmatch(name)) or not foreign

    kept = {name: value for name, value in inherited.items() if is_kept(name)}
    return {**kept, "LC_ALL": "C"}


def _dependency(request: SubmitRequest) -> tuple[str, ...]:
    """Dependencies that must all be met."""
    conditions = [
        ":".join((kind, *ids))
        for kind, ids in (("afterok", request.after_ok), ("afterany", request.after_any))
        if ids
    ]
    return (f"--dependency={','.join(conditions)}",) if conditions else ()


def _last_lines(complaint: str) -> str:
    """The last lines of a command's complaint, without its own name."""
    lines = [
        re.sub(r"^\w+: (error|fatal): ", "", line)
        for line in complaint.splitlines()
        if line.strip()
    ]
    return "; ".join(lines[-2:]) or "it gave no reason"


# ------------------------------------------- output of squeue and sacct; pure

JOB_WIDTH = 24
_COLUMNS = (
    ("JobID", JOB_WIDTH),
    ("State", 24),
    ("RestartCnt", 12),
    ("exit_code", 16),
    ("TimeUsed", 24),
    ("Reason", 256),
    ("NodeList", 1024),
    ("Name", 256),  # last: names of others' jobs may have letters wider than a byte
)
SQUEUE_FORMAT = "--Format=" + ",".join(f"{name}:{width}" for name, width in _COLUMNS)
"""Columns of fixed width, which every Slurm since 2016 has; a reason may have any character."""
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

_TIME_IS_UP = frozenset({"TIMEOUT", "DEADLINE"})
_TAKEN_AWAY = frozenset({"OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED"})
_DEPENDENCY = "DependencyNeverSatisfied"
TOO_MANY_REQUEUES = "JobHoldMaxRequeue"
LAUNCH_FAILED = re.compile("launch[ _]failed[ _]requeued[ _]held")
"""Slurm holds a job whose script a node could not even begin; words by the release."""
_NEVER = re.compile(
    rf"{_DEPENDENCY}|{TOO_MANY_REQUEUES}|{LAUNCH_FAILED.pattern}"
    r"|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|DeadLine"
    r"|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|MaxMemPerLimit"
    r"|(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+"
)
"""Reasons of pending jobs that request more than they can ever get. Not included: limits that other
jobs use up (``…Grp…``, ``…PerUser…``), nodes that are down, held jobs, and ``PartitionConfig``,
which Slurm 22.05 says first and replaces a second later.
"""


def unknown_job() -> JobState:
    """The state of a job that Slurm does not know any more."""
    return JobState(Phase.UNKNOWN)


def read_squeue(output: str) -> dict[str, JobState]:
    """Job states by id from squeue's output in ``SQUEUE_FORMAT``; other lines are skipped."""
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
    """Job states by id from sacct's output in ``SACCT_FORMAT``; after a requeue, its last start."""
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
        never=_why_never(reason) if phase is Phase.PENDING else None,
        end=job_end_of(word, reason) if phase is Phase.ENDED else JobEnd.BY_CODE,
        paused=phase is Phase.RUNNING and word not in ("", "RUNNING"),
        restarts=restarts,
        exit_code=exit_code if phase is Phase.ENDED and not signalled else None,
        ran_s=ran_s,
        nodes=nodes,
        name=name,
    )


def phase_of(word: str) -> Phase:
    """The phase of a job by Slurm's state.

    Everything that is neither pending nor over counts as running: RUNNING CONFIGURING RESIZING
    SIGNALING STAGE_OUT STOPPED SUSPENDED, unknown states of future versions, COMPLETING, from which
    a job may return to the queue, and REVOKED, if another cluster of a federation runs it.
    """
    if word in _PENDING:
        return Phase.PENDING
    return Phase.ENDED if word in _ENDED else Phase.RUNNING


def job_end_of(word: str, reason: str = "") -> JobEnd:
    """How a job ended, by Slurm's state and reason."""
    if word == "CANCELLED":
        return JobEnd.NEEDED if reason == _DEPENDENCY else JobEnd.CANCELLED
    if word in _TIME_IS_UP:
        return JobEnd.TIME_IS_UP
    if word in _TAKEN_AWAY:
        return JobEnd.TAKEN_AWAY
    return JobEnd.BY_CODE if word == "COMPLETED" else JobEnd.FAILED


def _why_never(reason: str) -> NeverStarts | None:
    """Why a pending job can never start, by Slurm's reason; None: it can."""
    if not _NEVER.fullmatch(reason):
        return None
    if LAUNCH_FAILED.fullmatch(reason):
        return NeverStarts.LAUNCH
    by_reason = {_DEPENDENCY: NeverStarts.NEEDED, TOO_MANY_REQUEUES: NeverStarts.REQUEUES}
    return by_reason.get(reason, NeverStarts.REQUEST)


def _exit_code(text: str) -> int | None:
    """Exit code from ``3:0`` (code and signal), or from a wait(2) status (squeue: 768 for 3)."""
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


# ------------------------------------------------------------- refusals; pure

_GPUS = ("gpus_per_node", "gres")
_OF_A_NODE = ("ranks_per_node", *_GPUS, "cpus_per_rank", "memory_per_node", "constraint")
_LIMITS = ("time", "qos", "account")
_KEYS_BY_REFUSAL: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"account or account/partition|InvalidAccount|AccountNotAllowed", ("account", "partition")),
    (r"\bQOS (specification|not permitted)|InvalidQOS|QOSNotAllowed", ("qos",)),
    (r"invalid (generic resource|gres)|\bTRES\b", _GPUS),
    (r"time limit|--time|PartitionTimeLimit|DeadLine", ("time",)),
    (r"feature specification", ("constraint",)),
    (r"accounting/QOS policy|(Assoc|QOS)M(ax|in)", _LIMITS),
    (r"not permitted to use this partition|partition", ("partition",)),
    (r"memory specification|MaxMemPerLimit", ("memory_per_node",)),
    (r"CPU count|more processors", ("ranks_per_node", "cpus_per_rank")),
    (r"node configuration|BadConstraints", _OF_A_NODE),
)
"""Patterns of Slurm's messages (``slurm_errno.c``, and reasons of pending jobs), and the keys that
may have caused them; the first match counts.
"""


def keys_behind(words: str, cluster: Cluster) -> str:
    """The keys as in the file, ``[cluster] partition``; empty if the text is unknown.

    Keys that the file does not set are left out, because they cannot be wrong.
    """
    for pattern, keys in _KEYS_BY_REFUSAL:
        if re.search(pattern, words, re.IGNORECASE):
            written = [key for key in keys if getattr(cluster, key) not in (None, False)]
            return f"[cluster] {', '.join(written)}" if written else ""
    return ""


def with_keys(words: str, cluster: Cluster) -> str:
    """A refusal with the keys that it is about: ``Invalid qos specification ([cluster] qos)``."""
    keys = keys_behind(words, cluster)
    return f"{words} ({keys})" if keys else words
