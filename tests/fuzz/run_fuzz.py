"""Run the fuzz cases: ``nox -s fuzz [-- --seed N --cases KIND=COUNT … --only KIND:NUMBER …]``.

Kinds are ``experiments``, ``curves`` (one kind for every format: ``curves.csv`` …), ``stores`` and
``kills``; what they ask stands at the top of their modules. Several processes share the work. Every
case that goes wrong is kept in a folder of its own, below ``--keep``, with what was done, what came
out, the files, and the command that does it again. Exit code 0: nothing went wrong; 1: something
did; 130: interrupted, with what was found so far.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path.insert(1, str(HERE.parent))

import fuzzed_curves  # noqa: E402 (tests/ has to be on the path)
import fuzzed_experiments  # noqa: E402
import fuzzed_kills  # noqa: E402
import fuzzed_stores  # noqa: E402
from fuzzing import Case, bounded_memory  # noqa: E402

KINDS = {
    "experiments": fuzzed_experiments,
    **{f"curves.{name}": fuzzed_curves.of_format(name) for name in fuzzed_curves.FORMATS},
    "stores": fuzzed_stores,
    "kills": fuzzed_kills,
}
COUNTS = {"experiments": 2000, "curves": 1000, "stores": 500, "kills": 200}
SAY_EVERY_S = 10.0
KEEP = ROOT / ".converge" / "fuzz"


def main(argv=None):
    arguments = _parser().parse_args(argv)
    if arguments.worker:
        return _work(arguments)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    cases = _cases(arguments)
    print(f"seed {seed}: {len(cases)} cases; what goes wrong is kept in {arguments.keep}")
    session = _Session(seed, arguments.keep)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell's background job ignores it
        signal.signal(number, signal.default_int_handler)
    try:
        session.run(cases, arguments.jobs)
    except KeyboardInterrupt:
        session.summary(interrupted=True)
        return 130
    session.summary()
    return 1 if session.failed else 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="nox -s fuzz --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, help="of all cases (default: another one every time)")
    parser.add_argument(
        "--cases",
        nargs="+",
        type=_count,
        metavar="KIND=COUNT",
        help=f"only these kinds, with so many cases; without: {COUNTS}, curves of every format",
    )
    parser.add_argument("--only", nargs="+", metavar="KIND:NUMBER", help="only these cases")
    parser.add_argument("--keep", type=Path, default=KEEP, metavar="DIR", help="for what is wrong")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _count(text):
    kind, _, count = text.partition("=")
    known = {*COUNTS, *KINDS}
    if kind not in known or not count.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not written KIND=COUNT; kinds are {', '.join(sorted(known))}"
        )
    return kind, int(count)


def _cases(arguments):
    if arguments.only:
        return [_named(text) for text in arguments.only]
    counts = {}
    for kind, count in arguments.cases or COUNTS.items():
        for each in KINDS:
            if each == kind or each.startswith(f"{kind}."):
                counts[each] = count
    # All kinds in turn, so that a session which is interrupted has seen some of each.
    most = max(counts.values(), default=0)
    return [(kind, number) for number in range(most) for kind in counts if number < counts[kind]]


def _named(text):
    kind, _, number = text.rpartition(":")
    if kind not in KINDS or not number.isdecimal():
        sys.exit(f"--only {text}: is not written KIND:NUMBER; kinds are {', '.join(KINDS)}")
    return kind, int(number)


# --------------------------------------------------------------------- session


class _Session:
    """Shares cases among processes, and says what came of them."""

    def __init__(self, seed, keep):
        self._seed = seed
        self._keep = keep
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._said = self._begun
        self._tally = {}
        self._seconds = {}
        self._processes = []
        self._ended = False
        self.failed = []

    def run(self, cases, jobs):
        self._all = len(cases)
        waiting = [cases[at::jobs] for at in range(min(jobs, len(cases)))]
        threads = [threading.Thread(target=self._drive, args=(each,)) for each in waiting]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        finally:
            self._ended = True
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            for thread in threads:
                thread.join()

    def _drive(self, cases):
        """Cases in one process after the other: one that dies takes only its own case with it."""
        while cases and not self._ended:
            with tempfile.TemporaryFile("w+") as errors:
                process = subprocess.Popen(
                    [sys.executable, __file__, "--worker", "--seed", str(self._seed)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,  # Ctrl-C is ours; workers are told
                )
                self._processes.append(process)
                process.stdin.write(json.dumps([str(self._keep), cases]))
                process.stdin.close()
                done = 0
                for line in process.stdout:
                    self._take(json.loads(line))
                    done += 1
                code = process.wait()
                errors.seek(0)
                said = errors.read()
            cases = cases[done:]
            if cases and not self._ended:
                kind, number = cases.pop(0)
                words = f"the process of the case ended with {code}:\n{said[-4000:]}"
                self._take({"kind": kind, "number": number, "wrong": [words], "seconds": 0.0})

    def _take(self, told):
        with self._lock:
            kind = told["kind"]
            self._tally[kind] = self._tally.get(kind, 0) + 1
            self._seconds[kind] = self._seconds.get(kind, 0.0) + told["seconds"]
            if told["wrong"]:
                name = f"{kind}:{told['number']}"
                self.failed.append(name)
                print(f"\nWRONG {name}")
                for what in told["wrong"]:
                    print(f"  {what}")
                print(f"  again: {again(self._seed, name)}", flush=True)
            now = time.monotonic()
            if now - self._said >= SAY_EVERY_S:
                self._said = now
                print(
                    f"{sum(self._tally.values())} of {self._all} cases, {len(self.failed)} wrong, "
                    f"{now - self._begun:.0f} s; now {kind}:{told['number']}",
                    flush=True,
                )

    def summary(self, *, interrupted=False):
        print("\ninterrupted" if interrupted else "")
        for kind, count in self._tally.items():
            wrong = sum(name.startswith(f"{kind}:") for name in self.failed)
            print(f"{kind:22} {count:6} cases {wrong:4} wrong {self._seconds[kind]:8.0f} s")
        wall = time.monotonic() - self._begun
        print(f"seed {self._seed}, {wall:.0f} s, {len(self.failed)} wrong")


def again(seed, name):
    """The command that does one case again."""
    return f"nox -s fuzz -- --seed {seed} --only {name}"


# ---------------------------------------------------------------------- worker


def _work(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    keep, cases = json.loads(sys.stdin.read())
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints by itself is no answer of ours
    bounded_memory()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        bases = {}
        for kind, number in cases:
            begun = time.monotonic()
            wrong = run_case(kind, number, arguments.seed, Path(folder), Path(keep), bases)
            seconds = time.monotonic() - begun
            line = {"kind": kind, "number": number, "wrong": wrong, "seconds": seconds}
            told.write(json.dumps(line) + "\n")
            told.flush()
    return 0


def run_case(kind, number, seed, folder, keep, bases):
    """What is wrong in a case, in sentences. ``bases`` keeps what the cases of a kind share."""
    module = KINDS[kind]
    if kind not in bases:
        base = folder / f"{kind}.base"
        base.mkdir()
        bases[kind] = module.prepare(base)
    place = folder / f"{kind}.case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    case = Case(kind, number, seed, place)
    try:
        module.run(case, bases[kind])
    except Exception:  # noqa: BLE001 - a case that cannot be made is told as one that is wrong
        case.wrong.append(f"the case itself failed:\n{traceback.format_exc()}")
    if case.wrong:
        _keep(case, keep / f"seed-{seed}" / f"{kind}-{number}")
    return case.wrong


def _keep(case, folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(case.folder, folder / "files", symlinks=True, ignore=_no_file)
    wrong = "\n".join(case.wrong)
    done = "\n\n".join(case.done)
    command = again(case.seed, f"{case.kind}:{case.number}")
    text = f"again: {command}\n\nwrong:\n{wrong}\n\ndone:\n{done}\n"
    (folder / "case.txt").write_text(text, errors="backslashreplace")


def _no_file(folder, names):
    """What cannot be copied: pipes wait for a writer."""
    paths = [Path(folder) / name for name in names]
    return [path.name for path in paths if path.exists() and not (path.is_file() or path.is_dir())]


if __name__ == "__main__":
    sys.exit(main())
