from junitparser import Error, Failure, JUnitXml, Skipped
from report_samples import build_view, hostile_view, sample_view

from converge_harness.model import Judgement, Verdict
from converge_harness.report.renderers.junit import to_junit


def suites(view):
    return {
        suite.name: {case.name: case for case in suite}
        for suite in JUnitXml.fromstring(to_junit(view))
    }


def test_one_suite_per_set_and_one_case_per_check():
    found = suites(sample_view())
    assert len(found) == 12
    assert "grad-norm-envelope" in found["ddp2"]
    totals = JUnitXml.fromstring(to_junit(sample_view()))
    assert (totals.failures, totals.errors, totals.skipped) == (11 + 3, 2 + 3, 11)


def test_a_fail_is_a_failure_with_its_sentence():
    (result,) = suites(sample_view())["ddp2"]["first-step-grad-norm"].result
    assert isinstance(result, Failure)
    assert "grad norm 0.42 where the control has 0.84" in result.message
    assert "limit 1e-06 (floor of fp32 arithmetic)" in result.message
    assert "divided by the data-parallel degree" in result.text


def test_tensors_of_a_failed_check_are_in_its_text():
    found = suites(sample_view())["float8_async_tp"]
    (result,) = found["gradients-first-steps"].result
    assert result.text.count("attention.w") == 12
    assert "look at: attention.wq, wk and wv" in found["verdict"].result[0].text


def test_invalid_error_and_inconclusive_are_errors():
    found = suites(sample_view())
    assert isinstance(found["fsdp2_cp2_alltoall"]["techniques-in-force"].result[0], Error)
    assert isinstance(found["short_run"]["loss-equivalent"].result[0], Error)
    for name in ("fsdp2_cp2_alltoall", "tp2_pp2_fsdp2", "short_run"):
        assert isinstance(found[name]["verdict"].result[0], Error)
    assert "Rank 5 crashed" in found["tp2_pp2_fsdp2"]["verdict"].result[0].message
    assert "Traceback" in found["tp2_pp2_fsdp2"]["verdict"].result[0].text


def test_skipped_is_skipped_and_pass_has_no_result():
    found = suites(sample_view())["fsdp2_tp2"]
    assert isinstance(found["same-batches"].result[0], Skipped)
    assert found["verdict"].is_passed


def test_a_verdict_that_is_not_pass_is_never_green():
    view = build_view(title="t", verdicts=[Verdict("a", "c", Judgement.FAIL)])
    assert isinstance(suites(view)["a"]["verdict"].result[0], Failure)


def test_hostile_text_is_still_xml():
    (cases,) = suites(hostile_view()).values()
    assert "</script>" in cases["c"].result[0].message
