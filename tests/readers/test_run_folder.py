"""Run folders as the rank side writes them, whole and broken."""

import json
import math
from pathlib import Path

import pytest

from converge_harness.errors import EvidenceError, StoreError
from converge_harness.judge import judge
from converge_harness.model import (
    Disagreement,
    DropoutMasks,
    Judgement,
    ObjectiveTerm,
    ObjectiveTerms,
    Parallelism,
    Precision,
    RankError,
    RunStatus,
    Technique,
)
from converge_harness.readers import read_curves, read_run, read_spec
from converge_harness.readers.run_folder.documents import in_force_of

JOB = {
    "schema": 1,
    "name": "fsdp2_float8",
    "role": "test",
    "identity": "abc",
    "dialect": "titan_0_3",
    "run_folder": "/abs",
    "seed": 42,
    "steps": 3,
    "parallelism": {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "pp": 1, "ep": 1},
    "techniques": ["float8"],
    "pipeline_schedule": None,
    "cp_rotation": None,
    "train_config": {
        "path": "train_configs/llama3_debug.toml",
        "module": "llama3",
        "config": "llama3_debugmodel",
        "model": {"dim": 64},
        "settings": {"training": {"seq_len": 256}},
    },
    "overrides": {"training.local_batch_size": 2},
    "data": None,
    "seed_checkpoint": None,
    "sample_steps": [0, 1, 2],
    "repeat": None,
    "inject": None,
    "without_fixes": [],
    "device": "cpu",
}
HEADER = {
    "schema": 1,
    "kind": "header",
    "identity": "abc",
    "world_size": 2,
    "steps": 3,
    "versions": {},
}


def step(number, **changes):
    return {
        "kind": "step",
        "step": number,
        "loss": 6.25,
        "grad_norm": 1.5,
        "loss_recomputed": 6.25000001,
        "grad_norm_recomputed": 1.5,
        "lr": 4e-4,
        "tokens": 2031,
        "batch_digest": "00ff00ff00ff00ff",
        "batch_agrees": True,
        "grads_missing": 0,
        "seconds": 3.1,
        "memory_bytes": 812345344,
        **changes,
    }


def write(folder: Path, lines, *, name="metrics.jsonl", job=JOB, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    if job is not None:
        (folder / "job.json").write_text(json.dumps(job))
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / name).write_text(text + tail)
    return folder


@pytest.fixture
def run(tmp_path):
    last = step(3, loss=6.24999)  # a loss that stands still is nothing to judge
    lines = [HEADER, step(1), step(2), last, {"kind": "end", "steps": 3}]
    return write(tmp_path / "fsdp2-abc", lines)


def test_a_whole_run(run):
    evidence = read_run(run)
    assert (evidence.name, evidence.source) == ("fsdp2_float8", str(run))
    assert evidence.steps.tolist() == [1, 2, 3]
    assert (evidence.identity, evidence.sample_steps) == ("abc", (0, 1, 2))
    assert evidence.signals["loss_recomputed"] == (6.25000001,) * 3
    assert evidence.signals["tokens"] == (2031.0,) * 3
    assert evidence.signals["grads_missing"] == (0.0,) * 3
    assert evidence.batch_digests == ("00ff00ff00ff00ff",) * 3
    assert evidence.batch_agrees == (True,) * 3
    assert (evidence.complete, evidence.expected_steps) == (True, 3)
    assert evidence.precision is Precision.FLOAT8
    assert evidence.in_force is None
    assert judge(evidence, evidence).verdict.judgement is Judgement.PASS
    for path in (run, run / "metrics.jsonl"):
        again = read_curves(path, {"loss": "it has fixed names"})
        assert again.source == evidence.source
        assert again.signals == evidence.signals


