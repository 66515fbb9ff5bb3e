"""``junit.xml``: one suite per test set, one case per check; GitLab, Jenkins and others show it."""

from __future__ import annotations

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from converge_harness.model import Check, Deviation, Judgement, Outcome
from converge_harness.report.text import digits, duration, step_range
from converge_harness.report.view.report_view import ReportView, TestView


def to_junit(view: ReportView) -> bytes:
    """Render; a set whose verdict is not PASS never looks green, whatever its checks say."""
    xml = JUnitXml(view.title)
    for test in view.tests:
        xml.add_testsuite(_suite(test))
    xml.update_statistics()  # type: ignore[no-untyped-call] # junitparser is typed in part only
    rendered: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return rendered


def _suite(test: TestView) -> TestSuite:
    suite = TestSuite(test.run.name)
    suite.add_property("verdict", test.verdict.judgement.value)
    suite.add_property("control", test.verdict.control)
    for name, value in test.run.own_techniques.items():
        suite.add_property(f"technique {name}", value)
    if test.run.inject:
        suite.add_property("inject", test.run.inject)
    if test.run.deterministic is False:
        suite.add_property("deterministic", "false")
    for name, value in _passes(test).items():
        suite.add_property(name, value)
    for check in test.verdict.checks:
        suite.add_testcase(_case(test, check))
    suite.add_testcase(_verdict_case(test))
    return suite


def _passes(test: TestView) -> dict[str, str]:
    """Properties of a run made in several passes."""
    if not test.resumed:
        return {}
    properties = {"kind": test.kind.value}
    for each in test.resumed.passes:
        parts = [
            each.degrees,
            f"steps {step_range(each.steps)}",
            f"started from {each.started_from}",
            each.ended,
        ]
        properties[f"pass {each.number}"] = ", ".join(parts)
    for index, fault in enumerate(test.resumed.faults, 1):
        fate = f"{fault.details} at step {fault.step}: {fault.fate}"
        if fault.recovery_s is not None:
            fate += f", recovered in {duration(fault.recovery_s)}"
        properties[f"fault {index}"] = fate
    return properties


def _case(test: TestView, check: Check) -> TestCase:
    case = TestCase(check.name, classname=test.run.name, time=0)
    sentence = _sentence(check)
    details = "\n".join([test.verdict.cause, *map(_deviation, check.deviations)]).strip()
    match check.outcome:
        case Outcome.FAIL:
            case.result = [_with_text(Failure(sentence, "fail"), details)]
        case Outcome.INVALID | Outcome.INCONCLUSIVE:
            case.result = [_with_text(Error(sentence, check.outcome.value.lower()), details)]
        case Outcome.SKIPPED:
            case.result = [Skipped(sentence)]
        case Outcome.PASS:
            pass
    return case


def _verdict_case(test: TestView) -> TestCase:
    """The verdict itself: it carries the run's wall time, and an ERROR has no checks."""
    verdict, run = test.verdict, test.run
    case = TestCase("verdict", classname=run.name, time=run.wall_s or 0)
    message = verdict.cause or f"verdict {verdict.judgement.value}"
    details = "\n".join(
        part
        for part in (
            f"first wrong: {verdict.first_wrong}" if verdict.first_wrong else "",
            f"look at: {verdict.look_at}" if verdict.look_at else "",
            f"next: {verdict.next_command}" if verdict.next_command else "",
            f"run again: {run.command}" if run.command else "",
            f"{run.error.text}\n{run.error.traceback}" if run.error else "",
        )
        if part
    )
    match verdict.judgement:
        case Judgement.PASS:
            pass
        case Judgement.FAIL:
            case.result = [_with_text(Failure(message, "fail"), details)]
        case Judgement.INVALID | Judgement.ERROR | Judgement.INCONCLUSIVE:
            case.result = [_with_text(Error(message, verdict.judgement.value.lower()), details)]
    return case


def _sentence(check: Check) -> str:
    parts = [check.detail or check.title]
    if check.measured is not None and check.limit is not None:
        unit = f" {check.unit}" if check.unit else ""
        parts.append(f"measured {digits(check.measured)}{unit}, limit {check.limit}")
    if check.onset is not None:
        parts.append(f"from step {check.onset}")
    return "; ".join(parts)


def _deviation(deviation: Deviation) -> str:
    return (
        f"{deviation.tensor}: {digits(deviation.measured)}, limit {digits(deviation.limit)} "
        f"(step {deviation.step})"
    )


def _with_text(result: Failure | Error, text: str) -> Failure | Error:
    result.text = text
    return result
