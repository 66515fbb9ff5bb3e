"""Every integrity check: evidence that it must pass, and evidence that it must not."""

import math
from dataclasses import replace

import pytest
from judge_examples import (
    LOSSES,
    NORMS,
    STEPS,
    foreign,
    in_force,
    judge,
    run,
    spec,
    truncated,
    with_signals,
    without_first_step,
)

from converge_harness.judge import calibrate
from converge_harness.model import (
    InForce,
    Judgement,
    Outcome,
    Parallelism,
    RankError,
    RunStatus,
    Technique,
    Verdict,
)

CONTROL = run()
CONTROL_SPEC = spec()
NAN = math.nan


def answer(verdict: Verdict, name: str):
    return next(check for check in verdict.checks if check.name == name)


def judged(test, control=CONTROL, repeats=(), test_spec=CONTROL_SPEC, **more):
    calibration = calibrate(control, repeats) if repeats else None
    return judge(test, control, calibration, spec=test_spec, control_spec=CONTROL_SPEC, **more)


def test_a_right_run_passes_every_check():
    verdict = judged(run("again"), repeats=(run("rerun"),))
    assert verdict.judgement is Judgement.PASS, verdict
    assert {check.outcome for check in verdict.checks} == {Outcome.PASS}
    assert (verdict.cause, verdict.onset_step, verdict.next_command) == ("", None, "")