def test_what_a_step_drew_from_is_read_by_step_and_may_be_missing(tmp_path):
    lines = [
        HEADER,
        step(1, random_state="", random_shared=None),
        step(2, random_state="0f" * 8, random_shared=True),
        step(3),
    ]
    evidence = read_run(write(tmp_path / "r", lines))
    assert evidence.random_states == ("", "0f" * 8, None)
    assert evidence.random_shared == (None, True, None)
    assert evidence.up_to(2).random_states == ("", "0f" * 8)
    older = read_run(write(tmp_path / "older", [HEADER, step(1)]))
    assert older.random_states == older.random_shared == ()
    assert older.global_random_states == {}
    seeded = [HEADER, step(1, python_random_state="0e" * 8), step(2, numpy_random_state="")]
    both = read_run(write(tmp_path / "seeded", seeded))
    assert both.global_random_states == {"python": ("0e" * 8, None), "numpy": (None, "")}
    assert both.up_to(1).global_random_states == {"python": ("0e" * 8,), "numpy": (None,)}
    for changes, words in (
        ({"random_state": None}, "random_state is None, which is not a string"),
        ({"numpy_random_state": 1}, "numpy_random_state is 1, which is not a string"),
        ({"random_state": "", "random_shared": 1}, "random_shared is 1, must be true, false"),
    ):
        folder = write(tmp_path / "wrong", [HEADER, step(1, **changes)])
        with pytest.raises(EvidenceError, match=words):
            read_run(folder)


def test_dropout_masks_are_read_of_the_steps_that_have_some(tmp_path):
    masks = {"units": [640, 0], "kept": [577, 0], "sums": ["0a" * 8, ""], "shared": None}
    run = write(tmp_path / "r", [HEADER, step(1), step(2, dropout_masks=masks), step(3)])
    (found,) = read_run(run).masks
    assert found == DropoutMasks(2, (640, 0), (577, 0), ("0a" * 8, ""), None)
    assert read_run(run).up_to(1).masks == ()
    wrong = (
        ([], r"dropout_masks is \[\], which is not a table"),
        (masks | {"kept": [-1, 0]}, r"kept is \[-1, 0\], which is not a list of counts"),
        (masks | {"sums": ["0a"]}, "must have an entry for every rank"),
        ({}, "must have an entry for every rank"),
        (masks | {"shared": 0}, "shared is 0, which is not true or false"),
    )
    for value, words in wrong:
        folder = write(tmp_path / "wrong", [HEADER, step(1, dropout_masks=value)])
        with pytest.raises(EvidenceError, match=words):
            read_run(folder)


def test_what_objectives_are_made_of_is_read_of_the_steps_that_show_it(tmp_path):
    term = {"total": 1.5, "squares": "inf", "mixed": -0.5, "trains": True}
    uneven = {"step": 0.5, "rank": 0.0, "microbatch": 0.0, "sample": 0.0}
    counts = {"tokens": 5, "targets": 6, "samples": 2, "microbatches": 1}
    terms = {**counts, "weight": 1.0, "uneven": uneven, "sums": {"gain": term}}
    run = write(tmp_path / "r", [HEADER, step(1), step(2, terms=terms), step(3)])
    (found,) = read_run(run).terms
    gain = ObjectiveTerm(1.5, math.inf, -0.5, trains=True)
    assert found == ObjectiveTerms(2, 5, 6, 2, 1, 1.0, uneven, {"gain": gain})
    assert read_run(run).up_to(1).terms == ()
    wrong = (
        ([], r"terms is \[\], which is not a table"),
        (terms | {"tokens": -1}, "tokens is -1, which is not a count"),
        (terms | {"samples": None}, "terms: samples is missing"),
        (terms | {"weight": None}, "terms: weight is missing"),
        (terms | {"weight": "1"}, "terms: '1' is not a number"),
        (terms | {"uneven": {"step": 0.0}}, "terms: rank is missing"),
        (terms | {"sums": {"gain": term | {"trains": 1}}}, "the term gain is .* with trains"),
        (terms | {"sums": {"gain": 1}}, "the term gain is 1, which is not a table"),
        (terms | {"sums": {"gain": term | {"total": None}}}, "terms: total is missing"),
    )
    for value, words in wrong:
        folder = write(tmp_path / "wrong", [HEADER, step(1, terms=value)])
        with pytest.raises(EvidenceError, match=words):
            read_run(folder)


