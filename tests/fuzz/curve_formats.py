"""Curves written in every format that ``converge compare`` reads, and read back.

A curve is a list of rows, a row a step and what was logged at it: ``(3, {"loss": 2.5})``. What is
read back is read by a few lines of plain Python here, not by the readers under test: it says what a
damaged file still means. None: it cannot be read, and so means nothing. The two binary formats have
a checksum over every record: a damaged byte makes the file unreadable.
"""

import csv
import io
import json
import math
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

SIGNALS = ("loss", "grad_norm", "lr")
CURVES = SIGNALS[:2]


@dataclass(frozen=True)
class Format:
    write: Callable
    """(folder, rows) to the path that is given to ``converge compare``."""
    read_back: Callable | None
    """Bytes to rows, or None; no function: the format has checksums."""
    signals: tuple[str, ...] = SIGNALS
    places: int | None = None
    """Decimals that the format prints; None: all."""


def file_of(path):
    """The one file at or below a path."""
    if path.is_file():
        return path
    (file,) = (each for each in path.rglob("*") if each.is_file())
    return file


def _saved(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _spelt(value):
    return "" if value is None else repr(value)


def _number(cell):
    return None if not cell.strip() else float(cell)


def _text(content):
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def _rows(found):
    """Rows of read values; raises ValueError for a step that is none."""
    rows = []
    for step, values in found:
        number = float(step)
        if not (math.isfinite(number) and number == int(number) and 0 <= number < 2**63):
            raise ValueError(step)
        rows.append((int(number), values))
    return rows


def _lenient(read):
    def tried(content):
        try:
            return read(content) or None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, csv.Error):
            return None
        except RecursionError:
            return None

    return tried


# ---------------------------------------------------------------------- tables


def _table(suffix, separator, names):
    def write(folder, rows):
        lines = [separator.join(names)]
        for step, values in rows:
            cells = [step, *(_spelt(values.get(signal)) for signal in SIGNALS)]
            lines.append(separator.join(map(str, cells)))
        return _saved(folder / f"curve{suffix}", "\n".join(lines) + "\n")

    def read(content):
        reader = csv.DictReader(io.StringIO(_text(content)), delimiter=separator, strict=True)
        known = dict(zip(names, ("step", *SIGNALS), strict=True))
        found = []
        for cells in reader:
            if None in cells or None in cells.values():
                return None
            row = {
                known[name.strip()]: cell for name, cell in cells.items() if name.strip() in known
            }
            step = row.pop("step")
            found.append((step, {signal: _number(cell) for signal, cell in row.items()}))
        return _rows(found)

    return Format(write, _lenient(read))


# ------------------------------------------------------------------------ JSON


def _unique(pairs):
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError(keys)
    return dict(pairs)


def _json(text):
    return json.loads(text, object_pairs_hook=_unique)


def _json_number(value):
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def _json_rows(entries, names):
    found = []
    for entry in entries:
        values = {signal: _json_number(entry[n]) for signal, n in names.items() if n in entry}
        if set(values) & set(CURVES):
            found.append((entry["step"], values))
    return _rows(found)


def _write_jsonl(folder, rows):
    lines = [json.dumps({"step": step, **values}) for step, values in rows]
    return _saved(folder / "curve.jsonl", "\n".join(lines) + "\n")


def _read_jsonl(content):
    lines = [line for line in _text(content).split("\n") if line.strip()]
    return _json_rows(map(_json, lines), {signal: signal for signal in SIGNALS})


_OF_TRAINER = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}


def _write_trainer_state(folder, rows):
    history = [
        {
            "epoch": step / 100,
            **{_OF_TRAINER[signal]: value for signal, value in values.items()},
            "step": step,
        }
        for step, values in rows
    ]
    history.append({"epoch": 1.0, "step": rows[-1][0], "train_runtime": 12.5, "train_loss": 2.0})
    state = {"best_metric": None, "global_step": rows[-1][0], "log_history": history}
    return _saved(folder / "trained" / "trainer_state.json", json.dumps(state, indent=2)).parent


def _read_trainer_state(content):
    entries = [entry for entry in _json(_text(content))["log_history"] if "loss" in entry]
    return _json_rows(entries, _OF_TRAINER)


_OF_GOLDEN = {"loss": "lm loss", "grad_norm": "grad-norm"}


def _write_golden(folder, rows, *, listed):
    document = {}
    for signal, name in _OF_GOLDEN.items():
        values = [(step, _golden_value(each.get(signal))) for step, each in rows]
        document[name] = {
            "start_step": rows[0][0],
            "end_step": rows[-1][0],
            "step_interval": 1,
            "values": [value for _, value in values] if listed else dict(values),
        }
    return _saved(folder / "golden_values.json", json.dumps(document))


def _golden_value(value):
    return "nan" if value is None or not math.isfinite(value) else round(value, 5)


def _read_golden(content):
    found = {}
    document = _json(_text(content))
    for signal, name in _OF_GOLDEN.items():
        entry = document.get(name)
        if entry is None:
            continue
        values = entry["values"]
        if isinstance(values, list):
            start = entry["start_step"] or 1
            steps = [start + at * entry["step_interval"] for at in range(len(values))]
            values = dict(zip(steps, values, strict=True))
        for step, value in values.items():
            found.setdefault(step, {})[signal] = _json_number(value)
    return _rows(found.items())


# ------------------------------------------------------------------------ text