# check, a test run that it must not pass, outcome, verdict, words of the detail
BROKEN = {
    "cut at 19 of 20": ("complete", truncated(run("t"), 19), "19 of 20"),
    "ended early": ("complete", replace(run("t"), complete=False), "ended early"),
    "no step": ("complete", truncated(run("t"), 0), "no step"),
    "one step twice": (
        "steps-increase",
        replace(run("t"), steps=(*range(1, 20), 19)),
        "has step 19 twice",
    ),
    "steps backwards": (
        "steps-increase",
        replace(run("t"), steps=(2, 1, *range(3, 21))),
        "has step 1 after step 2",
    ),
    "a later start": ("same-steps", without_first_step(run("t")), "lacks step 1"),
    "a step that only it has": (
        "same-steps",
        replace(run("t"), steps=(*range(1, 20), 21)),
        "lacks step 20",
    ),
    "a hole": (
        "values-present",
        with_signals(run("t"), loss=lambda step, x: None if step == 7 else x),
        "no loss at step 7",
    ),
    "no recomputed norm": (
        "values-present",
        with_signals(run("t"), grad_norm_recomputed=None),
        "has no grad_norm_recomputed",
    ),
    "a short column": (
        "values-present",
        replace(run("t"), signals={**run().signals, "loss": LOSSES[:-1]}),
        "19 values of loss for 20 steps",
    ),
    "other samples": (
        "same-data",
        replace(run("t"), batch_digests=(*CONTROL.batch_digests[:6], *["f" * 16] * 14)),
        "at step 7",
    ),
    "no digests": ("same-data", replace(run("t"), batch_digests=()), "assumed, not proven"),
    "a digest missing": (
        "same-data",
        replace(run("t"), batch_digests=(*CONTROL.batch_digests[:-1], None)),
        "no batch digest at step 20",
    ),
    "ranks disagree": (
        "ranks-see-same-batch",
        replace(run("t"), batch_agrees=(True, False, *[True] * 18)),
        "do not, at step 2",
    ),
    "ranks unknown": (
        "ranks-see-same-batch",
        replace(run("t"), batch_agrees=(True, None, *[True] * 18)),
        "does not record at step 2",
    ),
    "ranks never told": ("ranks-see-same-batch", replace(run("t"), batch_agrees=()), "not record"),
    "fewer tokens": (
        "same-tokens",
        with_signals(run("t"), tokens=lambda step, x: x - 1 if step == 3 else x),
        "at step 3",
    ),
    "tokens not counted": ("same-tokens", with_signals(run("t"), tokens=None), "tokens is missing"),
    "lr restarted": (
        "same-lr",
        with_signals(run("t"), lr=lambda step, x: x / 2 if step > 10 else x),
        "lr is 0.0005 at step 11",
    ),
    "undeclared config": (
        "config-differs-as-declared",
        replace(run("t"), in_force=in_force(config={"training.seq_len": 512})),
        "training.seq_len",
    ),
    "no record": ("named-in-force", replace(run("t"), in_force=None), "no record"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_evidence_is_invalid(case):
    name, test, words = BROKEN[case]
    verdict = judged(test)
    check = answer(verdict, name)
    assert check.outcome is Outcome.INVALID
    assert words in check.detail
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("signal", ["loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed"])
def test_a_value_that_is_not_finite_fails_where_the_controls_is(signal, value):
    test = with_signals(run("t"), **{signal: lambda step, x: value if step == STEPS else x})
    verdict = judged(test)
    assert answer(verdict, "finite").outcome is Outcome.FAIL
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, STEPS)
    assert "training may be right, and the metric or the probe wrong" in verdict.cause


def test_an_all_nan_run_fails():
    test = with_signals(
        run("t"), **dict.fromkeys(("loss", "grad_norm", "loss_recomputed"), lambda *_: NAN)
    )
    verdict = judged(test)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause == "training blew up: loss is nan at step 1, where the control is finite"


# ------------------------------------------------------------------ control

BROKEN_CONTROLS = {
    "crashed": replace(
        CONTROL, status=RunStatus.CRASHED, error=RankError(1, "RuntimeError: no space left")
    ),
    "cut": truncated(CONTROL, 10),
    "empty": truncated(CONTROL, 0),
    "nan": with_signals(CONTROL, loss=lambda step, x: NAN if step == 5 else x),
    "hole": with_signals(CONTROL, loss=lambda step, x: None if step == 5 else x),
    "twice": replace(CONTROL, steps=(*range(1, 20), 19)),
    "ranks disagree": replace(CONTROL, batch_agrees=(False, *[True] * 19)),
    "misreports": with_signals(CONTROL, loss=lambda step, x: 2 * x),
    "no record": replace(CONTROL, in_force=None),
    "unnamed float8": replace(
        CONTROL, in_force=in_force(float8={"modules": 6, "recipe": "tensorwise"})
    ),
}


@pytest.mark.parametrize("case", BROKEN_CONTROLS)
def test_a_broken_control_makes_every_test_invalid_and_is_named(case):
    control = BROKEN_CONTROLS[case]
    for test in (run("t"), with_signals(run("t"), loss=lambda *_: NAN), control):
        verdict = judged(test, control)
        assert verdict.judgement is Judgement.INVALID
        assert "the control fsdp2" in verdict.cause
    if case == "crashed":
        assert "no space left" in verdict.cause


def test_two_nan_curves_do_not_agree():
    curve = foreign("nan", loss=(NAN,) * 5)
    assert judge(curve, curve).judgement is Judgement.INVALID


# ------------------------------------------------------------------ repeats


def test_repeats_that_are_sound_pass():
    ulp = with_signals(run("ulp"), loss=lambda step, x: x * (1 + 1e-7 * step))
    check = answer(judged(run("t"), repeats=(run("rerun"), ulp)), "repeats-sound")
    assert (check.outcome, check.detail) == (
        Outcome.PASS,
        "2 repeats, of which 1 is bit-identical",
    )


BOTH_LOSSES, BOTH_NORMS = ("loss", "loss_recomputed"), ("grad_norm", "grad_norm_recomputed")


@pytest.mark.parametrize(
    ("repeat", "words"),
    [
        (truncated(run("r"), 10), "10 of 20"),
        (with_signals(run("r"), loss=lambda step, x: NAN if step == 3 else x), "loss is nan"),
        (replace(run("r"), batch_digests=("0" * 15 + "f",) * STEPS), "other samples"),
        (without_first_step(run("r")), "lacks step 1"),
        (with_signals(run("r"), loss=lambda step, x: x * 1.5), "fails reported-loss-is-recomputed"),
        (with_signals(run("r"), grad_norm=lambda step, x: x * 3), "reported-grad-norm-is-recomp"),
        (
            with_signals(run("r"), **dict.fromkeys(BOTH_LOSSES, lambda _, x: x * 1.5)),
            "is out of line: its loss",
        ),
        (
            with_signals(run("r"), **dict.fromkeys(BOTH_NORMS, lambda _, x: x * 3)),
            "is out of line: its grad_norm",
        ),
        (with_signals(run("r"), lr=lambda step, x: x * 3), "fails same-lr"),
        (with_signals(run("r"), tokens=lambda step, x: 1), "fails same-tokens"),
        (with_signals(run("r"), grads_missing=lambda step, x: 5), "fails gradients-present"),
    ],
)
def test_a_broken_repeat_never_widens_an_envelope(repeat, words):
    verdict = judged(run("t"), repeats=(run("rerun"), repeat))
    assert verdict.judgement is Judgement.INVALID
    assert words in verdict.cause


# ------------------------------------------------------------------- status


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RunStatus.CRASHED, "crashed: rank 3: ValueError: boom"),
        (RunStatus.HUNG, "hung"),
        (RunStatus.INTERRUPTED, "was interrupted"),
        (RunStatus.SKIPPED, "was not started"),
    ],
)
def test_a_run_that_did_not_end_by_itself_is_an_error(status, words):
    test = replace(truncated(run("t"), 5), status=status, error=RankError(3, "ValueError: boom"))
    verdict = judged(test)
    assert verdict.judgement is Judgement.ERROR
    assert words in verdict.cause
    assert verdict.next_command == "grep -rn Error runs/t/logs"


