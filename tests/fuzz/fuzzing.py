"""What all kinds of fuzz cases share: a case, a command called in this process, what is wrong.

A case is known by its kind, its number and the seed of the session, and by nothing else: the same
three make the same case again, alone or among others (``run_fuzz.py --only KIND:NUMBER``).

Of every command that a case calls is asked:

- it ends with one of the exit codes that its help names, by returning: nothing is raised, and
  neither a traceback, a warning of numpy's nor "this is a bug in converge" is printed;
- with exit code 2 it says something on stderr;
- what it prints has no control character but tab and line feed, and none that turns the direction
  of text;
- it takes at most ``CPU_S`` of CPU and ``WALL_S`` in all, and the process grows by at most
  ``MEMORY`` bytes.
"""

import contextlib
import faulthandler
import io
import os
import random
import resource
import signal
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from converge_harness.cli import main

ROOT = Path(__file__).parents[2]
CPU_S = 20.0
WALL_S = 120.0
"""The same of time in which it waits for anything, on a busy machine too."""
HARD_S = 300.0
"""Wall time after which a process that hangs in C code is ended, with its stack on stderr."""
MEMORY = 1 << 30
PLAN_CODES = frozenset({0, 2})
JUDGING_CODES = frozenset({0, 1, 2, 3})


class TookTooLong(BaseException):
    """Not an Exception: a command must not take it for an error of its own."""


@dataclass
class Case:
    kind: str
    number: int
    seed: int
    folder: Path
    """An empty one, for all that the case writes; it is kept when something is wrong."""
    dice: random.Random = field(init=False)
    done: list[str] = field(default_factory=list)
    """What was done, and what came out, in order."""
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.dice = random.Random(f"{self.seed}/{self.kind}/{self.number}")

    def do(self, what):
        self.done.append(what)

    def require(self, condition, what):
        if not condition:
            self.wrong.append(what)


@dataclass(frozen=True)
class Ended:
    code: object
    """Exit code, or the name of what was raised."""
    out: str
    err: str


def called(case, arguments, codes):
    """Call ``converge`` in this process; what is wrong whatever it was asked goes into the case."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_long)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    faulthandler.dump_traceback_later(HARD_S, exit=True)
    memory = _largest()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(map(str, arguments)))
        code = int(code)
    except SystemExit as ended:  # argparse
        code = ended.code
    except TookTooLong:
        code = f"more than {CPU_S:g} s of CPU, or {WALL_S:g} s"
        err.write(traceback.format_exc().replace("Traceback", "Stack"))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever escapes is what is looked for
        code = type(error).__name__
        err.write(traceback.format_exc())
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    ended = Ended(code, out.getvalue(), err.getvalue())
    told(case, arguments, ended, codes)
    grown = _largest() - memory
    case.require(grown <= MEMORY, f"the process grew by {grown >> 20} MiB")
    return ended


def told(case, arguments, ended, codes):
    """Note a command and what came out, and what is wrong with that."""
    words = " ".join(map(str, arguments))
    case.do(f"$ converge {words}\nexit code {ended.code}\n{ended.out}\n{ended.err}")
    case.require(ended.code in codes, f"exit code {ended.code} of: converge {words}")
    said = ended.out + ended.err
    for word in ("Traceback", "this is a bug in converge", "Warning: "):
        case.require(word not in said, f"{word!r} printed by: converge {words}")
    if ended.code == 2:
        case.require(ended.err.strip(), f"no word about exit code 2 of: converge {words}")
    steering = {each for each in said if not (each.isprintable() or each in "\n\t")}
    case.require(not steering, f"prints {sorted(steering)!r}: converge {words}")


def _too_long(_number, _frame):
    raise TookTooLong


def _largest():
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def working_in(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def environment(**values):
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def only_json(*, unless=False):
    """Leave pictures and pages out of the reports: most of the time, and they decide nothing."""
    import converge_harness.report as module

    kept = module.draw, module.to_html
    if not unless:
        no_pictures_nor_page()
    try:
        yield
    finally:
        module.draw, module.to_html = kept


def no_pictures_nor_page():
    """The same for good, as for a process that only judges."""
    import converge_harness.report as module

    module.draw = lambda _view: {}
    module.to_html = lambda _view: ""


def bounded_memory(more=8 << 30):
    """Let this process fail with MemoryError rather than the machine swap."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def damaged_bytes(content, dice):
    """A few bytes of a file damaged in one of the ways that disks, editors and tools do it."""
    content = bytearray(content)
    size = len(content)
    how = dice.choice(("flip", "flip", "flip", "set", "cut", "delete", "insert", "repeat", "swap"))
    at = dice.randrange(size) if size else 0
    length = min(dice.choice((1, 1, 2, 8, 64)), max(size - at, 0))
    if how == "flip" and size:
        content[at] ^= 1 << dice.randrange(8)
    elif how == "set" and size:
        content[at] = dice.choice(b'\x00\xff\n\r\t ",{}[]:0123456789.-eNn')
    elif how == "cut":
        del content[at:]
    elif how == "delete":
        del content[at : at + length]
    elif how == "insert":
        content[at:at] = dice.randbytes(length) if dice.random() < 0.5 else b" 0"
    elif how == "repeat":
        content[at:at] = content[at : at + length]
    elif how == "swap" and size > 2:
        other = dice.randrange(size)
        content[at], content[other] = content[other], content[at]
    return bytes(content), f"{how} at byte {at} of {size}"


ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "\x1b[2J\x1b]0;title\x07",
    "\u202eevil",
    "s\u200bame",
    "\ufeffsame",
    "same\u00a0",
    "a\nb",
    "\u2028",
    "[bold red]x[/]",
    "[/]",
    "../../../etc/passwd",
    "/dev/zero",
    "nan",
    "{",
    "}",
    "{}",
    "{steps}",
    "{config.x}",
    "%s%n",
    "$HOME",
    "-x",
    "--help",
    "a/b",
    ".",
    "..",
    "CON",
    "\u00fc\u5b9f\U0001f600",
    "x" * 300,
    "x" * 100_000,
)
ODD_NUMBERS = (
    *(0, -1, -3, 1, 2, 3, 7, 10**6, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 2.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *(True, False),
)


def odd_value(dice, depth=0):
    """A value of a type or size that nobody expects."""
    choice = dice.random()
    if choice < 0.35:
        return dice.choice(ODD_NUMBERS)
    if choice < 0.7:
        return dice.choice(ODD_TEXTS)
    if choice < 0.75:
        deep = 1
        for _ in range(dice.choice((3, 60, 200))):
            deep = [deep] if dice.random() < 0.5 else {"a": deep}
        return deep
    if depth > 2:
        return []
    many = range(dice.choice((0, 1, 3)))
    if choice < 0.87:
        return [odd_value(dice, depth + 1) for _ in many]
    keys = ("a", "training.steps", "", "name", "\u202e")
    return {dice.choice(keys): odd_value(dice, depth + 1) for _ in many}
