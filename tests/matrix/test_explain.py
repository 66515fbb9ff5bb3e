"""What a run in float32 tells of a failure in low precision."""

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from converge_harness.cli.commands.run import _explain
from converge_harness.matrix.explain import Explained, explanation, to_shrink
from converge_harness.matrix.judge import Judged, may_be_rounding
from converge_harness.matrix.load import load_plan
from converge_harness.model import Check, Deviation, Judgement, Outcome, Tier, Verdict
from converge_harness.store import Store
from converge_harness.trainers import assume_toolchain


def check(name, outcome, onset=None, tensors=()):
    deviations = tuple(Deviation(tensor, onset or 0, 0.02, 0.01) for tensor in tensors)
    return Check(name, "…", Tier.FIRST_STEP, outcome, onset=onset, deviations=deviations)


LOW = Verdict(
    "tp2",
    "fsdp2",
    Judgement.FAIL,
    cause="8 gradients are wrong by more than rounding",
    checks=(
        check("gradients-envelope", Outcome.FAIL, 4, ["tok_embeddings.weight"]),
        check("gradient-errors", Outcome.FAIL, 1, ["norm.weight", "a", "b", "c", "d"]),
        check("loss-first-step", Outcome.PASS),
    ),
)


def test_a_set_that_passes_in_float32_differs_by_rounding_and_where_it_began_is_named():
    told = explanation(LOW, Verdict("tp2", "fsdp2", Judgement.PASS))
    assert told == (
        "tp2 in float32: PASS. It passes in float32, so the difference comes from rounding in "
        "norm.weight, a, b and 2 more, from step 1 on"
    )


def test_a_set_that_fails_in_float32_has_that_cause():
    sharp = Verdict("tp2", "fsdp2", Judgement.FAIL, cause="gradients are doubled", onset_step=1)
    told = explanation(LOW, sharp)
    assert told == "tp2 in float32: FAIL at step 1. It is not rounding: gradients are doubled"


@pytest.mark.parametrize("judgement", [Judgement.INVALID, Judgement.ERROR, Judgement.INCONCLUSIVE])
def test_a_set_without_an_answer_in_float32_claims_nothing(judgement):
    told = explanation(LOW, Verdict("tp2", "fsdp2", judgement, cause="out of memory"))
    assert (
        told
        == f"tp2 in float32: {judgement.value}, which says nothing about rounding: out of memory"
    )


def test_a_verdict_without_tensors_names_none():
    bare = Verdict("tp2", "fsdp2", Judgement.FAIL, checks=(check("loss", Outcome.FAIL, 3),))
    told = explanation(bare, Verdict("tp2", "fsdp2", Judgement.PASS))
    assert told.endswith("comes from rounding")


def test_only_failures_of_low_precision_are_explained(tmp_path, capsys):
    smoke = Path(__file__).parents[2] / "experiments" / "smoke.toml"
    plan = load_plan(smoke, (), on_gpu=False, find=assume_toolchain)
    passed = Verdict("mixed_tp2", "fsdp2_mixed", Judgement.PASS)
    assert may_be_rounding(plan.job("mixed_tp2"), LOW)
    assert not may_be_rounding(plan.job("mixed_tp2"), passed)
    assert not may_be_rounding(plan.job("ddp2"), LOW)  # it computes in float32 already
    nobody = argparse.Namespace(slots=None, explain_minutes=1)
    judged = Judged((passed,), SimpleNamespace(tests=()))
    _explain(Console(), plan, judged, tmp_path, Store(tmp_path), nobody)
    assert "no set failed in low precision" in capsys.readouterr().out


def test_what_fails_otherwise_than_by_rounding_is_shrunk_if_it_has_several_parts():
    smoke = Path(__file__).parents[2] / "experiments" / "smoke.toml"
    plan = load_plan(smoke, (), on_gpu=False, find=assume_toolchain)

    def verdict(name, judgement=Judgement.FAIL):
        return replace(LOW, name=name, judgement=judgement)

    names = ("fsdp2_tp2", "mixed_tp2", "fsdp2_tp2_pp2", "fsdp2_cp2", "compile", "fsdp2")
    verdicts = [verdict(name) for name in names]
    verdicts[3] = verdict("fsdp2_cp2", Judgement.PASS)
    twin = SimpleNamespace(verdicts=(verdict("mixed_tp2", Judgement.PASS),))
    found = to_shrink(plan, verdicts, Explained(twin, ()))
    # Not its control, which is no test set, nor what passes, or passes in float32.
    assert found == ("fsdp2_tp2", "fsdp2_tp2_pp2", "compile")
    assert "mixed_tp2" in to_shrink(plan, verdicts, None)
    invalid = SimpleNamespace(verdicts=(verdict("mixed_tp2", Judgement.INVALID),))
    assert "mixed_tp2" in to_shrink(plan, verdicts, Explained(invalid, ()))