def test_the_file_that_says_why_a_scheduler_ended_a_run_is_shown_next():
    ended = replace(truncated(run("t"), 5), status=RunStatus.TIMED_OUT, says_why="out.log")
    assert judged(ended).next_command == "cat runs/t/out.log"


def test_a_crash_without_a_word_still_says_how_it_ended():
    verdict = judged(replace(truncated(run("t"), 0), status=RunStatus.HUNG))
    assert verdict.judgement is Judgement.ERROR
    assert "before its first step" in answer(verdict, "complete").detail


def test_a_crash_on_a_recorded_nan_is_a_failure_of_the_numbers():
    test = truncated(with_signals(run("t"), loss=lambda step, x: NAN if step == 5 else x), 5)
    test = replace(test, status=RunStatus.CRASHED, error=RankError(0, "RuntimeError: loss is nan"))
    verdict = judged(test)
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, 5)
    assert "rank 0: RuntimeError: loss is nan" in verdict.cause


# ------------------------------------------------------------ foreign curves


def test_foreign_curves_are_judged_on_what_they_have():
    control = foreign("a", loss=LOSSES, grad_norm=NORMS)
    verdict = judge(control, control)
    assert verdict.judgement is Judgement.PASS
    skipped = {check.name for check in verdict.checks if check.outcome is Outcome.SKIPPED}
    assert {"same-data", "same-lr", "named-in-force", "ranks-see-same-batch"} <= skipped


def test_a_grad_norm_that_went_missing_on_one_side_is_no_pass():
    both, one = foreign("a", loss=LOSSES, grad_norm=NORMS), foreign("b", loss=LOSSES)
    assert judge(one, both).judgement is Judgement.INVALID
    verdict = judge(both, one)
    assert verdict.judgement is Judgement.INVALID
    assert "b has no grad_norm; --without grad_norm compares the loss alone" in verdict.cause
    assert verdict.next_command.endswith(" --without grad_norm")
    assert judge(one, one).judgement is Judgement.PASS
    hole = foreign("c", loss=[None, *LOSSES[1:]])
    assert "--without" not in judge(both, hole).cause


def test_curves_without_a_loss_or_without_anything_never_pass():
    norm = foreign("a", grad_norm=NORMS)
    assert judge(norm, norm).judgement is Judgement.INVALID
    nothing = foreign("a", loss=())
    assert judge(nothing, nothing).judgement is Judgement.INVALID


def test_curves_without_a_common_step_never_pass():
    late = replace(foreign("b", loss=LOSSES), steps=tuple(range(101, 121)))
    verdict = judge(late, foreign("a", loss=LOSSES))
    assert verdict.judgement is Judgement.INVALID


# ---------------------------------------------------------- declared configs


def test_declared_differences_are_fine():
    config = {"parallelism.tensor_parallel_degree": 2, "optimizer.groups[0].lr": 1}
    declared = ["parallelism.tensor_parallel_degree", "optimizer.groups"]
    other = in_force(config={**in_force().config, **config}, declared=declared)
    verdict = judged(replace(run("t"), in_force=other))
    assert verdict.judgement is Judgement.PASS


@pytest.mark.parametrize(
    ("declared", "outcome"),
    [
        (["checkpointing.class", "checkpointing.debug"], Outcome.PASS),
        (["checkpointing.class"], Outcome.INVALID),
        (["checkpointing_of_another"], Outcome.INVALID),
    ],
)
def test_a_declared_table_may_stand_where_the_other_run_has_a_value(declared, outcome):
    """torchtitan 0.3 has no activation checkpointing (None), or a table of a class's keys."""
    common = in_force().config
    table = {"checkpointing.class": "full", "checkpointing.debug": False}
    ours = replace(run("t"), in_force=in_force(config={**common, **table}, declared=declared))
    control = replace(CONTROL, in_force=in_force(config={**common, "checkpointing": None}))
    verdict = judge(ours, control, spec=spec(), control_spec=CONTROL_SPEC)
    assert answer(verdict, "config-differs-as-declared").outcome is outcome


