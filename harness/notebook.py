"""Reports and comparisons as pandas frames: ``load`` and ``compare`` of the package itself.

::

    import converge_harness as converge

    report = converge.load("reports/smoke")
    report.verdicts                       # one row per test set
    report.differences.query("signal == 'loss'")
    converge.compare("main.csv", "branch.csv", repeats=["main-2.csv"]).verdicts

Every column has a unit and a meaning: :data:`COLUMNS`, or ``report.columns`` as a frame.
"""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from converge_harness.errors import EvidenceError, StoreError, suggest
from converge_harness.judge import SignalSeries, calibrate, curve_difference
from converge_harness.matrix.compare import CurveQuestion, Given, compare_curves
from converge_harness.model import JUDGED_SIGNALS, Ask, Evidence
from converge_harness.readers import read_curves, read_table, same_path
from converge_harness.report.renderers.json_document import SCHEMA_VERSION, document
from converge_harness.report.renderers.npz_tables import FILE, Tables, read_npz, tables_of
from converge_harness.report.view.curves import Curve
from converge_harness.report.view.report_view import SIGNAL_TITLES

CurveLike = str | Path | pd.DataFrame | Mapping[str, Any]
"""A path of anything that ``converge compare`` reads, or columns in memory: ``step``, ``loss`` …"""
Curves = CurveLike | Sequence[CurveLike] | Mapping[str, CurveLike]


class FrameColumn(NamedTuple):
    """What stands in a column of a frame."""

    unit: str
    """Empty for texts, truth values and counts that name themselves."""
    meaning: str


_SET = FrameColumn("", "name of the test set")
_STEP = FrameColumn("optimizer steps", "from 1; 0 is before training")
_SIGNALS = {
    signal: FrameColumn(
        "nats per token" if "loss" in signal else "L2 norm", f"{title}, as the run left"
    )
    for signal, title in SIGNAL_TITLES.items()
}
COLUMNS: Mapping[str, Mapping[str, FrameColumn]] = {
    "verdicts": {
        "set": _SET,
        "verdict": FrameColumn("", "PASS, FAIL, INCONCLUSIVE, INVALID or ERROR"),
        "control": FrameColumn("", "name of the run that it was judged against"),
        "kind": FrameColumn("", "parallel, space_time, elastic or fault"),
        "ask": FrameColumn("", "what it had to show: same as the control, or no worse"),
        "cause_class": FrameColumn(
            "", "kind of bug that leaves such evidence; missing unless FAIL"
        ),
        "cause": FrameColumn("", "the likely cause in a sentence; empty on PASS"),
        "module": FrameColumn("", "module where the difference first appears; empty when unknown"),
        "first_wrong": FrameColumn(
            "", "what modules computed in the first batches: what of it is wrong first"
        ),
        "look_at": FrameColumn("", "place in code or config to look at first; empty when unknown"),
        "onset_step": FrameColumn(
            "optimizer steps", "first step outside a limit; missing without one"
        ),
        "next_command": FrameColumn("", "what to run next"),
        "degrees": FrameColumn("", "parallelism as people write it: FSDP 2 x TP 2"),
        "world_size": FrameColumn("ranks", "processes of the run"),
        "loss_only": FrameColumn("", "whether a gate on the loss alone (1%) would have passed it"),
    },
    "checks": {
        "set": _SET,
        "check": FrameColumn("", "name of the check"),
        "title": FrameColumn("", "what it asks, in a sentence"),
        "tier": FrameColumn("", "integrity, exactness, envelope, trend, equivalence …"),
        "outcome": FrameColumn("", "PASS, FAIL, SKIPPED, INCONCLUSIVE, INVALID"),
        "measured": FrameColumn("see unit", "the measured value; NaN where there is none"),
        "limit": FrameColumn("see unit", "largest value that passes; NaN where there is none"),
        "unit": FrameColumn("", "unit of measured and limit; empty for a relative difference"),
        "limit_origin": FrameColumn("", "where the limit comes from"),
        "first_step": FrameColumn("optimizer steps", "first step that was looked at"),
        "last_step": FrameColumn("optimizer steps", "last step that was looked at"),
        "onset_step": FrameColumn("optimizer steps", "first step outside the limit"),
        "detail": FrameColumn("", "what was found, in a sentence"),
    },
    "runs": {
        "run": FrameColumn("", "name of the run"),
        "role": FrameColumn(
            "", "control, anchor, test, repeat, reference, matched control, other seed"
        ),
        "of": FrameColumn("", "control that it is judged against or repeats; empty for none"),
        "degrees": FrameColumn("", "parallelism as people write it"),
        "world_size": FrameColumn("ranks", "processes of the run"),
        "techniques": FrameColumn(
            "", "techniques, pipeline schedule, CP rotation; comma-separated"
        ),
        "toolchain": FrameColumn("", "the environment that trained it"),
        "tokens_per_step": FrameColumn("tokens", "valid tokens of an optimizer step, all ranks"),
        "wall_s": FrameColumn("seconds", "wall time of the run; NaN when not known"),
        "reused": FrameColumn("", "whether a finished run of the same identity was taken"),
        "source": FrameColumn("", "where its evidence was read from"),
    },
    "curves": {"run": FrameColumn("", "name of the run"), "step": _STEP, **_SIGNALS},
    "differences": {
        "set": _SET,
        "signal": FrameColumn("", f"one of {', '.join(SIGNAL_TITLES)}"),
        "step": _STEP,
        "difference": FrameColumn(
            "relative", "(test - control) / min(|test|, |control|); not finite where one of them is"
        ),
        "ratio": FrameColumn("relative", "test / control"),
        "limit": FrameColumn(
            "relative", "largest magnitude of the difference that passes; NaN: open"
        ),
    },
    "parameters": {
        "set": _SET,
        "step": _STEP,
        "parameter": FrameColumn("", "canonical name of the parameter"),
        "gradient_norm": FrameColumn("L2 norm", "of the test set's gradient"),
        "control_gradient_norm": FrameColumn("L2 norm", "of the control's gradient"),
        "weights": FrameColumn("relative", "difference of the initial weights; step 0 only"),
        "weights_limit": FrameColumn("relative", "largest value of it that passes"),
        "gradient": FrameColumn("relative", "|test - control| / min(|test|, |control|), L2 norms"),
        "gradient_limit": FrameColumn("relative", "largest value of it that passes"),
        "update": FrameColumn(
            "relative",
            "L2 norm of the difference of both changes since the sample before, over the control's",
        ),
        "update_limit": FrameColumn("relative", "largest value of it that passes"),
    },
}
"""Frame to its columns, in their order. Relative differences have no unit: 0.01 is 1%."""


