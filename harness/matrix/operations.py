"""Which operation inside of a failed set's first wrong module is to blame, by a short rerun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from converge_harness.errors import ConfigError, ConvergeError
from converge_harness.judge import OperationFinding, unknown_operation, wrong_operation
from converge_harness.matrix.failure import only_set, pairs_to_try
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.run import Ran, gpu_ids
from converge_harness.model import (
    Experiment,
    Judgement,
    Plan,
    Precision,
    RunStatus,
    SetSpec,
    Technique,
    Verdict,
)
from converge_harness.readers import read_operations
from converge_harness.report import ReportView, TestView
from converge_harness.report.sanitize import plain
from converge_harness.shrink import FEWEST_STEPS, why_not, with_steps
from converge_harness.store import read_json, write_json

FILE = "operations.json"
"""In a report folder: the sentences on the wrong operations of its sets."""


class FindingOfSet(BaseModel):
    """What is known of the wrong operation of a set."""

    model_config = ConfigDict(frozen=True)

    module: str
    """Of the verdict."""
    sentence: str
    operation: str = ""
    """``aten.mul.Tensor``; empty if it is unknown."""


_SETS = TypeAdapter(dict[str, FindingOfSet])


def to_look_into(verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """The failed sets with a module whose forward pass is wrong."""
    return tuple(
        each
        for each in verdicts
        if each.judgement is Judgement.FAIL and each.module and each.wrong_forward
    )


def find_operation(
    experiment: Experiment, verdict: Verdict, run: Callable[[Plan], Ran], slots: int | None
) -> FindingOfSet:
    """Run a failed set and its control again without compile, and look into the module.

    Args:
        experiment: as loaded.
        verdict: of a set of ``to_look_into``.
        run: runs a plan, or reuses what has finished.
        slots: how many ranks may run at once on the CPU; None: as usual.
    """
    finding = _found(experiment, verdict, run, slots)
    said = plain(finding.sentence)  # arguments of the program's operations may be any text
    return FindingOfSet(module=verdict.module, sentence=said, operation=finding.operation)


@dataclass(frozen=True, slots=True)
class _Rerun:
    """Both sets once more, with the module's operations; ``eager`` says that compile was left."""

    experiment: Experiment
    eager: bool


def _found(
    experiment: Experiment, verdict: Verdict, run: Callable[[Plan], Ran], slots: int | None
) -> OperationFinding:
    alone = only_set(experiment, verdict.name)
    (test,) = alone.tests
    if why := why_not(test):
        return unknown_operation(
            verdict.module, f"{verdict.name} {why.replace('shrunk', 'looked into')}"
        )
    rerun = _rerun(alone, verdict.module)
    try:
        plan = plan_experiment(rerun.experiment, on_gpu=bool(gpu_ids()), slots=slots)
    except ConvergeError as error:
        without = " without compile" if rerun.eager else ""
        said = error.problems[0].message if isinstance(error, ConfigError) else str(error)
        return unknown_operation(verdict.module, f"it cannot run again{without}: {said}")
    finding = _compared(plan, run(plan), verdict)
    if not rerun.eager:
        return finding
    if finding.is_right:
        said = f"what {verdict.module} returns in its first call is right"
        return replace(
            finding, sentence=f"without compile, {said}: the difference comes with compile"
        )
    return replace(finding, sentence=f"without compile, {finding.sentence}")


def _compared(plan: Plan, ran: Ran, verdict: Verdict) -> OperationFinding:
    """What the rerun's records show."""
    job = plan.job(verdict.name)
    control = plan.job(job.matched or verdict.control)
    records = {each.name: record for each, record in zip(plan.jobs, ran.records, strict=True)}
    for each in (job, control):
        if (record := records[each.name]).status is not RunStatus.FINISHED:
            return unknown_operation(
                verdict.module, f"the rerun of {each.name} has not finished: {record.status}"
            )
    repeats = [
        records[each.name].folder
        for each in plan.repeats_of(control)
        if records[each.name].status is RunStatus.FINISHED
    ]
    try:
        return wrong_operation(
            read_operations(records[job.name].folder),
            read_operations(records[control.name].folder),
            list(map(read_operations, repeats)),
            _coarser(job.precision, control.precision),
        )
    except ConvergeError as error:
        return unknown_operation(verdict.module, str(error))


def _rerun(alone: Experiment, module: str) -> _Rerun:
    pair = next(iter(pairs_to_try(alone)))
    pair = with_steps(pair, FEWEST_STEPS) or pair
    eager = any(Technique.COMPILE in each.techniques for each in (*pair.controls, *pair.tests))

    def looked_into(spec: SetSpec) -> SetSpec:
        kept = tuple(each for each in spec.techniques if each is not Technique.COMPILE)
        return replace(spec, techniques=kept, operations_of=module)

    return _Rerun(
        replace(
            pair,
            name=f"{pair.name}, operations",
            controls=tuple(map(looked_into, pair.controls)),
            tests=tuple(map(looked_into, pair.tests)),
        ),
        eager,
    )


def _coarser(*precisions: Precision) -> Precision:
    order = list(Precision)
    return max(precisions, key=order.index)


def with_findings(view: ReportView, findings: Mapping[str, FindingOfSet]) -> ReportView:
    """The view, with a set's sentence after its first wrong module if that is the same module."""

    def shown(test: TestView) -> TestView:
        verdict = test.verdict
        known = findings.get(verdict.name)
        if known is None or known.module != verdict.module or not verdict.first_wrong:
            return test
        first = f"{verdict.first_wrong}; {known.sentence}"
        return replace(test, verdict=replace(verdict, first_wrong=first))

    return replace(view, tests=tuple(map(shown, view.tests)))


def write_findings(folder: Path, findings: Mapping[str, FindingOfSet]) -> None:
    """Store it for ``converge report``; empty: nothing is known, or not any more."""
    if not findings:
        (folder / FILE).unlink(missing_ok=True)
        return
    sets = {name: each.model_dump(mode="json") for name, each in findings.items()}
    write_json(folder / FILE, {"sets": sets})


def read_findings(folder: Path) -> dict[str, FindingOfSet]:
    """What ``write_findings`` stored; empty if nothing, or if another version wrote it."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        return _SETS.validate_python(read_json(path).get("sets"))
    except ValidationError:
        return {}