def test_between_toolchains_only_common_keys_are_compared():
    other = in_force(config={**in_force().config, "job.dump_folder": "x"})
    test = replace(run("t"), in_force=other)
    name = "config-differs-as-declared"
    assert answer(judged(test), name).outcome is Outcome.INVALID
    old = replace(CONTROL_SPEC, toolchain="torchtitan-0.2.2")
    assert answer(judged(test, test_spec=old), name).outcome is Outcome.PASS


# ------------------------------------------------------------------- audits

TP2 = Parallelism(dp_shard=2, tp=2)
PP2 = Parallelism(dp_shard=2, pp=2)
FLOAT8 = {"modules": 28, "recipe": "tensorwise", "emulated": True, "tp_styles": 0}
COMPILED = {"regions": 4, "graphs": 5}
FUSED = {"fused_nodes": {"fused_all_gather_matmul": 8, "fused_matmul_reduce_scatter": 8}}

IN_FORCE = {
    "compile": (spec(techniques=(Technique.COMPILE,)), in_force(compile=COMPILED)),
    "float8": (spec(techniques=(Technique.FLOAT8,)), in_force(float8=FLOAT8)),
    "float8 rowwise": (
        spec(techniques=(Technique.FLOAT8_ROWWISE,)),
        in_force(float8={**FLOAT8, "recipe": "rowwise"}),
    ),
    "float8 tp": (
        spec(parallelism=TP2, techniques=(Technique.FLOAT8, Technique.FLOAT8_TP)),
        in_force(TP2, float8={**FLOAT8, "tp_styles": 12}),
    ),
    "async tp": (
        spec(parallelism=TP2, techniques=(Technique.COMPILE, Technique.ASYNC_TP)),
        in_force(TP2, compile=COMPILED, async_tp=FUSED),
    ),
    "async tp in Float8": (
        spec(
            parallelism=TP2,
            techniques=(Technique.FLOAT8, Technique.COMPILE, Technique.ASYNC_TP),
        ),
        in_force(
            TP2,
            float8=FLOAT8,
            compile=COMPILED,
            async_tp={"fused_nodes": {"fused_scaled_matmul_reduce_scatter": 4}},
        ),
    ),
    "bf16": (spec(techniques=(Technique.BF16,)), in_force(param_dtype="bfloat16")),
    "interleaved": (
        spec(parallelism=PP2, pipeline_schedule="Interleaved1F1B"),
        in_force(PP2, pipeline_schedule="ScheduleInterleaved1F1B"),
    ),
    "microbatches without a known size": (
        spec(parallelism=PP2, pipeline_schedule="1F1B"),
        in_force(PP2, config={}, pipeline_microbatches=2),
    ),
    "rotation": (
        spec(parallelism=Parallelism(dp_shard=2, cp=2), cp_rotation="alltoall"),
        in_force(Parallelism(dp_shard=2, cp=2), cp_rotation="alltoall"),
    ),
    "backend": (spec(spmd_backend="spmd_types"), in_force(spmd_backend="spmd_types")),
    "no backend": (spec(), in_force(spmd_backend="spmd_types")),
    "inject": (spec(inject="bug.py:scale"), in_force(injected="/abs/bug.py:scale")),
    "without fixes": (spec(without_fixes=("a",)), in_force(without_fixes=["a"])),
    "override": (spec(overrides={"training.seq_len": 256}), in_force()),
    "accumulation": (
        spec(),
        in_force(local_batch_size=2, gradient_accumulation_steps=2),
    ),
    "named by the train config": (
        spec(settings={"compile": {"enable": True}, "model": {"converters": ["quantize.float8"]}}),
        in_force(compile=COMPILED, float8=FLOAT8),
    ),
    "named by an override": (
        spec(overrides={"training.dtype": "bfloat16"}),
        in_force(param_dtype="bfloat16", config={"training.dtype": "bfloat16"}),
    ),
    "override in a list": (
        spec(overrides={"optimizer.param_groups[0].optimizer_kwargs.lr": 1e-3}),
        in_force(config={"optimizer.param_groups[0].optimizer_kwargs.lr": 0.001}),
    ),
    "no checkpointing": (
        spec(overrides={"activation_checkpoint.mode": "none"}),
        in_force(config={"activation_checkpoint": None}),
    ),
    "full checkpointing": (
        spec(overrides={"activation_checkpoint.mode": "full"}),
        in_force(config={"activation_checkpoint.preserve_rng_state": True}),
    ),
    "selective checkpointing": (
        spec(overrides={"activation_checkpoint.mode": "selective"}),
        in_force(config={"activation_checkpoint.force_recompute_mm_shapes_by_fqns": []}),
    ),
}