@dataclass(frozen=True, eq=False)
class Report:
    """A judged matrix or comparison. Its frames are made when they are first asked for.

    ``frame.attrs["columns"]`` has each frame's part of :data:`COLUMNS`.
    """

    document: Mapping[str, Any]
    """``report.json`` as it is (``harness/report/report.schema.json``)."""
    _tables: Tables | None
    _missing: str = ""
    """Why there are no tables, and what to do."""

    @property
    def verdict(self) -> str:
        """The worst verdict of all test sets."""
        return str(self.document.get("verdict", ""))

    @property
    def headline(self) -> str:
        """One sentence that answers the question."""
        return str(self.document.get("headline", ""))

    @functools.cached_property
    def columns(self) -> pd.DataFrame:
        """Every column of every frame: ``frame column unit meaning``."""
        rows = [
            (frame, name, column.unit, column.meaning)
            for frame, columns in COLUMNS.items()
            for name, column in columns.items()
        ]
        return pd.DataFrame(rows, columns=["frame", "column", "unit", "meaning"])

    @functools.cached_property
    def verdicts(self) -> pd.DataFrame:
        """One row per test set: its verdict and what to look at."""
        return _frame(
            "verdicts",
            [
                {
                    **test,
                    "set": test["name"],
                    "loss_only": (test.get("loss_only_gate") or {}).get("passes"),
                }
                for test in self.document["tests"]
            ],
        )

    @functools.cached_property
    def checks(self) -> pd.DataFrame:
        """One row per test set and check, in the order of the report."""
        return _frame(
            "checks",
            [
                {
                    **check,
                    "set": test["name"],
                    "check": check["name"],
                    "first_step": (check["steps"] or [None])[0],
                    "last_step": (check["steps"] or [None])[-1],
                }
                for test in self.document["tests"]
                for check in test["checks"]
            ],
        )

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """One row per run: controls, test sets, repeats and what stands beside them."""
        every = self.document
        anchor = every.get("anchor")
        listed = [
            *({**run, "role": "control"} for run in every.get("controls", ())),
            *([{**anchor, "role": "anchor"}] if anchor else []),
            *({**run, "role": "test", "of": run.get("control")} for run in every["tests"]),
            *({**run, "role": "repeat", "of": run["control"]} for run in every.get("repeats", ())),
            *every.get("besides", ()),
        ]
        named: dict[str, dict[str, Any]] = {}
        for run in listed:  # a control that an anchor challenges is a test set as well
            words = {"run": run["name"], "techniques": ", ".join(run.get("techniques", ()))}
            named.setdefault(run["name"], {"of": "", **run, **words})
        return _frame("runs", list(named.values()))

    @functools.cached_property
    def curves(self) -> pd.DataFrame:
        """One row per run and step, a column per signal; NaN where a run left none, or NaN."""
        tables = self._numbers()
        return _documented(
            "curves",
            {
                "run": _texts(tables, "curves.run"),
                "step": tables["curves.step"],
                **{signal: tables[f"curves.{signal}"] for signal in SIGNAL_TITLES},
            },
        )

    @functools.cached_property
    def differences(self) -> pd.DataFrame:
        """One row per test set, signal and step that it shares with its control.

        Sets that are judged over seeds are left out: their runs share no step's data.
        """
        tables = self._numbers()
        names = tables["names"].tolist()
        curves = _by_run(tables, names)
        allowed = _limits(tables, names)
        parts = []
        for test in self.document["tests"]:
            ours, theirs = curves.get(test["name"]), curves.get(test["control"])
            if ours is None or theirs is None or "same-data" in test.get("not_asked", ()):
                continue
            for signal in SIGNAL_TITLES:
                known = allowed.get((test["name"], signal), {})
                part = _compared(ours[signal], theirs[signal], known)
                rows = part["step"].size
                texts = {"set": test["name"], "signal": signal}
                parts.append(
                    {**part, **{key: np.full(rows, text, object) for key, text in texts.items()}}
                )
        columns = COLUMNS["differences"]
        joined: dict[str, Any] = {
            name: np.concatenate([part[name] for part in parts]) if parts else []
            for name in columns
        }
        return _documented("differences", joined)

    @functools.cached_property
    def parameters(self) -> pd.DataFrame:
        """One row per test set, sampled step and parameter; empty for curves without samples."""
        tables = self._numbers()
        texts = {"set", "parameter"}
        return _documented(
            "parameters",
            {
                name: _texts(tables, f"parameters.{name}")
                if name in texts
                else tables[f"parameters.{name}"]
                for name in COLUMNS["parameters"]
            },
        )

    def _numbers(self) -> Tables:
        if self._tables is None:
            raise EvidenceError(self._missing)
        return self._tables

    def __repr__(self) -> str:
        return (
            f"{self.headline}\n{self.verdicts[['set', 'verdict', 'cause']].to_string(index=False)}"
        )

    def _repr_html_(self) -> str:
        table = self.verdicts[["set", "verdict", "cause", "onset_step"]].to_html(index=False)
        return f"<p><b>{html.escape(self.headline)}</b></p>{table}"


