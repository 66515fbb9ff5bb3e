import json
from importlib.resources import files

import jsonschema
import pytest
from report_samples import foreign_view, hostile_view, sample_view

from harness.report.report_json import document, to_json
from harness.report.view import ReportView

SCHEMA = json.loads(files("harness.report").joinpath("report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_published_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "view", [sample_view(), hostile_view(), foreign_view(), ReportView("empty")]
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
    ],
)
def test_the_schema_refuses_other_documents(break_it):
    report = json.loads(to_json(sample_view()))
    break_it(report)
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


def test_non_finite_numbers_are_strings_never_null():
    text = to_json(hostile_view())
    assert json.loads(text)["tests"][0]["checks"][0]["measured"] == "nan"
    assert "NaN" not in text