def test_numbers_that_are_not_finite_are_strings_and_null_is_no_value(tmp_path):
    lines = [
        HEADER,
        step(1, loss="nan", grad_norm=None, loss_recomputed="inf", grad_norm_recomputed="-inf"),
        step(2, loss=None, grad_norm=None),
    ]
    evidence = read_run(write(tmp_path / "r", lines))
    assert math.isnan(evidence.signals["loss"][0])
    assert evidence.signals["loss"][1] is None
    assert "grad_norm" not in evidence.signals
    assert evidence.signals["loss_recomputed"][0] == math.inf
    assert evidence.signals["grad_norm_recomputed"][0] == -math.inf


def test_an_unfinished_run_without_its_last_half_line(tmp_path):
    folder = write(
        tmp_path / "r", [HEADER, step(1)], name="metrics.jsonl.part", tail='{"kind": "step", "st'
    )
    evidence = read_run(folder)
    assert evidence.steps.tolist() == [1]
    assert (evidence.complete, evidence.expected_steps) == (False, 3)
    assert judge(evidence, evidence).verdict.judgement is Judgement.INVALID
    assert read_curves(folder / "metrics.jsonl.part").steps.tolist() == [1]


@pytest.mark.parametrize("end", [0, 2, 4])
def test_a_run_that_says_it_ended_at_another_step_is_not_complete(run, end):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"end", "steps": 3', f'"end", "steps": {end}'))
    evidence = read_run(run)
    assert not evidence.complete
    assert judge(evidence, evidence).verdict.judgement is Judgement.INVALID


def test_a_run_without_any_metrics(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    evidence = read_curves(tmp_path)
    assert (evidence.steps.tolist(), evidence.complete) == ([], False)
    assert evidence.samples == ()


def test_a_run_of_a_trainer_that_is_not_registered_is_refused(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps({**JOB, "trainer": "of_nobody"}))
    for read in (read_curves, read_run, read_spec):
        with pytest.raises(EvidenceError, match=r"'of_nobody', which is not registered here"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.part"])
def test_metrics_without_their_job_are_refused(tmp_path, name):
    folder = write(tmp_path / "copied", [HEADER, step(1)], name=name, job=None)
    for read in (read_curves, read_run, read_spec):
        with pytest.raises(EvidenceError, match=r"job\.json: is missing, so it is unknown"):
            read(folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.part", "renamed.jsonl"])
def test_our_metrics_file_is_no_foreign_curve(tmp_path, name):
    folder = write(tmp_path / "copied", [HEADER, step(1)], name=name, job=None)
    with pytest.raises(EvidenceError, match=r"job\.json is missing"):
        read_curves(folder / name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"techniques": "float8"}, "techniques is 'float8', which is not a list of strings"),
        ({"techniques": 7}, "techniques is 7, which is not a list of strings"),
        ({"overrides": [1]}, r"overrides is \[1\], which is not a JSON object"),
        ({"steps": "3"}, "steps is '3', which is not a count"),
        ({"sample_steps": [0, "1"]}, r"sample_steps is \[0, '1'\], which is not a list of steps"),
        ({"parallelism": {"tp": "2"}}, "parallelism is .* which is not a JSON object of counts"),
    ],
)
def test_a_damaged_job_is_named(tmp_path, change, words):
    folder = write(tmp_path / "r", [HEADER, step(1)], job={**JOB, **change})
    for read in (read_curves, read_spec):
        with pytest.raises(EvidenceError, match=rf"job\.json: {words}"):
            read(folder)


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        ({"declared": "training.steps"}, "declared is 'training.steps', which is not a list of"),
        ({"declared": [1]}, r"declared is \[1\], which is not a list of strings"),
        ({"degrees": {"tp": "2"}}, "degrees is .* which is not a JSON object of counts"),
        ({"float8": []}, r"float8 is \[\], which is not a JSON object"),
        ({"float8": {"modules": "2"}}, r"float8\.modules is '2', which is not a count"),
        ({"world_size": "2"}, "world_size is '2', which is not a count"),
        ({"pipeline_schedule": 3}, "pipeline_schedule is 3, which is not a string"),
        ({"own_techniques": ["x"]}, r"own_techniques is \['x'\], which is not a list of JSON obj"),
        (
            {"own_techniques": [{"name": "x", "called": "false"}]},
            r"own_techniques is .*, which is not a list of JSON objects \(called and changed",
        ),
        ({"param_dtype": ["bfloat16"]}, r"param_dtype is \['bfloat16'\], which is not a string"),
    ],
)
def test_a_damaged_record_of_what_ran_is_named(run, ran, words):
    (run / "in_force.json").write_text(json.dumps({"schema": 1, **ran}))
    with pytest.raises(EvidenceError, match=rf"in_force\.json: {words}"):
        read_curves(run)