def load(folder: str | Path) -> Report:
    """The report in a folder that ``converge run``, ``report`` or ``compare --out`` wrote.

    Its frames: ``verdicts``, ``checks``, ``runs``, ``curves``, ``differences``, ``parameters``;
    ``columns`` explains them, with units. Needs nothing but the folder: no store, no torch.

    Raises:
        StoreError: the folder or its ``report.json`` is missing or damaged.
        EvidenceError: (by a frame) the folder is of a version that left no ``report.npz``.
    """
    folder = Path(folder)
    path = folder / "report.json"
    if not path.is_file():
        there = f"has no {path.name}" if folder.is_dir() else "does not exist"
        raise StoreError(
            f"{folder}: {there}, so it is no folder of reports"
            f"{_found_near(folder)}; write one with: converge run EXPERIMENT.toml --out {folder}"
        )
    again = f"converge report {folder}"
    read = _read(path, again)
    try:
        return Report(read, read_npz(folder / FILE))
    except FileNotFoundError:
        missing = (
            f"{folder}: has no {FILE}, which holds curves and parameters: an earlier version of "
            f"converge wrote it; add it with: {again}"
        )
        return Report(read, None, missing)


def _read(path: Path, again: str) -> dict[str, Any]:
    """A ``report.json``; raises StoreError for what is none."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; write it with: {again}") from error
    version = read.get("schema_version") if isinstance(read, dict) else None
    if version != SCHEMA_VERSION or not isinstance(read.get("tests"), list):
        raise StoreError(
            f"{path}: is no report of this version of converge (schema {version!r}, not "
            f"{SCHEMA_VERSION}); write it with: {again}"
        )
    return dict(read)


def _found_near(folder: Path) -> str:
    """Folders of reports that may have been meant."""
    around = folder if folder.is_dir() else folder.parent
    found = sorted(str(path.parent) for path in around.glob("*/report.json"))
    return f" ({suggest(str(folder), found)})" if found else ""


def compare(
    control: CurveLike,
    test: Curves,
    repeats: Iterable[CurveLike] = (),
    *,
    columns: Mapping[str, str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    margin: float | None = None,
    ask: str | None = None,
    since: int | None = None,
    without: Collection[str] = (),
    count_from_1: bool = False,
) -> Report:
    """Judge curves as ``converge compare`` does, and return the same frames as :func:`load`.

    Args:
        control: what is believed right: a path of a run folder or of any curve that ``converge
            compare`` reads, a frame, or a dict of equally long columns. A frame has its steps in
            a column or in its index. NaN in it is a value that the run had, as of a loss that
            diverged; None and ``pandas.NA`` are holes.
        test: what is judged against it, one or several; a dict of curves names them.
        repeats: other runs of the control, from which limits are learnt.
        columns: ``step`` and signals, to the names that they have in the curves.
        tolerances: signal to the largest relative difference that is allowed at any step.
        margin: largest relative difference of the mean loss that counts as equivalent.
        ask: ``"same"`` (the default) or ``"no worse"``.
        since: leave out the steps before it.
        without: signals of curves to leave out, such as ``["grad_norm"]``.
        count_from_1: add 1 to every step of a curve that begins at step 0.

    Raises:
        EvidenceError: a curve cannot be read or understood, or one is given twice.
        StoreError: a run folder is damaged.
    """
    tests = _named(test)
    repeated = list(repeats)
    _require_apart(control, tests, repeated)
    for signal in tolerances or {}:
        if signal not in JUDGED_SIGNALS:
            raise EvidenceError(
                f"tolerances: there is no signal {signal!r}; {suggest(signal, JUDGED_SIGNALS)}"
            )
    read = functools.partial(
        _evidence, columns=columns or {}, since=since, without=without, count_from_1=count_from_1
    )
    believed = read(control, "control")
    taught = [read(each, f"repeat {number}") for number, each in enumerate(repeated, 1)]
    given = tuple(_given(tests, believed, read))
    runs = (believed, *(each.evidence for each in given))
    known = {name for run in runs for name in (*run.signals, *run.unread)}
    for signal in without:
        if signal not in known:
            raise EvidenceError(
                f"without: no curve has {signal!r}; {suggest(signal, sorted(known))}"
            )
    calibration = calibrate(believed, taught) if taught else None
    question = CurveQuestion(Ask(ask) if ask else None, margin, dict(tolerances or {}))
    judged = compare_curves(Given(believed, _path_of(control)), given, question, calibration)
    return Report(document(judged.view), tables_of(judged.view))


def _named(
    test: Curves,
) -> list[tuple[str, Any]]:
    """Curves to judge, each with the name that it was given; empty: none."""
    if isinstance(test, str | Path | pd.DataFrame):
        return [("", test)]
    if isinstance(test, Mapping):
        curves = all(
            isinstance(each, str | Path | pd.DataFrame | Mapping) for each in test.values()
        )
        return [(str(name), each) for name, each in test.items()] if curves else [("", test)]
    return [("", each) for each in test]


def _evidence(
    curve: CurveLike,
    name: str,
    columns: Mapping[str, str],
    since: int | None,
    without: Collection[str],
    *,
    count_from_1: bool,
) -> Evidence:
    if isinstance(curve, str | Path):
        return read_curves(
            Path(curve), columns, since=since, without=without, count_from_1=count_from_1
        )
    if isinstance(curve, pd.DataFrame) and curve.index.name is not None:
        curve = curve.reset_index()
    columns_of = {str(key): list(values) for key, values in curve.items()}
    read = read_table(name, columns_of, columns, since=since, count_from_1=count_from_1)
    return read.without(without)


def _require_apart(
    control: CurveLike, tests: list[tuple[str, Any]], repeats: list[CurveLike]
) -> None:
    """Raise EvidenceError for a repeat that is what it judges, or is given twice.

    A test set that teaches its own limits is inside of them, whatever it did.
    """
    judged = [control, *(each for _, each in tests)]
    for number, repeat in enumerate(repeats):
        if any(_same(repeat, each) for each in judged):
            raise EvidenceError(
                f"repeats[{number}]: is the control or a test set itself; give another run of the "
                "control, made for this"
            )
        if any(_same(repeat, each) for each in repeats[:number]):
            raise EvidenceError(f"repeats[{number}]: is given twice; each repeat counts once")


def _same(some: CurveLike, other: CurveLike) -> bool:
    if isinstance(some, str | Path) and isinstance(other, str | Path):
        return same_path(Path(some), Path(other))
    return some is other


def _given(
    tests: Iterable[tuple[str, CurveLike]],
    control: Evidence,
    read: Callable[[CurveLike, str], Evidence],
) -> Iterator[Given]:
    taken = {control.name}
    for name, curve in tests:
        evidence = read(curve, name or _free("test", taken))
        evidence = replace(evidence, name=_free(name or evidence.name, taken))
        taken.add(evidence.name)
        yield Given(evidence, _path_of(curve))


def _path_of(curve: CurveLike) -> Path | None:
    return Path(curve) if isinstance(curve, str | Path) else None


def _free(name: str, taken: Collection[str]) -> str:
    """A name that no other run has."""
    names = (name, *(f"{name} {number}" for number in range(2, len(taken) + 3)))
    return next(each for each in names if each not in taken)


# ---------------------------------------------------------------------- frames


_COUNTS = {"onset_step", "world_size", "tokens_per_step", "first_step", "last_step"}
_MEASURED = {"measured", "limit", "wall_s"}
_TRUTHS = {"loss_only", "reused"}


def _frame(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of a JSON document to a frame of the columns that are documented."""
    columns: dict[str, Any] = {}
    for column in COLUMNS[name]:
        values = [row.get(column) for row in rows]
        if column in _COUNTS:
            columns[column] = pd.array(values, dtype="Int64")
        elif column in _TRUTHS:
            columns[column] = pd.array(values, dtype="boolean")
        elif column in _MEASURED:  # JSON has "nan" and "inf" as texts
            columns[column] = [np.nan if value is None else float(value) for value in values]
        else:
            columns[column] = pd.array(values, dtype=object)
    return _documented(name, columns)


