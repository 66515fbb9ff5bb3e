"""Damaged curves of every format, compared with the curve that they were made from.

A case writes a curve twice in one format, changes one of the two (in the values that are written,
in the bytes of the file, or both), and has ``converge compare`` judge them: without anything else,
with three repeats of the control, or with a tolerance. The properties are those of ``fuzzing.py``
with the exit codes 0 to 3, and, from what the change did and what plain Python still reads
(``curve_formats.py``), never from the readers under test:

- **differs**: never PASS. That is a loss or grad norm off by more than ``LIMITS`` at any step, NaN
  or an infinity in one of them, another learning rate, a step with two different values, a missing
  first or last step, a hole (steps that the rest of the curve's own grid has), steps beyond the
  other curve's, a grad norm at some steps only, and a file that cannot be read to its end.
- **same**: the same numbers at the same steps: never FAIL. It may be INVALID, as where rows are out
  of order or golden values are not those of their ``step_interval``; the unchanged file itself
  must PASS.
- **open**: anything else, of which only the first properties are asked: differences below
  ``LIMITS``; another regular grid with equal values, which docs/judging.md judges at the common
  steps; a grad norm or learning rate that is gone altogether, since curves are judged on what they
  hold; values of steps that no other row shares.

``curves.run_folder`` does the same to a run folder of real torchtitan (``tests/samples``) that
carries no seal, so that what is damaged is really read. There a change of anything but times,
memory and names has to be seen: see ``RunFolder``.
"""

import itertools
import json
import math
import shutil

import curve_formats
import numpy as np
from curve_formats import CURVES, file_of
from fuzzing import JUDGING_CODES, called, damaged_bytes, only_json
from fuzzing import working_in as within
from stored_samples import copied

LIMITS = {
    "alone": {"loss": 1e-3, "grad_norm": 2e-2},
    "repeats": {"loss": 5e-2, "grad_norm": 1e-1},
    "tolerance": {"loss": 2e-2, "grad_norm": 2e-2},
}
"""Relative differences that must not pass, by what the comparison has beside the two curves:
repeats with noise of 1e-6, or ``--tolerance loss=0.01``. Well above what rounding to four decimals
and floors allow; less is for the tests of the judge."""
RATE_LIMIT = 1e-3
FORMATS = (*curve_formats.ALL, "run_folder")


def of_format(name):
    """The kind of fuzz cases of a format."""
    return RunFolder() if name == "run_folder" else Curves(curve_formats.ALL[name])


class Curves:
    def __init__(self, written):
        self._format = written

    def prepare(self, folder):
        return folder

    def run(self, case, _base):
        dice = case.dice
        rows = _curve(dice, self._format)
        control = self._format.write(case.folder / "control", rows)
        changed = _changed(case, rows)
        if changed == rows or not changed:
            test = case.folder / "test"
            shutil.copytree(case.folder / "control", test)
            test = test / control.relative_to(case.folder / "control")
        else:
            test = self._format.write(case.folder / "test", changed)
        meant = changed
        file = file_of(test)
        before = file.read_bytes()
        if changed == rows or dice.random() < 0.3:
            file.write_bytes(self._damaged(case, before))
        content = file.read_bytes()
        if self._format.read_back is not None:
            rows = self._format.read_back(file_of(control).read_bytes())
            meant = self._format.read_back(content)
        elif content != before:
            meant = None
        mode = dice.choice(("alone", "alone", "repeats", "tolerance"))
        relation = relate(rows, meant, LIMITS[mode])
        unchanged = content == file_of(control).read_bytes()
        sides = [control, test] if dice.random() < 0.75 else [test, control]
        more = self._more(case, mode, rows)
        if dice.random() < 0.03:
            more = [*more, "--out", "report"]
        case.do(f"{relation}, {mode}")
        with within(case.folder), only_json():
            inside = [path.relative_to(case.folder) for path in sides]
            ended = called(case, ("compare", *inside, *more), JUDGING_CODES)
        if relation == "differs":
            case.require(ended.code != 0, "PASS of a curve that differs")
        if relation == "same":
            case.require(ended.code != 1, "FAIL of a curve that is the same")
        if unchanged and mode == "alone":
            case.require(ended.code == 0, "no PASS of a curve against a copy of itself")

    def _damaged(self, case, content):
        dice = case.dice
        how = dice.choice(("none", "none", "crlf", "end", "mark", *["bytes"] * 6))
        if how == "bytes":
            for _ in range(dice.choice((1, 1, 1, 2, 5))):
                content, what = damaged_bytes(content, dice)
                case.do(what)
        elif self._format.read_back is not None:
            case.do(f"text: {how}")
            if how == "crlf":
                content = content.replace(b"\n", b"\r\n")
            elif how == "end":
                content = content.rstrip(b"\n") if dice.random() < 0.5 else content + b"\n\n"
            elif how == "mark":
                content = b"\xef\xbb\xbf" + content
        return content

    def _more(self, case, mode, rows):
        if mode == "tolerance":
            return ["--tolerance", "loss=0.01"]
        if mode == "alone":
            return []
        words = []
        for number in range(3):
            noisy = [
                (
                    step,
                    {
                        signal: value * (1 + 1e-6 * case.dice.gauss(0, 1))
                        if signal in CURVES
                        else value
                        for signal, value in values.items()
                    },
                )
                for step, values in rows
            ]
            path = self._format.write(case.folder / f"repeat{number}", noisy)
            words += ["--repeat", path.relative_to(case.folder)]
        return words