def test_the_record_says_how_it_ended(run):
    record = {
        "schema": 1,
        "name": "x",
        "identity": "abc",
        "folder": "x",
        "status": "crashed",
        "wall_s": 12.5,
        "argv": ["torchrun"],
        "error": {"rank": 1, "message": "ValueError: boom", "traceback": "…"},
    }
    (run / "record.json").write_text(json.dumps(record))
    evidence = read_run(run)
    assert (evidence.status, evidence.wall_s) == (RunStatus.CRASHED, 12.5)
    assert evidence.error == RankError(1, "ValueError: boom", "…")
    assert evidence.says_why is None
    (run / "record.json").write_text(json.dumps(record | {"status": "timed out"}))
    assert read_run(run).says_why == "slurm.log"


@pytest.mark.parametrize(
    ("ran", "techniques", "precision"),
    [
        ({"float8": {"modules": 3}}, [], Precision.FLOAT8),
        ({"param_dtype": "bfloat16"}, [], Precision.BF16),
        ({"param_dtype": "bfloat16+float32"}, [], Precision.BF16),
        ({"mixed_precision_param": "bfloat16"}, [], Precision.BF16),
        ({"mixed_precision_param": "float16"}, [], Precision.BF16),
        ({"param_dtype": "float32", "float8": {"modules": 0}}, [], Precision.FP32),
        ({}, ["bf16"], Precision.BF16),
        ({}, ["float8_rowwise"], Precision.FLOAT8),
    ],
)
def test_precision_is_the_coarsest_that_is_named_or_ran(tmp_path, ran, techniques, precision):
    folder = write(tmp_path / "r", [HEADER], job={**JOB, "techniques": techniques})
    (folder / "in_force.json").write_text(json.dumps({"schema": 1, **ran}))
    evidence = read_run(folder)
    assert evidence.precision is precision
    assert evidence.in_force == in_force_of(ran)


def test_parameters_without_gradient_keep_their_names(tmp_path):
    lines = [
        HEADER,
        step(1, grads_missing=2, grads_missing_names=["a", "b"]),
        step(2, grads_missing=1, grads_missing_names=["b"]),
    ]
    evidence = read_run(write(tmp_path / "r", lines))
    assert evidence.grads_missing == ("a", "b")
    assert evidence.signals["grads_missing"] == (2.0, 1.0)


def test_what_the_probe_could_not_measure_is_reported_with_its_step(tmp_path):
    lines = [HEADER, step(1), step(2, problems=["lm_head.weight: placement _StridedShard"])]
    evidence = read_run(write(tmp_path / "r", lines))
    assert evidence.problems == ("step 2: lm_head.weight: placement _StridedShard",)
    assert evidence.uncounted == {(2, "lm_head.weight")}


def test_uncounted_gradients_have_a_key_and_need_no_sentence_to_be_understood(tmp_path):
    sentences = ["the loss cannot be recomputed: no logits", "w: placement _StridedShard"]
    new = [HEADER, step(1, problems=sentences, uncounted=["w"])]
    assert read_run(write(tmp_path / "new", new)).uncounted == {(1, "w")}
    old = [HEADER, step(1, problems=sentences)]
    assert read_run(write(tmp_path / "old", old)).uncounted == {(1, "w")}
    none = [HEADER, step(1, problems=["w: placement _StridedShard"], uncounted=[])]
    assert not read_run(write(tmp_path / "none", none)).uncounted