def _documented(name: str, columns: Mapping[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame(dict(columns))
    frame.attrs["columns"] = {key: column._asdict() for key, column in COLUMNS[name].items()}
    return frame


def _texts(tables: Tables, name: str) -> pd.Categorical:
    """A column of places in ``names`` as texts, in the order of their first appearance."""
    places = tables[name]
    used, codes = np.unique(places, return_inverse=True)
    return pd.Categorical.from_codes(
        codes, categories=pd.Index(tables["names"][used], dtype=object)
    )


def _compared(test: Curve, control: Curve, limit: Mapping[int, float]) -> dict[str, Any]:
    """Difference, ratio and limit at the steps that two curves share."""
    found = curve_difference(
        SignalSeries(test.steps, test.values),
        SignalSeries(control.steps, control.values),
    )
    allowed = np.array([limit.get(step, np.nan) for step in found.steps.tolist()], np.float64)
    return {
        "step": found.steps,
        "difference": found.difference,
        "ratio": found.ratio,
        "limit": allowed,
    }


def _by_run(tables: Tables, names: list[str]) -> dict[str, dict[str, Curve]]:
    found: dict[str, dict[str, Curve]] = {}
    runs = tables["curves.run"]
    for place in np.unique(runs).tolist():
        rows = runs == place
        curves = {}
        for signal in SIGNAL_TITLES:
            values, steps = tables[f"curves.{signal}"][rows], tables["curves.step"][rows]
            curves[signal] = Curve(steps, values) if not np.isnan(values).all() else Curve()
        found[names[place]] = curves
    return found


def _limits(tables: Tables, names: list[str]) -> dict[tuple[str, str], dict[int, float]]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    rows = zip(
        *(tables[f"limits.{name}"].tolist() for name in ("set", "signal", "step", "limit")),
        strict=True,
    )
    for place, signal, step, limit in rows:
        found.setdefault((names[place], names[signal]), {})[step] = limit
    return found
