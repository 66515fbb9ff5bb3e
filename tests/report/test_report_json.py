import json
from importlib.resources import files

import jsonschema
import pytest
from pass_samples import resumed_view
from report_samples import foreign_view, hostile_view, sample_view

from converge_harness.report.renderers.json_document import document, to_json
from converge_harness.report.view.report_view import ReportView

SCHEMA = json.loads(files("converge_harness.report").joinpath("report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_published_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "view",
    [sample_view(), hostile_view(), foreign_view(), resumed_view(), ReportView("empty")],
)
def test_reports_keep_to_the_published_schema(view):
    VALIDATOR.validate(json.loads(to_json(view)))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda report: report.pop("tests"),
        lambda report: report.update(schema_version=2),
        lambda report: report["tests"][0].update(verdict="MAYBE"),
        lambda report: report["tests"][0]["checks"][0].pop("limit"),
        lambda report: report["tests"][0]["checks"][0].update(measured="NaN"),
        lambda report: report["tests"][0]["checks"][0].update(outcome="PERHAPS"),
        lambda report: report["calibration"][0].pop("taught_by"),
    ],
)
def test_the_schema_refuses_other_documents(break_it):
    report = json.loads(to_json(sample_view()))
    break_it(report)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(report)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda test: test.update(kind="sideways"),
        lambda test: test["passes"][0].pop("ended"),
        lambda test: test["passes"][0].update(steps=[1]),
        lambda test: test["faults"][0].update(at_pass="first"),
    ],
)
def test_the_schema_refuses_other_passes_and_faults(break_it):
    report = json.loads(to_json(resumed_view()))
    break_it(report["tests"][1])
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(report)


def test_design_fields_are_there():
    report = document(sample_view())
    assert report["schema_version"] == 1
    assert report["experiment"] == "smoke"
    assert report["control"]["name"] == "fsdp2"
    ddp = next(test for test in report["tests"] if test["name"] == "ddp2")
    assert (ddp["verdict"], ddp["onset_step"]) == ("FAIL", 1)
    assert ddp["cause"].startswith("Gradients are half")
    assert ddp["loss_only_gate"]["passes"] is True
    check = next(check for check in ddp["checks"] if check["name"] == "first-step-grad-norm")
    assert (check["outcome"], check["measured"], check["limit"], check["steps"]) == (
        "FAIL",
        1.0,
        1e-6,
        [1, 1],
    )
    assert check["limit_origin"] == "floor of fp32 arithmetic"


def test_the_cause_and_the_tensors_of_a_fail_are_there():
    tests = {test["name"]: test for test in document(sample_view())["tests"]}
    ddp = tests["ddp2"]
    assert ddp["cause_class"] == "gradient scale"
    assert ddp["look_at"].startswith("where gradients are averaged")
    check = next(check for check in ddp["checks"] if check["name"] == "gradients-first-steps")
    assert len(check["deviations"]) == 20
    first = check["deviations"][0]
    assert (first["step"], first["measured"]) == (1, pytest.approx(1.0, rel=1e-3))
    assert first["limit"] < 1e-4
    assert tests["fsdp2_tp2"]["cause_class"] is None
    short = {check["tier"]: check["outcome"] for check in tests["short_run"]["checks"]}
    assert short["equivalence"] == "INCONCLUSIVE"


def test_the_calibration_is_there():
    (calibration,) = document(sample_view())["calibration"]
    assert (calibration["control"], calibration["taught_by"]) == ("fsdp2", 3)
    assert [repeat["bit_identical"] for repeat in calibration["repeats"]] == [True] + 3 * [False]
    loss = calibration["signals"]["loss"]
    assert loss["steps"] == [1, 20]
    assert loss["scale"][0] <= loss["scale"][1]


def test_non_finite_numbers_are_strings_never_null():
    text = to_json(hostile_view())
    assert json.loads(text)["tests"][0]["checks"][0]["measured"] == "nan"
    assert "NaN" not in text