def test_a_resumed_run_keeps_the_last_lines_and_tells_what_differs(tmp_path):
    lines = [
        HEADER,
        *(step(1), step(2), step(3, batch_agrees=False)),
        step(2, seconds=9.0, memory_bytes=7),
        step(3, loss=6.5, batch_digest="11ff11ff11ff11ff"),
        step(4),
    ]
    evidence = read_run(write(tmp_path / "r", lines))
    assert evidence.steps.tolist() == [1, 2, 3, 4]
    assert evidence.signals["loss"] == (6.25, 6.25, 6.5, 6.25)
    assert evidence.signals["seconds"][1] == 9.0
    assert evidence.batch_digests[1:3] == ("00ff00ff00ff00ff", "11ff11ff11ff11ff")
    assert evidence.batch_agrees == (True,) * 4
    assert evidence.replayed == (2, 3)
    (clause,) = evidence.replay_conflicts
    assert str(clause) == (
        "step 3: loss 6.25, then 6.5, and batch_digest 00ff00ff00ff00ff, then 11ff11ff11ff11ff, "
        "and batch_agrees False, then True"
    )


# ----------------------------------------------------------------- replicas

DISAGREEMENT = {
    "kind": "parameter",
    "tensor": "layers.0.attention_norm.weight",
    "mesh_dims": ["tp"],
    "groups": [[0, 2], [1, 3]],
}


def replicas(number, *disagreements, **changes):
    return {
        "kind": "replicas",
        "step": number,
        "compared": {"parameter": 18, "gradient": 18},
        "count": len(disagreements),
        "disagreements": list(disagreements),
        **changes,
    }


def test_the_agreement_of_replicas(tmp_path):
    lines = [HEADER, replicas(0), step(1), replicas(1, DISAGREEMENT, count=21), step(2)]
    before, after = read_run(write(tmp_path / "r", lines)).replicas
    assert (before.step, before.count, before.disagreements) == (0, 0, ())
    assert (after.step, after.count) == (1, 21)
    assert after.compared == {"parameter": 18, "gradient": 18}
    assert after.disagreements == (
        Disagreement("parameter", DISAGREEMENT["tensor"], ("tp",), ((0, 2), (1, 3))),
    )


