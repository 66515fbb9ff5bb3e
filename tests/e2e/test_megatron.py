"""Megatron-Core on CPUs, judged like torchtitan: correct set-ups pass, and errors are named."""

import json
import os
import subprocess
import sys

import pytest
from cut_down import ROOT, need, run_some, verdicts
from warm_toolchains import TOOLCHAINS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    for name in ("megatron-core-0.16.1", "megatron-core-0.19.2"):
        need(name)
    return tmp_path_factory.mktemp("megatron")


def test_layouts_are_the_control_by_all_evidence(folder):
    tests = run_some(
        folder,
        "megatron",
        *("tp2_pp2_sp", "distributed_optimizer_tp2", "overlapped_tp2", "bf16_tp2_sp"),
        "two_instances",
    )
    assert set(verdicts(tests).values()) == {"PASS"}
    for name in ("tp2_pp2_sp", "distributed_optimizer_tp2", "overlapped_tp2", "two_instances"):
        outcomes = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        for check in (
            "same-data",
            "loss-recomputed-envelope",
            "gradients-first-steps",
            "replicas-agree",
        ):
            assert outcomes[check] == "PASS", (name, check)


def test_experts_on_other_ranks_are_the_control_by_all_evidence(folder):
    names = ("ep2", "ep2_distributed_optimizer", "ep2_tp2_sp")
    tests = run_some(folder, "megatron", *names)
    assert verdicts(tests) == dict.fromkeys(names, "PASS")
    for name in names:
        outcomes = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        for check in (
            *("same-initial-parameters", "gradients-first-steps", "updates-first-steps"),
            *("reported-grad-norm-is-recomputed", "optimizer-state-first-steps", "replicas-agree"),
            "named-in-force",
        ):
            assert outcomes[check] == "PASS", (name, check)


def test_errors_in_it_fail_at_the_first_step_with_their_causes(folder):
    says = {
        "sp_norms_not_summed": "a reduction of these gradients over tp is missing",
        "averaged_twice": "gradients are scaled by 0.25",
        "vocabulary_shifted": "the output of embedding.word_embeddings is off",
        "loss_divided": "only the metric is wrong",
        "experts_scaled": "by 2, which equals the EP degree (2)",
        "wrong_experts": "the input of layers.0.mlp.experts.2.linear_fc2 (in.0) is off",
    }
    tests = run_some(folder, "megatron_injected", *says)
    assert set(verdicts(tests).values()) == {"FAIL"}
    for name, words in says.items():
        assert tests[name]["onset_step"] == 1
        assert words in f"{tests[name]['cause']} {tests[name]['first_wrong']}", name


def test_errors_and_right_layouts_are_graded_in_bf16(folder):
    script = (sys.executable, "benchmarks/prove.py", "--megatron", "--regime", "bf16")
    part = ("--steps", "4", "--only", "averaged_twice", "accumulation")
    where = ("--store", str(folder / "store"), "--out", str(folder / "proof"))
    result = subprocess.run(
        [*script, *part, *where],
        cwd=ROOT,
        env={**os.environ, "CONVERGE_TOOLCHAINS": str(TOOLCHAINS)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (graded,) = json.loads((folder / "proof" / "benchmark.json").read_text())["regimes"]
    (bug,) = graded["bugs"]
    assert (bug["cause"], bug["cause_right"]) == ("gradient scale", True)
    assert [(each["name"], each["verdict"]) for each in graded["correct"]] == [
        ("accumulation", "PASS")
    ]


def test_bugs_of_both_releases_are_named_where_they_begin(folder):
    says = {
        "gathered_logits_tp2": "the objective differs",
        "means_of_microbatches": "gradients are wrong in direction",
        "balanced_tp2_sp": "the backward pass differs",
    }
    right = ("balanced_tp2_sp_of_0.19.2", "norms_tp2_sp")
    tests = run_some(folder, "megatron_bugs", *says, "interleaved_batched", *right)
    failed = dict.fromkeys((*says, "interleaved_batched"), "FAIL")
    assert verdicts(tests) == {**failed, **dict.fromkeys(right, "PASS")}
    for name, words in says.items():
        assert words in tests[name]["cause"], name
        # No module is blamed: gated layers are in another order on tensor-parallel ranks.
        assert "all outputs are right" in tests[name]["first_wrong"], name
    assert "the input of layers.3.mlp.router is off" in tests["balanced_tp2_sp"]["first_wrong"]
    interleaved = tests["interleaved_batched"]["first_wrong"]
    assert "the input of layers.1 (in.hidden_states) is off" in interleaved


def test_megatron_fsdp_is_the_control_where_it_is_right(folder):
    right = "zero3_experts_alltoall_tp2_sp_accumulated_overlapped_recomputed"
    tests = run_some(folder, "megatron_fsdp", right)
    assert verdicts(tests) == {right: "PASS"}
    outcomes = {check["name"]: check["outcome"] for check in tests[right]["checks"]}
    for check in (
        *("same-initial-parameters", "gradients-first-steps", "updates-first-steps"),
        *("reported-grad-norm-is-recomputed", "optimizer-state-first-steps", "replicas-agree"),
        "named-in-force",
    ):
        assert outcomes[check] == "PASS", check


def test_bugs_of_megatron_fsdp_in_a_release_are_named(folder):
    says = {
        "fsdp_experts": "by 2, which equals the shard degree (2), or the EP degree (2)",
        "fsdp_zero1_overlapped": "every gradient is off",
    }
    tests = run_some(folder, "megatron_bugs", *says)
    assert verdicts(tests) == dict.fromkeys(says, "FAIL")
    for name, words in says.items():
        assert words in tests[name]["cause"], name
        assert tests[name]["loss_only_gate"]["passes"], name