def _write_console(folder, rows):
    lines = ["[rank0]:[titan] 2026-11-01 10:00:00,000 - root - INFO - Training starts at step 1"]
    for step, values in rows:
        loss, norm = (math.nan if values.get(each) is None else values[each] for each in CURVES)
        lines.append(
            f"[rank0]:[titan] 2026-11-01 10:00:{step % 60:02},000 - root - INFO - step: {step:2}  "
            f"loss: {loss:8.5f}  grad_norm: {norm:7.4f}  memory:  1.20GiB(1.52%)  tps: 10,000"
        )
    return _saved(folder / "console.log", "\n".join(lines) + "\n")


def _read_console(content):
    line = re.compile(r"(?<!validate )step:\s*(\d+)\s+loss:\s*(\S+)\s+grad_norm:\s*(\S+)")
    found = line.findall(re.sub(r"\x1b\[[0-9;]*m", "", _text(content)))
    return _rows(
        (step, {"loss": float(loss.replace(",", "")), "grad_norm": float(norm.replace(",", ""))})
        for step, loss, norm in found
    )


def _write_megatron_console(folder, rows):
    lines = ["using world size: 8, data-parallel size: 2"]
    for step, values in rows:
        loss, norm = (math.nan if values.get(each) is None else values[each] for each in CURVES)
        printed = f" lm loss: {loss:.6E} |" if loss >= 0 else ""
        lines.append(
            f" [2026-11-01 10:00:{step % 60:02}.250000] iteration {step:8d}/{1000:8d} |"
            f" consumed samples: {step * 8:12d} | global batch size: {8:5d} |{printed}"
            f" loss scale: 1.0 | grad norm: {norm:.3f} | number of skipped iterations: {0:3d} |"
            f" number of nan iterations: {0:3d} |"
        )
    return _saved(folder / "megatron.log", "\n".join(lines) + "\n")


def _read_megatron_console(content):
    line = re.compile(r"iteration +(\d+)/ *\d+ *\|(.*)number of nan iterations: +(\d+) *\|")
    found = line.findall(_text(content))
    rows = []
    for step, middle, nans in found:
        cells = dict(cell.split(": ", 1) for cell in middle.split("|") if ": " in cell)
        values = {name.strip(): value for name, value in cells.items()}
        loss = "nan" if int(nans) else values.get("lm loss", "nan")
        rows.append((step, {"loss": float(loss), "grad_norm": float(values["grad norm"])}))
    return _rows(rows)


def _write_loss_text(folder, rows):
    lines = ["# step loss grad_norm"]
    for step, values in rows:
        loss, norm = (values.get(each) for each in CURVES)
        lines.append(" ".join(str(each) for each in (step, loss, norm) if each is not None))
    return _saved(folder / "losses.txt", "\n".join(lines) + "\n")


def _read_loss_text(content):
    lines = [line.split() for line in _text(content).split("\n")]
    if any(cells and cells[0][0] == "#" for cells in lines[1:]):
        return None
    rows = [cells for cells in lines if cells and cells[0][0] != "#"]
    if any(len(cells) != len(rows[0]) or len(cells) not in (2, 3) for cells in rows):
        return None
    return _rows(
        (step, dict(zip(CURVES, map(float, cells), strict=False))) for step, *cells in rows
    )


# --------------------------------------------------------------------- binary

_TAGS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm", "lr": "lr"}


def _write_tensorboard(folder, rows):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = folder / "tb" / "events.out.tfevents.1790000000.host"
    path.parent.mkdir(parents=True)
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for at, (step, values) in enumerate(rows):
            points = [
                Summary.Value(tag=_TAGS[signal], simple_value=value)
                for signal, value in values.items()
                if value is not None
            ]
            event = Event(wall_time=2.0 + at, step=step, summary=Summary(value=points))
            writer.write(event.SerializeToString())
    return path.parent


def _write_wandb(folder, rows):
    """The log as LevelDB describes it, in blocks of 32 KiB; a curve here fills less than one."""
    from wandb.proto.wandb_internal_pb2 import (
        HistoryItem,
        HistoryRecord,
        Record,
        RunExitRecord,
    )

    records = []
    for step, values in rows:
        logged = {"_step": step, **{signal: values[signal] for signal in values}}
        items = [
            HistoryItem(key=name, value_json=json.dumps(value))
            for name, value in logged.items()
            if value is not None
        ]
        records.append(Record(history=HistoryRecord(item=items)))
    records.append(Record(exit=RunExitRecord(exit_code=0)))
    content = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    for record in records:
        part, whole = record.SerializeToString(), 1
        content += struct.pack("<IHB", zlib.crc32(bytes([whole]) + part), len(part), whole) + part
    if len(content) > 1 << 15:
        raise ValueError("a curve of more than one block")
    path = folder / "run-abc.wandb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


ALL = {
    "csv": _table(".csv", ",", ("step", "loss", "grad_norm", "lr")),
    "tsv": _table(".tsv", "\t", ("iteration", "train/loss", "grad-norm", "learning_rate")),
    "jsonl": Format(_write_jsonl, _lenient(_read_jsonl)),
    "trainer_state": Format(_write_trainer_state, _lenient(_read_trainer_state)),
    "golden_mapping": Format(
        lambda folder, rows: _write_golden(folder, rows, listed=False),
        _lenient(_read_golden),
        CURVES,
        5,
    ),
    "golden_list": Format(
        lambda folder, rows: _write_golden(folder, rows, listed=True),
        _lenient(_read_golden),
        CURVES,
        5,
    ),
    "console": Format(_write_console, _lenient(_read_console), CURVES, 4),
    "megatron_console": Format(
        _write_megatron_console, _lenient(_read_megatron_console), CURVES, 3
    ),
    "loss_text": Format(_write_loss_text, _lenient(_read_loss_text), CURVES),
    "tensorboard": Format(_write_tensorboard, None),
    "wandb": Format(_write_wandb, None),
}