def _curve(dice, written):
    """A loss that falls, with the noise of a run, as somebody's logger would have it."""
    count = dice.randrange(12, 61)
    places = written.places or dice.choice((None, None, 4, 6))
    level, height, pace = dice.uniform(1, 4), dice.uniform(1, 8), dice.uniform(3, 30)
    rows = []
    for step in range(1, count + 1):
        values = {
            "loss": level + height * math.exp(-step / pace) + dice.gauss(0, 0.02),
            "grad_norm": 0.5 + 2 * math.exp(-step / pace) + abs(dice.gauss(0, 0.05)),
            "lr": 1e-3 * min(1.0, step / 10),
        }
        kept = {signal: values[signal] for signal in written.signals}
        if places is not None:
            kept |= {signal: round(kept[signal], places) for signal in CURVES}
        rows.append((step, kept))
    return rows


def _changed(case, rows):
    """The rows with none, one or two changes; each says what it did."""
    dice = case.dice
    for _ in range(dice.choice((0, 0, 1, 1, 1, 2))):
        rows = dice.choice(CHANGES)(case, list(rows)) or rows
    return rows


def _with(rows, at, **values):
    step, known = rows[at]
    rows[at] = (step, {**known, **{s: v for s, v in values.items() if s in known}})
    return rows


def _times(row, signal, factor):
    """A value off by a factor; one that another change has taken away stays away."""
    value = row[1][signal]
    return None if value is None else value * factor


def _change_of(dice):
    return dice.choice((-1, 1)) * 10 ** dice.uniform(-4, 0.5)


def _one_value(case, rows):
    at, signal = case.dice.randrange(len(rows)), case.dice.choice(CURVES)
    change = _change_of(case.dice)
    case.do(f"{signal} of row {at} off by {change:.2g}")
    return _with(rows, at, **{signal: _times(rows[at], signal, 1 + change)})


def _all_values(case, rows):
    signal, since = case.dice.choice(CURVES), case.dice.randrange(len(rows))
    change = _change_of(case.dice)
    case.do(f"{signal} off by {change:.2g} from row {since} on")
    for at in range(since, len(rows)):
        _with(rows, at, **{signal: _times(rows[at], signal, 1 + change)})
    return rows


def _not_finite(case, rows):
    value = case.dice.choice((math.nan, math.inf, -math.inf))
    signal, at = case.dice.choice(CURVES), case.dice.randrange(len(rows))
    until = len(rows) if case.dice.random() < 0.3 else at + 1
    case.do(f"{signal} is {value} from row {at} until {until}")
    for each in range(at, until):
        _with(rows, each, **{signal: value})
    return rows


def _hole(case, rows):
    signal, at = case.dice.choice(CURVES), case.dice.randrange(len(rows))
    case.do(f"no {signal} in row {at}")
    return _with(rows, at, **{signal: None})


def _dropped(case, rows):
    at, count = case.dice.randrange(len(rows)), case.dice.choice((1, 1, 2, 5))
    case.do(f"rows {at} to {at + count - 1} dropped")
    return rows[:at] + rows[at + count :]


def _cut(case, rows):
    at = case.dice.randrange(1, len(rows))
    first = case.dice.random() < 0.5
    case.do(f"{'first' if first else 'last'} rows dropped, at {at}")
    return rows[at:] if first else rows[:at]


def _twice(case, rows):
    at, to = case.dice.randrange(len(rows)), case.dice.randrange(len(rows))
    row = rows[at]
    if case.dice.random() < 0.6:
        factor = 1 + _change_of(case.dice)
        row = (row[0], {**row[1], "loss": row[1]["loss"] * factor})
    case.do(f"row {at} again at {to}: {row}")
    return [*rows[:to], row, *rows[to:]]


