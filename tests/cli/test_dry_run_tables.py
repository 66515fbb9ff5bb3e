"""What ``converge plan --dry-run`` makes of the answers of its processes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.cli import dry_run as told
from converge_harness.cli import main
from converge_harness.launch.dry_run import DryRunResult, parts_of, problems_of
from converge_harness.matrix.cost import gpu_hours
from converge_harness.matrix.dry_run import DryRun
from converge_harness.matrix.load import load_plan
from converge_harness.model import Role
from converge_harness.trainers import assume_toolchain

LLAMA = Path(__file__).parents[2] / "experiments" / "llama3_8b.toml"


@pytest.fixture(scope="module")
def plan():
    return load_plan(LLAMA, (), on_gpu=True, find=assume_toolchain)


def answer(part, *, gigabytes=1, count=100, **changes):
    size = gigabytes * 2**30
    found = {
        "problems": [],
        "sharding_problems": [],
        "stand_ins": ["a tokenizer"],
        "parameters": {"bytes": size, "count": count, "of_model": 100},
        "gradients": {"bytes": size},
        "optimizer_states": {"bytes": 2 * size},
        "activations": {"bytes": 4 * size, "how": "traced"},
        "peak_bytes": 8 * size,
        "seconds": 10.0,
        "peak_rss_bytes": 700_000_000,
    }
    return DryRunResult(part, {**found, **changes})


def test_every_pipeline_stage_of_every_set_is_built_once_and_no_repeat(plan):
    assert [(part.title, part.rank) for part in parts_of(plan.jobs)] == [
        ("fsdp8", 0),
        ("fsdp8.float32", 0),
        ("fsdp8.float8_mixed", 0),
        ("fsdp8_tp2_pp2, pipeline rank 0 of 2", 0),
        ("fsdp8_tp2_pp2, pipeline rank 1 of 2", 16),
        ("fsdp8_tp2_cp2_pp2, pipeline rank 0 of 2", 0),
        ("fsdp8_tp2_cp2_pp2, pipeline rank 1 of 2", 32),
        ("fsdp8_cp8", 0),
    ]


def test_the_table_shows_the_largest_pipeline_rank_and_what_it_needs_of_a_gpu(plan):
    _, _, _, first, second, *_ = parts_of(plan.jobs)
    answers = [answer(first, count=40), answer(second, gigabytes=12, count=60)]
    made = DryRun(plan, "cuda", answers, 5000, 80)
    (row,) = made.rows
    assert (row.largest.part, row.seconds) == (second, 20.0)
    cells = list(told._cells(row, told._unit([row]), None, 80))
    assert cells[3:10] == ["1 of 2", "12.00", "12.00", "24.00", "48.00", "96.0", "129% !"]
    assert list(told._too_large([row], 80)) == [
        "! fsdp8_tp2_pp2: a peak of 103.1 GB does not fit 80 GB"
    ]
    assert problems_of(answers) == []
    document = json.loads(json.dumps(made.document))
    assert [part["largest"] for part in document["parts"]] == [False, True]
    assert set(document["gpu_hours"]["jobs"]) == {job.name for job in plan.jobs}


@pytest.mark.parametrize(("peak", "unit"), [(2**30, "GiB"), (2**30 - 1, "MiB"), (1, "MiB")])
def test_memory_is_printed_in_a_unit_that_leaves_digits(plan, peak, unit):
    made = DryRun(plan, "cuda", [answer(parts_of(plan.jobs)[0], peak_bytes=peak)])
    assert f": {unit} per rank" in str(told._table(made).title)


def test_problems_of_all_sets_are_reported_with_set_and_key(plan):
    control, _, _, first, second, *_, last = parts_of(plan.jobs)
    entry = {"key": "parallelism.tp", "message": "32 heads over 3", "valid": []}
    answers = [
        answer(control, sharding_problems=["norm.weight: is whole on every rank"]),
        DryRunResult(first, {"problems": [entry]}),
        DryRunResult(second, {"problems": [entry]}),
        DryRunResult(last, {"problems": [{"key": "", "message": "broken", "valid": ["a"]}]}),
    ]
    assert [str(problem) for problem in problems_of(answers)] == [
        "fsdp8: parallelism: norm.weight: is whole on every rank",
        "fsdp8_tp2_pp2: parallelism.tp: 32 heads over 3",
        "fsdp8_cp8: broken (valid: a)",
    ]


def test_parameters_that_no_stage_holds_are_a_problem(plan):
    _, _, _, first, second, *_ = parts_of(plan.jobs)
    (problem,) = problems_of([answer(first, count=40), answer(second, count=50)])
    assert str(problem) == (
        "fsdp8_tp2_pp2: parallelism.pp: the stages hold 90 parameters, the model has 100"
    )


def test_gpu_hours_follow_from_tokens_and_the_stated_throughput(plan):
    control, seed = plan.job("fsdp8"), next(job for job in plan.jobs if job.role is Role.SEED)
    step = 32 * 8192 / 5000 / 3600
    repeats = 3 * 3000 * step
    # The control, three test sets, and one step each of the reference and the matched control:
    # frozen steps need converge's own loader, and these sets read torchtitan's dataset.
    in_all = repeats + (4 * 3000 + 2) * step
    assert gpu_hours(control, 5000) == pytest.approx(3000 * step)
    frozen = replace(control, frozen=16)
    assert gpu_hours(frozen, 5000) == pytest.approx(3016 * step)
    assert gpu_hours(seed, 5000) == 0
    said = told._cost(plan, 5000)
    assert said.startswith(f"cost: {in_all:,.1f} GPU-hours at 5,000 tokens per second and GPU if")
    assert f"of the whole, {repeats:,.1f} are for repeats" in said
    assert "--throughput" in told._cost(plan, None)


def test_a_dry_run_needs_the_toolchain_and_says_how_to_build_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    assert main(["plan", str(LLAMA), "--dry-run", "--store", str(tmp_path)]) == 2
    assert "converge toolchain build torchtitan-0.3.0" in capsys.readouterr().err
