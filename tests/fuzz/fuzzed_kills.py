"""``converge run`` of a tiny matrix, ended by a signal at a random moment, then run again.

Programs of the matrix start programs themselves and know nothing of converge, so whatever of
them is left is an orphan. Most harnesses are forks of the process of the cases, which saves a
second of imports; one in ten is ``python -m converge_harness`` from its first instruction on.

The properties:

- a harness that SIGKILL ends takes every process with it, and so does one that SIGTERM or SIGINT
  ends, once or twice. It then exits with 130 (or as an undisturbed one, when the signal came after
  the end of its work; or by the signal itself before Python had a handler for it, or when it had
  taken it away at its end: a shell shows that as 130, too);
- no traceback is printed;
- the next ``converge run`` exits as an undisturbed one, with its verdicts;
- after it nothing called ``converge-*`` is left in the folder for temporary files, and no temporary
  file of an unfinished write in a run folder.

Processes are found by a variable that each inherits, whoever their parent has become.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fuzzing import ROOT, Ended, no_pictures_nor_page, told
from tiny_matrix import RUN, VERDICTS, verdicts, write_matrix

MARK = "CONVERGE_FUZZ"
PAUSE_S = 0.03
"""After each of 16 steps, so that about half a second of the time is training."""
LONGEST_S = 120.0
ORPHAN_S = 10.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def prepare(folder):
    """How long an undisturbed run takes, as a fork and as a process of its own."""
    import converge_harness.cli.progress
    import converge_harness.cli.verdicts  # noqa: F401 - imported once, for all forks

    times = {}
    for forked in (True, False):
        place = folder / f"forked-{forked}"
        place.mkdir()
        write_matrix(place, PAUSE_S)
        begun = time.monotonic()
        code, out, err = _Harness(place, "undisturbed", forked=forked).ended()
        times[forked] = time.monotonic() - begun
        if (code, verdicts(place / "out")) != (1, VERDICTS):
            raise RuntimeError(f"the undisturbed matrix ends with {code}:\n{out}\n{err}")
    return times


def run(case, times):
    dice, place = case.dice, case.folder
    write_matrix(place, PAUSE_S)
    for _ in range(dice.choice((1, 1, 1, 2))):
        _kill_one(case, times)
    code, out, err = _Harness(place, "again", forked=True).ended()
    told(case, RUN, Ended(code, out, err), {1})
    case.require(verdicts(place / "out") == VERDICTS, f"then judged {verdicts(place / 'out')}")
    left = [path.name for path in (place / "tmp").glob("converge-*")]
    case.require(not left, f"left in the folder for temporary files: {left}")
    parts = [str(path) for path in (place / "store" / "runs").rglob(".*")]
    case.require(not parts, f"left of unfinished writes: {parts}")


def _kill_one(case, times):
    dice = case.dice
    forked = dice.random() < 0.9
    number = dice.choice(SIGNALS)
    moment = dice.uniform(0, 1.2 * times[forked])
    mark = f"{case.seed}-{case.number}-{os.getpid()}-{time.monotonic_ns()}"
    harness = _Harness(case.folder, mark, forked=forked)
    time.sleep(moment)
    harness.send(number)
    twice = number != signal.SIGKILL and dice.random() < 0.25
    if twice:
        time.sleep(dice.uniform(0, 0.3))
        harness.send(number)
    case.do(f"{number.name}{' twice' * twice} after {moment:.3f} s, forked: {forked}")
    code, out, err = harness.ended()
    allowed = {-number, 1} if number == signal.SIGKILL else {130, 1}
    at_its_end = out.rstrip().endswith("history: history.sqlite") or "interrupted; " in err
    if at_its_end or not (out or err):
        allowed.add(-number)  # there was no handler yet, or none any more
    told(case, RUN, Ended(code, out, err), allowed)
    left = _left(mark)
    case.require(not left, f"orphans: {left}")


class _Harness:
    """One ``converge run``, as a process that can be ended."""

    def __init__(self, place, mark, *, forked):
        self._place = place
        (place / "tmp").mkdir(exist_ok=True)
        self._words = (place / "stdout", place / "stderr")
        values = {
            **os.environ,
            MARK: mark,
            "TMPDIR": str(place / "tmp"),
            "PYTHONPATH": str(ROOT / "src"),
        }
        if forked:
            self._pid = os.fork()
            if not self._pid:
                self._be(values)
            return
        with self._words[0].open("wb") as out, self._words[1].open("wb") as err:
            command = [sys.executable, "-m", "converge_harness", *RUN]
            streams = {"stdout": out, "stderr": err, "stdin": subprocess.DEVNULL}
            # A shell's background job ignores SIGINT, and so would what it starts.
            self._process = subprocess.Popen(
                command,
                cwd=place,
                env=values,
                **streams,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )
        self._pid = self._process.pid

    def _be(self, values):
        """The rest of the forked process."""
        code = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self._place)
            for stream, path in zip((1, 2), self._words, strict=True):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
            os.environ.clear()
            os.environ.update(values)
            tempfile.tempdir = None
            from converge_harness.cli import main

            no_pictures_nor_page()
            code = int(main(list(RUN)))
        except KeyboardInterrupt:
            code = 130
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number):
        os.kill(self._pid, number)  # not yet waited for, so the id is still its own

    def ended(self):
        """Exit code, minus the signal that ended it; what it printed."""
        until = time.monotonic() + LONGEST_S
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)
        if hasattr(self, "_process"):
            self._process.returncode = os.waitstatus_to_exitcode(status)
        words = [path.read_text() if path.exists() else "" for path in self._words]
        return os.waitstatus_to_exitcode(status), *words


def _left(mark):
    """Processes that still carry the mark when they have had time to end."""
    until = time.monotonic() + ORPHAN_S
    while (left := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    return list(left.values())


def _marked(mark):
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables:
                call = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[path.parent.name] = call
        except (OSError, UnicodeDecodeError):
            continue
    return found