def _replayed(case, rows):
    at = case.dice.randrange(len(rows))
    back = case.dice.randrange(at + 1)
    case.do(f"rows {back} to {at} again: a restart")
    return rows[: at + 1] + rows[back:]


def _exchanged(case, rows):
    one, other = (case.dice.randrange(len(rows)) for _ in "ab")
    values = case.dice.random() < 0.5
    case.do(f"{'values' if values else 'rows'} {one} and {other} exchanged")
    if values:
        rows[one], rows[other] = (rows[one][0], rows[other][1]), (rows[other][0], rows[one][1])
    else:
        rows[one], rows[other] = rows[other], rows[one]
    return rows


def _moved(case, rows):
    by = case.dice.choice((-1, 1, 1, 10, 2**40))
    case.do(f"steps moved by {by}")
    return [(step + by, values) for step, values in rows]


def _thinned(case, rows):
    every = case.dice.choice((2, 3, 5))
    case.do(f"one step in {every}, and the first and the last")
    last = rows[-1][0]
    return [row for row in rows if row[0] % every == 0 or row[0] in (1, last)]


def _longer(case, rows):
    count = case.dice.choice((1, 3, len(rows)))
    case.do(f"{count} more rows")
    step, values = rows[-1]
    return rows + [(step + more, dict(values)) for more in range(1, count + 1)]


def _late(case, rows):
    case.do("values one step late")
    steps = [step for step, _ in rows]
    return list(zip(steps, [rows[0][1], *(values for _, values in rows[:-1])], strict=True))


def _rate(case, rows):
    at, value = case.dice.randrange(len(rows)), case.dice.choice((2.0, 1.1, 0.0, math.nan))
    if "lr" not in rows[at][1]:
        return None
    case.do(f"lr of row {at} times {value}")
    return _with(rows, at, lr=_times(rows[at], "lr", value))


def _odd_step(case, rows):
    at, step = case.dice.randrange(len(rows)), case.dice.choice((0, 10**6, 2**53, 2**62))
    case.do(f"row {at} is of step {step}")
    rows[at] = (step, rows[at][1])
    return rows


def _huge(case, rows):
    at, value = case.dice.randrange(len(rows)), case.dice.choice((1e308, -1e308, 1e-320, 0.0))
    signal = case.dice.choice(CURVES)
    case.do(f"{signal} of row {at} is {value}")
    return _with(rows, at, **{signal: value})


CHANGES = (
    *(_one_value, _one_value, _all_values, _not_finite, _hole, _dropped, _dropped, _cut, _twice),
    *(_replayed, _exchanged, _moved, _thinned, _longer, _late, _rate, _odd_step, _huge),
)


# --------------------------------------------------------------------- meaning


def relate(control, test, limits):
    """``same``, ``differs`` or ``open``: what the rows of a file mean beside the control's."""
    theirs = None if test is None else _settled(test)
    if theirs is None:
        return "differs"
    ours = _settled(control)
    if ours == theirs:
        return "same"
    steps, others = ([s for s in sorted(each) if "loss" in each[s]] for each in (ours, theirs))
    regular = _spacing(others)
    wrong = (
        not others
        or not all(_finite(values) for values in theirs.values())
        or 0 < sum("grad_norm" in theirs[step] for step in others) < len(others)
        or regular is None
        or (regular == 1 and steps != others)
        or any(_apart(ours[step], theirs[step], limits) for step in set(steps) & set(others))
    )
    return "differs" if wrong else "open"


def _settled(rows):
    """Step to its values, the last of each signal; None where one is there with two values."""
    found = {}
    for step, values in rows:
        if step < 0:
            return None
        here = found.setdefault(step, {})
        for signal, value in values.items():
            if value is None:
                continue
            if signal in here and here[signal] != value:
                return None
            here[signal] = value
    return {step: values for step, values in found.items() if values}


def _finite(values):
    return all(math.isfinite(value) for value in values.values())


def _spacing(steps):
    """Distance of a regular grid, where the first and the last may be shorter; None: holes."""
    pairs = list(itertools.pairwise(steps))
    gaps = [after - before for before, after in pairs]
    if gaps and steps[0] > 0 and all(after == 2 * before for before, after in pairs):
        return 2
    inner = gaps[1:-1] or gaps[1:] or gaps
    if not inner or len(set(inner)) > 1 or max(gaps) > inner[0]:
        return None
    return inner[0]


def _apart(ours, theirs, limits):
    for signal in set(ours) & set(theirs):
        limit = limits.get(signal, RATE_LIMIT)
        smaller = min(abs(ours[signal]), abs(theirs[signal]))
        if abs(ours[signal] - theirs[signal]) > limit * max(smaller, 1e-12):
            return True
    return False