def test_replicas_that_a_replay_found_otherwise_are_a_conflict(tmp_path):
    lines = [HEADER, step(1), replicas(1, DISAGREEMENT), replicas(0), step(1), replicas(1)]
    evidence = read_run(write(tmp_path / "r", lines))
    assert [sample.step for sample in evidence.replicas] == [0, 1]
    assert evidence.replicas[1].count == 0
    (clause,) = evidence.replay_conflicts
    assert str(clause) == (
        "step 1: tensors whose copies disagree 1 (first: layers.0.attention_norm.weight), then 0"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": None}, "step is None"),
        ({"compared": {"parameter": -1}}, "compared is .* which is not a JSON object of counts"),
        ({"compared": None}, "compared is None"),
        ({"count": "1"}, "count is '1', which is not a count"),
        ({"count": 0, "disagreements": [DISAGREEMENT]}, "count is 0, but 1 disagreements"),
        ({"count": 3}, "count is 3, but 0 disagreements are listed"),
        ({"disagreements": None}, "disagreements is None, which is not a list"),
        ({"count": 1, "disagreements": ["x"]}, "a disagreement is 'x', must have kind"),
        ({"count": 1, "disagreements": [{**DISAGREEMENT, "groups": [0]}]}, "a disagreement is"),
        ({"count": 1, "disagreements": [{**DISAGREEMENT, "mesh_dims": 1}]}, "a disagreement is"),
    ],
)
def test_a_damaged_line_on_replicas_is_named(tmp_path, change, words):
    with pytest.raises(EvidenceError, match=rf"metrics\.jsonl:2: {words}"):
        read_run(write(tmp_path / "r", [HEADER, {**replicas(1), **change}]))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([HEADER, "{\n"], "metrics.jsonl:2: not JSON"),
        ([HEADER, "[1]\n"], "metrics.jsonl:2: a list"),
        ([HEADER, "[" * 100_000 + "\n"], "metrics.jsonl:2: not JSON"),
        ([step(1)], "metrics.jsonl:1: kind is 'step', but the first line must be the header"),
        (
            [HEADER, {"kind": "stop"}],
            ":2: kind is 'stop', must be 'step', 'replicas', 'loaded' or 'end'",
        ),
        ([HEADER, {"kind": ["step"]}], r"metrics.jsonl:2: kind is \['step'\], must be 'step'"),
        ([HEADER, {"kind": {}}], "metrics.jsonl:2: kind is {}, must be 'step'"),
        ([HEADER, {"kind": "end"}, step(1)], "metrics.jsonl:3: a line after the end line"),
        ([HEADER, step("one")], "metrics.jsonl:2: step is 'one', which is not a number"),
        ([HEADER, step(1.5)], "metrics.jsonl:2: step is 1.5, which is not a step number"),
        ([HEADER, step(None)], "metrics.jsonl:2: step is None, which is not a step number"),
        ([HEADER, step(-1)], "step is -1, which is not a step number"),
        (
            [HEADER, step(2**63)],
            "metrics.jsonl:2: step is 9223372036854775808, which is not a step",
        ),
        ([{**HEADER, "steps": "all"}], "metrics.jsonl:1: step is 'all', which is not a number"),
        (
            [HEADER, step(1, grads_missing_names="a")],
            "grads_missing_names is 'a', which is not a li",
        ),
        ([HEADER, step(1, grads_missing_names=[1])], r"grads_missing_names is \[1\], which is no"),
        ([HEADER, step("nan")], "step is 'nan', which is not a step number"),
        ([HEADER, step(1, loss="high")], "metrics.jsonl:2: loss is 'high', which is not a number"),
        ([HEADER, step(1, loss=True)], "loss is True, which is not a number"),
        ([HEADER, step(1, loss=[1])], r"loss is \[1\], which is not a number"),
        ([HEADER, step(1, loss=10**400)], "which is not a number"),
        ([HEADER, step(1, problems="one")], "problems is 'one', which is not a list of strings"),
        ([HEADER, step(1, uncounted=[1])], r"uncounted is \[1\], which is not a list of strings"),
        ([HEADER, '{"kind": "step", "kind": "end"}\n'], "the key 'kind' occurs twice"),
        ([HEADER, step(1, batch_digest=7)], "batch_digest is 7, which is not a string"),
        ([HEADER, step(1, batch_agrees="yes")], "batch_agrees is 'yes', must be true, false"),
        ([{**HEADER, "identity": "other"}], "its metrics are of job other"),
    ],
)
def test_a_line_that_cannot_be_understood_is_named(tmp_path, lines, words):
    with pytest.raises(EvidenceError, match=words):
        read_run(write(tmp_path / "r", lines))


def test_newer_files_are_refused(tmp_path):
    folder = write(tmp_path / "r", [{**HEADER, "schema": 2}])
    with pytest.raises(StoreError, match="schema 2"):
        read_run(folder)
    (folder / "job.json").write_text(json.dumps({**JOB, "schema": 2}))
    with pytest.raises(StoreError, match="schema 2"):
        read_run(folder)


def test_the_spec_is_read_back_from_the_job(run):
    spec = read_spec(run)
    assert spec == read_spec(run / "metrics.jsonl")
    assert spec.parallelism == Parallelism(dp_shard=2)
    assert spec.techniques == (Technique.FLOAT8,)
    assert spec.overrides == {"training.local_batch_size": 2}
    assert spec.train_config.settings == {"training": {"seq_len": 256}}
    assert not spec.tolerances


@pytest.mark.parametrize(
    "change",
    [
        {"techniques": ["float9"]},
        {"parallelism": {"dp": 2}},
        {"train_config": {**JOB["train_config"], "settings": [1, "a/b", []]}},
        {"train_config": {**JOB["train_config"], "model": ""}},
    ],
)
def test_a_job_that_cannot_be_understood(tmp_path, change):
    folder = write(tmp_path / "r", [HEADER], job={**JOB, **change})
    with pytest.raises(EvidenceError, match="incomplete job"):
        read_spec(folder)
