"""Combines the ``report.json`` of all matrices: bugs, ladders, correct set-ups, cost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converge_harness.model import CauseClass, Judgement
from proof.catalogue import Catalogue
from proof.curves import Curve, largest_difference, read_curve
from proof.docstrings import CLASSES
from proof.grading import Answer, Graded, read_answer
from proof.parts import LeftOut
from proof.regimes import Regime
from proof.rules import RULES

EARLY = 2
"""A bug is caught early if it is caught by this step."""
_RUNG = re.compile(r"(.+?)_\d+(?:_\d+)?e_?\d+")


@dataclass(frozen=True, slots=True)
class Run:
    """What a set is, and what it cost."""

    matrix: str
    what: str
    """Degrees and techniques, for a person."""
    steps: int
    """Number of finished steps."""
    rank_seconds: float
    """Ranks times wall seconds, start-up included."""
    flagged_by: tuple[str, ...]
    """Names of the other projects' rules that call it broken."""
    loss_off: float | None = None
    """The largest relative difference of a reported loss to the control's; None without losses in
    common.
    """


@dataclass(frozen=True, slots=True)
class ProvenBug:
    graded: Graded
    run: Run


@dataclass(frozen=True, slots=True)
class ProvenCorrect:
    answer: Answer
    run: Run

    @property
    def false_alarm(self) -> bool:
        return self.answer.judgement not in (Judgement.PASS, Judgement.ERROR)


@dataclass(frozen=True, slots=True)
class Ladder:
    """One bug at several magnitudes."""

    name: str
    rungs: tuple[ProvenBug, ...]
    """Largest magnitude first."""

    @property
    def limit(self) -> float | None:
        """The smallest magnitude caught, as are all larger ones; None: not even the largest."""
        limit = None
        for rung in self.rungs:
            if not rung.graded.answer.caught:
                break
            limit = rung.graded.bug.magnitude
        return limit


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of all runs; controls and repeats, which many sets share, count once."""

    runs: int
    rank_seconds: float
    shared_rank_seconds: float
    """Of controls and repeats only."""


@dataclass(frozen=True, slots=True)
class RuleScore:
    name: str
    source: str
    bugs_caught: int
    false_alarms: int


OURS = "converge"
"""Its name among the rules."""


WORST = 5
"""How many misses are described in detail."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Everything that was measured."""

    bugs: tuple[ProvenBug, ...]
    ladders: tuple[Ladder, ...]
    correct: tuple[ProvenCorrect, ...]
    cost: Cost
    versions: Mapping[str, str]

    @property
    def classes(self) -> tuple[str, ...]:
        """Classes that have bugs, in order."""
        present = {each.graded.bug.kind for each in self.bugs}
        return tuple(kind for kind in CLASSES if kind in present)

    def of(self, kind: str) -> tuple[ProvenBug, ...]:
        return tuple(each for each in self.bugs if each.graded.bug.kind == kind)

    @property
    def misses(self) -> tuple[ProvenBug, ...]:
        """Bugs that were not caught or whose cause is not right, worst first.

        First missed bugs by size of their effect, then wrong causes, then missing causes, and last
        missed bugs whose effect is below rounding.
        """
        missed = [each for each in self.bugs if each.graded.cause_right is not True]
        return tuple(sorted(missed, key=_badness))

    @property
    def troubles(self) -> tuple[str, ...]:
        """Sets without a meaningful result: they crashed, or their evidence is incomplete."""
        rungs = [rung for ladder in self.ladders for rung in ladder.rungs]
        answers = [each.graded.answer for each in (*self.bugs, *rungs)]
        answers += [each.answer for each in self.correct if each.answer.judgement is _ERROR]
        return tuple(trouble for answer in answers if (trouble := _trouble(answer)))

    @property
    def scores(self) -> tuple[RuleScore, ...]:
        """The score of converge first, then of the other projects' rules, on the same runs."""
        ours = RuleScore(
            OURS,
            "this harness",
            sum(each.graded.answer.caught for each in self.bugs),
            sum(each.false_alarm for each in self.correct),
        )
        return (
            ours,
            *(
                RuleScore(
                    rule.name,
                    rule.source,
                    sum(rule.name in each.run.flagged_by for each in self.bugs),
                    sum(rule.name in each.run.flagged_by for each in self.correct),
                )
                for rule in RULES
            ),
        )