# ------------------------------------------------------------------ run folder


class RunFolder:
    """A run folder of real torchtitan, damaged, against its control by a calibration of the time.

    Its evidence is read back by ``json`` and ``numpy``. **differs**: a file that cannot be read
    any more or is gone; a loss, norm, rate, count, digest or agreement of a step line that is off
    by more than ``LIMIT``; an array, a step or the end line gone. **open**: what nothing is judged
    by (times, memory), differences below the limit, other numbers in tensors, and what
    ``in_force.json`` and ``job.json`` say, of which much is free.
    """

    LIMIT = 5e-2
    JUDGED = ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed", "lr", "tokens")
    EXACT = ("batch_digest", "batch_agrees", "grads_missing")

    def prepare(self, folder):
        return copied("schema1", folder)

    def run(self, case, sample):
        dice = case.dice
        runs = {path.name.rpartition("-")[0]: path for path in (sample / "store/runs").iterdir()}
        test = case.folder / runs["ddp2"].name
        shutil.copytree(runs["ddp2"], test)
        files = sorted(path for path in test.rglob("*") if path.is_file())
        name = dice.choice(
            ["metrics.jsonl"] * 4 + [path.relative_to(test).as_posix() for path in files]
        )
        file = test / name
        before = file.read_bytes()
        case.do(f"damage {name}")
        how = dice.random()
        if how < 0.05:
            file.unlink()
        elif name == "metrics.jsonl" and how < 0.5:
            file.write_text(self._another_line(case, before.decode()))
        else:
            content, what = damaged_bytes(before, dice)
            case.do(what)
            file.write_bytes(content)
        relation = self._relation(name, before, file.read_bytes() if file.exists() else None)
        calibration = sample / "report" / "calibration.json"
        case.do(relation)
        with within(case.folder), only_json():
            arguments = ("compare", runs["fsdp2"], test.name, "--calibration", calibration)
            ended = called(case, arguments, JUDGING_CODES)
        if relation == "differs":
            case.require(ended.code != 0, "PASS of a run folder that differs")
        if relation == "same":
            case.require(ended.code == 0, "no PASS of a run folder that is the same")

    def _another_line(self, case, text):
        dice = case.dice
        lines = text.splitlines()
        at = dice.randrange(len(lines))
        how = dice.choice(("drop", "twice", "value", "value", "value", "exchange", "key"))
        case.do(f"{how} line {at}")
        if how == "drop":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "exchange":
            other = dice.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            line = json.loads(lines[at])
            key = dice.choice(list(line))
            case.do(f"key {key}")
            if how == "key":
                del line[key]
            elif isinstance(line[key], float):
                line[key] = dice.choice((line[key] * 1.1, "nan", "inf", None, -1.0, "x", []))
            else:
                line[key] = dice.choice((0, 1, None, "x", True, 10**30, [], {}, "nan"))
            lines[at] = json.dumps(line)
        return "".join(f"{line}\n" for line in lines)

    def _relation(self, name, before, after):
        if before == after:
            return "same"
        if name in ("job.json", "in_force.json", "record.json"):
            return "open"
        if after is None:
            return "differs"
        if name.endswith(".npz"):
            return self._of_arrays(before, after)
        return self._of_metrics(before, after)

    def _of_metrics(self, before, after):
        try:
            ours, theirs = (
                [curve_formats._json(line) for line in text.decode().split("\n") if line.strip()]
                for text in (before, after)
            )
            told, found = self._by_step(ours), self._by_step(theirs)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return "differs"
        if told.keys() != found.keys() or theirs[-1] != ours[-1]:
            return "differs"
        for step, line in told.items():
            if any(line[key] != found[step].get(key) for key in self.EXACT):
                return "differs"
            if any(self._off(line[key], found[step].get(key)) for key in self.JUDGED):
                return "differs"
        return "open"

    def _by_step(self, lines):
        steps = [line for line in lines if line["kind"] == "step"]
        by_step = {line["step"]: line for line in steps}
        if any(line != by_step[line["step"]] for line in steps):
            raise ValueError("a step twice, with two values")
        return by_step

    def _off(self, ours, theirs):
        if not isinstance(theirs, int | float) or isinstance(theirs, bool):
            return ours is not None
        return not abs(ours - theirs) <= self.LIMIT * abs(ours)

    def _of_arrays(self, before, after):
        import io

        try:
            ours, theirs = (
                dict(np.load(io.BytesIO(each), allow_pickle=False)) for each in (before, after)
            )
        except Exception:  # noqa: BLE001 - numpy and zipfile raise nearly anything
            return "differs"
        if ours.keys() - theirs.keys():
            return "differs"
        return "open"