@pytest.mark.parametrize("case", IN_FORCE)
def test_what_is_named_and_in_force_passes(case):
    test_spec, ran = IN_FORCE[case]
    verdict = judged(replace(run("t"), in_force=ran), test_spec=test_spec)
    assert answer(verdict, "named-in-force").outcome is Outcome.PASS
    assert answer(verdict, "nothing-unnamed").outcome is Outcome.PASS


NOT_IN_FORCE = {
    # C: async TP that never fuses; D: Float8 TP styles unreachable; E: rotation ignored;
    # G: the emulated converter drops the recipe.
    "C": (
        spec(parallelism=TP2, techniques=(Technique.COMPILE, Technique.ASYNC_TP)),
        in_force(TP2, compile=COMPILED, async_tp={"fused_nodes": {"fused_all_gather_matmul": 0}}),
        "async_tp is named but not in force: no fused node in any graph",
    ),
    "D": (
        spec(parallelism=TP2, techniques=(Technique.FLOAT8, Technique.FLOAT8_TP)),
        in_force(TP2, float8=FLOAT8),
        "float8_tp is named but not in force: no Float8 TP style",
    ),
    "E": (
        spec(parallelism=Parallelism(dp_shard=2, cp=2), cp_rotation="alltoall"),
        in_force(Parallelism(dp_shard=2, cp=2), cp_rotation="allgather"),
        "CP rotation alltoall is named, allgather is in force",
    ),
    "G": (
        spec(techniques=(Technique.FLOAT8_ROWWISE,)),
        in_force(float8=FLOAT8),
        "float8_rowwise is named but not in force: the recipe is tensorwise",
    ),
    "backend": (
        spec(spmd_backend="spmd_types"),
        in_force(spmd_backend="partial_dtensor"),
        "SPMD backend spmd_types is named, partial_dtensor is in force",
    ),
    "backend not seen": (
        spec(spmd_backend="spmd_types"),
        in_force(),
        "SPMD backend spmd_types is named, None is in force",
    ),
    "no float8": (spec(techniques=(Technique.FLOAT8,)), in_force(), "no Float8 module"),
    "no compile": (spec(techniques=(Technique.COMPILE,)), in_force(), "no compiled region"),
    "no graph": (
        spec(techniques=(Technique.COMPILE,)),
        in_force(compile={"regions": 4, "graphs": 0}),
        "no graph was compiled",
    ),
    "no bf16": (spec(techniques=(Technique.BF16,)), in_force(), "parameters are float32"),
    "no tp": (spec(parallelism=TP2), in_force(), "tp 2 is named, 1 is in force; a world of 4"),
    "other schedule": (
        spec(parallelism=PP2, pipeline_schedule="Interleaved1F1B"),
        in_force(PP2),
        "schedule Interleaved1F1B is named, Schedule1F1B is in force",
    ),
    "other microbatches": (
        spec(parallelism=PP2),
        in_force(PP2, pipeline_microbatches=2),
        "4 pipeline microbatches are named, 2 are in force",
    ),
    "too few microbatches": (
        spec(parallelism=PP2),
        in_force(PP2, config={}, pipeline_microbatches=1),
        "1 pipeline microbatches are in force for 2 stages",
    ),
    "no accumulation": (
        spec(),
        in_force(local_batch_size=2),
        "8 samples were read in a step, but 2 x dp 2 x 1 accumulation steps make 4",
    ),
    "batches unknown": (spec(), in_force(local_batch_size=None), "not known"),
    "override ignored": (
        spec(overrides={"training.seq_len": 512}),
        in_force(),
        "training.seq_len = 512 is named, 256 is in force",
    ),
    "override nowhere": (
        spec(overrides={"training.sequence": 512}),
        in_force(),
        "training.sequence = 512 is named but cannot be verified",
    ),
    "no config": (
        spec(overrides={"training.seq_len": 256}),
        in_force(config={}),
        "training.seq_len = 256 is named but cannot be verified",
    ),
    "no such checkpointing": (
        spec(overrides={"activation_checkpoint.mode": "full"}),
        in_force(config={"activation_checkpoint": None}),
        "activation_checkpoint.mode = full is named, none is in force",
    ),
    "fix left in": (spec(without_fixes=("a",)), in_force(), "without_fixes a is named"),
    "inject ignored": (spec(inject="bug.py:scale"), in_force(), "inject bug.py:scale is named"),
    "nothing known": (spec(), InForce(), "dp_shard 2 is named, None is in force"),
}