def _badness(proven: ProvenBug) -> tuple[int, str, float]:
    graded = proven.graded
    if not graded.answer.caught:
        # An unknown effect counts as worse than any number.
        effect = graded.answer.effect.error if graded.answer.effect else float("inf")
        return 3 if graded.below_rounding else 0, graded.bug.kind, -effect
    return 1 if graded.cause_right is False else 2, graded.bug.kind, 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one regime."""

    regime: Regime
    proof: Proof
    held_out: Proof | None = None
    """Bugs that converge was not developed with; they do not count towards goals."""
    left_out: tuple[LeftOut, ...] = ()
    """What cannot run in the regime."""
    seconds: float = 0.0
    """Wall time of this call; runs that were already in the store take none."""


_ERROR = Judgement.ERROR


def _trouble(answer: Answer) -> str:
    if answer.judgement is _ERROR:
        return f"{answer.name} did not run: {answer.error or answer.cause}"
    if answer.judgement is Judgement.INVALID and not answer.caught:
        return f"{answer.name} cannot be judged: {answer.cause}"
    # A trainer stops when numbers are not finite; any other crash is the injection's fault.
    if answer.error and answer.cause_class is not CauseClass.NOT_FINITE:
        return f"{answer.name} failed and then crashed: {answer.error}"
    return ""


def collect(catalogue: Catalogue, reports: Mapping[str, Mapping[str, Any]]) -> Proof:
    """Join the catalogue with converge's results.

    Args:
        catalogue: what was selected.
        reports: parsed ``report.json`` by the matrix's name.

    Raises KeyError or ValueError for a file that is not our report, or that lacks a set;
    EvidenceError or StoreError for a run folder that cannot be read.
    """
    curves = _Curves()
    bugs, correct = [], []
    for matrix in catalogue.matrices:
        report = reports[matrix.name]
        tests = {test["name"]: test for test in report["tests"]}
        for name in matrix.sets:
            run = _run(matrix.name, tests[name], report, curves)
            answer = read_answer(tests[name])
            bug = catalogue.bug(name)
            if matrix.correct:
                correct.append(ProvenCorrect(answer, run))
            elif bug is not None:
                bugs.append(ProvenBug(Graded(bug, answer), run))
    versions: dict[str, str] = {}
    for report in reports.values():
        for distribution, version in report["versions"].items():
            known = versions.get(distribution, "").split(", ")
            versions[distribution] = ", ".join(dict.fromkeys([*filter(None, known), version]))
    return Proof(
        bugs=tuple(each for each in bugs if each.graded.bug.magnitude is None),
        ladders=_ladders(each for each in bugs if each.graded.bug.magnitude is not None),
        correct=tuple(correct),
        cost=_cost(reports.values()),
        versions=versions,
    )


class _Curves:
    """Curves by run folder, each read once."""

    def __init__(self) -> None:
        self._read: dict[str, Curve] = {}

    def __getitem__(self, folder: str) -> Curve:
        if folder not in self._read:
            self._read[folder] = read_curve(Path(folder))
        return self._read[folder]


def _run(matrix: str, test: Mapping[str, Any], report: Mapping[str, Any], curves: _Curves) -> Run:
    curve = curves[test["source"]]
    control = next(each for each in report["controls"] if each["name"] == test["control"])
    repeats = [
        curves[each["source"]] for each in report["repeats"] if each["control"] == test["control"]
    ]
    flagged: tuple[str, ...] = ()
    golden = curves[control["source"]]
    if curve.loss and test["verdict"] != _ERROR:
        flagged = tuple(rule.name for rule in RULES if rule.flags(curve, golden, repeats))
    return Run(
        matrix=matrix,
        what=", ".join([test["degrees"], *test["techniques"]]),
        steps=len(curve.loss),
        rank_seconds=_rank_seconds(test),
        flagged_by=flagged,
        loss_off=largest_difference(curve, golden),
    )


def _rank_seconds(run: Mapping[str, Any]) -> float:
    return (run["world_size"] or 0) * (run["wall_s"] or 0.0)


def _ladders(rungs: Iterable[ProvenBug]) -> tuple[Ladder, ...]:
    grouped: dict[str, list[ProvenBug]] = {}
    for rung in rungs:
        name = rung.graded.bug.id
        match = _RUNG.fullmatch(name)
        grouped.setdefault(match[1] if match else name, []).append(rung)
    return tuple(
        Ladder(name, tuple(sorted(each, key=lambda rung: -(rung.graded.bug.magnitude or 0))))
        for name, each in grouped.items()
    )


def _cost(reports: Iterable[Mapping[str, Any]]) -> Cost:
    shared: dict[str, float] = {}
    tests: dict[str, float] = {}
    for report in reports:
        shared |= {run["source"]: _rank_seconds(run) for run in _references(report)}
        tests |= {run["source"]: _rank_seconds(run) for run in report["tests"]}
    own = {source: spent for source, spent in tests.items() if source not in shared}
    of_shared = sum(shared.values())
    return Cost(len(shared) + len(own), of_shared + sum(own.values()), of_shared)


def _references(report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    anchor = [report["anchor"]] if report["anchor"] else []
    return [*report["controls"], *report["repeats"], *anchor]
