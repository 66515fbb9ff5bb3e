"""What a verdict on a set of an experiment offers to type next."""

from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.matrix.judge import next_command
from converge_harness.matrix.load import load_plan
from converge_harness.model import (
    Ask,
    Check,
    Evidence,
    Judgement,
    Launcher,
    Outcome,
    RunStatus,
    Tier,
    Verdict,
)
from converge_harness.trainers import assume_toolchain

SMOKE = Path(__file__).parents[2] / "experiments" / "smoke.toml"
CONTROL = Evidence("fsdp2", "runs/fsdp2-1", (), {})


@pytest.fixture(scope="module")
def plan():
    return load_plan(SMOKE, (), on_gpu=False, find=assume_toolchain)


def verdict(judgement, *invalid):
    checks = tuple(Check(name, "…", Tier.INTEGRITY, Outcome.INVALID) for name in invalid)
    return Verdict("x", "fsdp2", judgement, checks=checks, next_command="grep -rn Error x/logs")


def offered(plan, name, of, report=None, **changed):
    job = plan.job(name)
    of_set = replace(job, spec=replace(job.spec, **changed))
    return next_command(plan, of_set, of, CONTROL, report)


def test_nothing_is_offered_that_only_judges_again(plan):
    for judgement in (Judgement.FAIL, Judgement.INCONCLUSIVE):
        for name in ("ddp2", "mixed_tp2"):
            command = offered(plan, name, verdict(judgement))
            assert command.startswith(f"converge run {SMOKE} --only {name}")


def test_a_failure_of_low_precision_is_explained_in_float32(plan):
    fail = verdict(Judgement.FAIL)
    assert offered(plan, "mixed_tp2", fail).endswith(" --only mixed_tp2 --explain")
    assert "--explain" not in offered(plan, "ddp2", fail)
    # A change of precision that only has to be no worse has no gradients to explain.
    assert "--explain" not in offered(plan, "mixed_tp2", fail, ask=Ask.NO_WORSE)


def test_a_failure_of_several_parts_is_shrunk(plan):
    command = offered(plan, "fsdp2_tp2", verdict(Judgement.FAIL))
    assert command == (
        f"converge shrink {SMOKE} --set fsdp2_tp2  # which of its parts it needs: dp_shard 2, tp 2"
    )
    there = replace(plan, experiment=replace(plan.experiment, launcher=Launcher.SLURM))
    assert "shrink" not in offered(there, "fsdp2_tp2", verdict(Judgement.FAIL))
    assert "shrink" not in offered(plan, "ddp2", verdict(Judgement.FAIL))  # one part


def test_a_failure_that_cannot_be_smaller_is_written_for_others(plan, tmp_path):
    fail, report = verdict(Judgement.FAIL), Path("of tonight")
    repro = (
        "converge repro 'of tonight' --set ddp2  # writes it for others, with a draft of an issue"
    )
    assert offered(plan, "ddp2", fail, report) == repro
    assert "repro" not in offered(plan, "ddp2", fail, report, starts_from_control=True)
    assert "converge shrink" in offered(plan, "fsdp2_tp2", fail, report)
    there = replace(plan, experiment=replace(plan.experiment, launcher=Launcher.SLURM))
    assert "repro" not in offered(there, "ddp2", fail, report)
    # What `converge shrink` wrote is as small as it gets.
    (tmp_path / "shrunk.json").write_text("{}")
    shrunk = replace(plan, experiment=replace(plan.experiment, path=tmp_path / "experiment.toml"))
    assert offered(shrunk, "fsdp2_tp2", fail, report) == repro.replace("ddp2", "fsdp2_tp2")
    assert offered(shrunk, "fsdp2_tp2", fail).startswith("converge run")


@pytest.mark.parametrize("broken", ["control-sound", "repeats-sound", "complete"])
def test_damaged_evidence_is_trained_again(plan, broken):
    assert " --fresh  # " in offered(plan, "ddp2", verdict(Judgement.INVALID, broken))


@pytest.mark.parametrize("status", [RunStatus.CRASHED, RunStatus.HUNG])
def test_a_control_that_crashed_is_mended_first(plan, status):
    crashed = replace(CONTROL, status=status)
    invalid = verdict(Judgement.INVALID, "control-sound")
    assert next_command(plan, plan.job("ddp2"), invalid, crashed, None) == (
        f"converge run {SMOKE} --only ddp2  # once its control runs, whose output is in "
        "runs/fsdp2-1/logs"
    )


def test_what_training_cannot_mend_is_changed_first(plan):
    command = offered(plan, "ddp2", verdict(Judgement.INVALID, "same-tokens", "complete"))
    assert "--fresh" not in command
    assert command.endswith("# after fixing what is named above")


def test_an_open_question_asks_for_more(plan):
    command = offered(plan, "ddp2", verdict(Judgement.INCONCLUSIVE))
    assert command.endswith("# with more steps, or with [seeds]")
    seeds = replace(plan, experiment=replace(plan.experiment, other_seeds=(43,)))
    assert offered(seeds, "ddp2", verdict(Judgement.INCONCLUSIVE)).endswith(
        "more steps, or more seeds"
    )


def test_curves_of_which_no_repeat_shows_the_noise_need_more_than_steps(plan):
    left = Check("loss-envelope", "…", Tier.ENVELOPE, Outcome.INCONCLUSIVE)
    command = offered(plan, "ddp2", replace(verdict(Judgement.INCONCLUSIVE), checks=(left,)))
    assert command.endswith("# after what is named above; no more steps settle it")
    mean = replace(left, name="loss-equivalent", tier=Tier.EQUIVALENCE)
    command = offered(plan, "ddp2", replace(verdict(Judgement.INCONCLUSIVE), checks=(mean,)))
    assert "with more steps" in command


def test_a_crash_shows_where_it_was_said(plan):
    assert offered(plan, "ddp2", verdict(Judgement.ERROR)) == "grep -rn Error x/logs"


def test_a_matrix_of_a_cluster_is_run_there(plan):
    there = replace(plan, experiment=replace(plan.experiment, launcher=Launcher.SLURM))
    assert " --only ddp2 --launcher slurm" in offered(there, "ddp2", verdict(Judgement.FAIL))