@pytest.mark.parametrize("case", NOT_IN_FORCE)
def test_what_is_named_but_not_in_force_is_invalid_however_good_the_numbers(case):
    test_spec, ran, words = NOT_IN_FORCE[case]
    verdict = judged(replace(run("t"), in_force=ran), test_spec=test_spec)
    assert verdict.judgement is Judgement.INVALID
    assert words in answer(verdict, "named-in-force").detail


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (in_force(float8=FLOAT8), "Float8 is in force (28 modules)"),
        (in_force(float8={**FLOAT8, "modules": 0, "tp_styles": 3}), "Float8 TP is in force"),
        (in_force(compile=COMPILED), "compile is in force (4 regions)"),
        (in_force(async_tp=FUSED), "async TP is in force (16 fused nodes)"),
        (in_force(param_dtype="bfloat16"), "parameters are bfloat16"),
        (in_force(pipeline_schedule="Schedule1F1B"), "schedule Schedule1F1B is in force"),
    ],
)
def test_what_nobody_named_is_invalid(ran, words):
    verdict = judged(replace(run("t"), in_force=ran))
    assert verdict.judgement is Judgement.INVALID
    assert words in answer(verdict, "nothing-unnamed").detail
    control = replace(CONTROL, in_force=ran)
    assert words in judged(run("t"), control).cause


AUDITED = ("control-in-force", "named-in-force", "nothing-unnamed")


class OwnAudit:
    """The audit of somebody else's trainer: of the length of sequences, and of FlexAttention."""

    def not_in_force(self, spec, ran):
        named = spec.setting("training.seq_len")
        if ran.seq_len != named:
            yield f"samples of {named} tokens are named, they have {ran.seq_len}"

    def not_named(self, spec, ran):
        if ran.attention == "flex":
            yield "FlexAttention is in force but not named"


@pytest.mark.parametrize(
    ("ran", "check", "words"),
    [
        (in_force(seq_len=128), "named-in-force", "samples of 256 tokens are named, they have 128"),
        (in_force(attention="flex"), "nothing-unnamed", "FlexAttention is in force but not named"),
    ],
)
def test_a_trainer_of_ones_own_brings_its_audit(ran, check, words):
    trainer = replace(CONTROL_SPEC.trainer, audit=OwnAudit())
    named = spec(settings={"training": {"seq_len": 256}}, trainer=trainer)
    right = judge(run("t"), CONTROL, spec=named, control_spec=named)
    assert {answer(right, name).outcome for name in AUDITED} == {Outcome.PASS}
    wrong = judge(replace(run("t"), in_force=ran), CONTROL, spec=named, control_spec=named)
    assert wrong.judgement is Judgement.INVALID
    assert answer(wrong, check).detail == words
    of_control = judge(run("t"), replace(CONTROL, in_force=ran), spec=named, control_spec=named)
    assert answer(of_control, "control-in-force").detail == f"the control fsdp2: {words}"


@pytest.mark.parametrize("of_control", [True, False])
def test_without_an_audit_of_the_trainer_no_run_passes(of_control):
    unaudited = spec(trainer=replace(CONTROL_SPEC.trainer, audit=None))
    control_spec = unaudited if of_control else CONTROL_SPEC
    verdict = judge(run("t"), CONTROL, spec=unaudited, control_spec=control_spec)
    assert verdict.judgement is Judgement.INVALID
    found = answer(verdict, "control-in-force" if of_control else "named-in-force")
    assert found.outcome is Outcome.INVALID
    assert found.detail == (
        "the trainer 'torchtitan' has no audit that compares what a set names with what ran: "
        "give its TrainerSpec one (docs/extension.md)"
    )
