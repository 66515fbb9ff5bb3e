"""What judging compares, a report shows, and compares nothing again."""

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import CONFIG, TOOLCHAIN, evidence, in_force, job, spec
from tensor_samples import tensor_samples

import converge_harness.judge
import converge_harness.report
from converge_harness.judge import calibrate, comparison, judge
from converge_harness.model import JUDGED_SIGNALS, Experiment, Parallelism, Plan, Role, SetSpec
from converge_harness.report import build_view
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.json_document import document
from converge_harness.trainers.torchtitan import TORCHTITAN

COMPARES = {
    *("calibrate", "compare_runs", "curve_difference", "curve_differences"),
    *("judge", "judge_submission"),
}
"""What a report may not call, though it is public."""
SOURCES = sorted(Path(converge_harness.report.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_a_report_imports_what_judging_makes_public_and_nothing_else(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "converge_harness.judge"
        ):
            assert node.module == "converge_harness.judge"
            names = {alias.name for alias in node.names}
            assert names <= set(converge_harness.judge.__all__) - COMPARES
        if isinstance(node, ast.Import):
            assert not [
                each for each in node.names if each.name.startswith("converge_harness.judge")
            ]


def test_judging_makes_public_what_it_names():
    assert converge_harness.judge.__all__ == sorted(
        set(converge_harness.judge.__all__), key=_isorted
    )
    assert all(hasattr(converge_harness.judge, name) for name in converge_harness.judge.__all__)


def _isorted(name):
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def test_every_pair_is_aligned_and_compared_once(monkeypatch):
    """By judging; building and rendering a report of it takes what was found."""
    calls = Counter()

    def counting(name):
        original = getattr(comparison, name)

        def counted(test, control, *more, **options):
            calls[name, test.name, control.name] += 1
            return original(test, control, *more, **options)

        monkeypatch.setattr(comparison, name, counted)

    for name in ("align", "compare_tensors", "curve_differences"):
        counting(name)
    envelopes = Counter()
    compare = comparison.compare_signal

    def counted_envelope(signal, test, control, *more, **options):
        envelopes[signal, test.name, control.name] += 1
        return compare(signal, test, control, *more, **options)

    monkeypatch.setattr(comparison, "compare_signal", counted_envelope)

    steps = 20
    control_spec = SetSpec(
        "fsdp2", Parallelism(dp_shard=2), CONFIG, TOOLCHAIN.name, trainer=TORCHTITAN
    )
    tolerant = replace(spec("two", dp_replicate=2), tolerances={"loss": 1e-3})
    specs = (spec("one", dp_shard=2, tp=2), tolerant)
    runs = {
        each.name: evidence(
            each.name,
            steps,
            jitter=1e-7,
            in_force=in_force(each),
            samples=tensor_samples(each.name, noise=2e-7),
        )
        for each in (control_spec, *specs)
    }
    repeat = evidence("ulp", steps, jitter=2e-7, samples=tensor_samples("ulp", noise=2e-7))
    learnt = calibrate(runs["fsdp2"], [repeat])
    calls.clear()  # repeats are compared with their control, to learn from them
    envelopes.clear()
    judged = [
        judge(runs[each.name], runs["fsdp2"], learnt, spec=each, control_spec=control_spec)
        for each in specs
    ]
    by_judging = dict(envelopes)
    view = build_view(
        title="t",
        verdicts=[each.verdict for each in judged],
        evidences=[*runs.values(), repeat],
        subject=Plan(
            Experiment("t", Path("t.toml"), (control_spec,), specs),
            (
                job(control_spec, Role.CONTROL, steps),
                *(job(each, Role.TEST, steps) for each in specs),
            ),
        ),
        comparisons={each.verdict.name: each.comparison for each in judged},
        calibrations={"fsdp2": learnt},
    )
    assert document(view)
    assert to_html(view)
    assert [test.gradients is not None for test in view.tests] == [True, True]
    pairs = [("one", "fsdp2"), ("two", "fsdp2")]
    made = ("align", "compare_tensors", "curve_differences")
    assert calls == {(name, *pair): 1 for name in made for pair in pairs}
    # By its tolerance and, for what the report says of learnt limits, without.
    assert envelopes == by_judging
    assert envelopes == {
        (signal, *pair): 2 if pair[0] == "two" else 1 for signal in JUDGED_SIGNALS for pair in pairs
    }
