"""Every check of the resume tier: a run that passes it, and runs that must not."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import FSDP2, SAMPLE_STEPS, STEPS, judge, run, samples, spec, with_signals
from resume_examples import (
    BROKEN,
    BROKEN_PASSES,
    ELASTIC,
    ELASTIC_PASSES,
    ELASTIC_SPEC,
    FAULTS,
    ONE,
    RUN,
    SEGMENTS,
    STRUCK,
    a_pass,
    fault_spec,
    nulled,
    ran,
    resumed,
    rows_of,
    state,
    with_digests,
    with_loaded,
    with_pass,
    with_signal,
)

from converge_harness.model import (
    BufferRows,
    CauseClass,
    Column,
    Evidence,
    Fault,
    FaultKind,
    Judgement,
    Loader,
    Outcome,
    Parallelism,
    RankError,
    ReplicaSample,
    RestartOwner,
    RunStatus,
    Segment,
    SetSpec,
    Struck,
    SyntheticData,
    Tier,
)
from converge_harness.report.view.tolerances import notes
from converge_harness.trainers import trainer_of_kind

CONTROL = run("control")
NEW_DATA = tuple(f"{step:016x}" for step in range(900, 900 + STEPS))


def buffers(norm: float | None) -> BufferRows:
    """One buffer of this norm, or none at all."""
    names = () if norm is None else ("router.bias",)
    sketch = np.full((len(names), 64), (norm or 0) / 8)
    return BufferRows(names, np.full(len(names), 4), np.full(len(names), norm or 0.0), sketch)


def with_buffers(saved: float | None, loaded: float | None) -> Evidence:
    """The elastic run whose first checkpoint has a buffer."""
    first = replace(ELASTIC_PASSES[0], saved=(state(8, buffers=buffers(saved)),))
    second = replace(ELASTIC_PASSES[1], loaded=state(8, buffers=buffers(loaded)))
    return replace(ELASTIC, passes=(first, second, ELASTIC_PASSES[2]))


def test_buffers_that_come_back_pass_and_those_that_do_not_are_named():
    right = judged(with_buffers(4.0, 4.0), ELASTIC_SPEC)
    assert right.judgement is Judgement.PASS, right.cause
    assert judged(with_buffers(0.0, 0.0), ELASTIC_SPEC).judgement is Judgement.PASS
    # A mask of -inf, or a buffer whose shape has changed.
    mask = judged(with_buffers(np.inf, np.inf), ELASTIC_SPEC)
    assert mask.judgement is Judgement.PASS, mask.cause
    detail = next(check.detail for check in mask.checks if check.name == "state-restored")
    assert "1 buffer not compared: not finite on either side" in detail
    assert judged(with_buffers(np.nan, np.nan), ELASTIC_SPEC).judgement is Judgement.PASS
    wrong = judged(with_buffers(4.0, 2.0), ELASTIC_SPEC)
    assert wrong.cause_class is CauseClass.STATE
    assert wrong.cause.startswith("buffers lost at the resume: ")


def judged(test: Evidence, test_spec: SetSpec):
    return judge(test, CONTROL, spec=test_spec, control_spec=spec())


def answer(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


def outcomes(verdict):
    return {check.name: check.outcome for check in verdict.checks if check.tier is Tier.RESUME}


def test_a_right_elastic_run_passes():
    verdict = judged(ELASTIC, ELASTIC_SPEC)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert outcomes(verdict) == {
        "passes-continuous": Outcome.PASS,
        "state-restored": Outcome.PASS,
        "data-resumed": Outcome.PASS,
        "replays-agree": Outcome.SKIPPED,
        "segments-as-scheduled": Outcome.PASS,
        "faults-struck": Outcome.SKIPPED,
        "recovers-in-time": Outcome.SKIPPED,
        "torn-never-loaded": Outcome.SKIPPED,
    }


def test_a_run_that_was_broken_and_recovered_passes():
    verdict = judged(BROKEN, fault_spec())
    assert verdict.judgement is Judgement.PASS, verdict.cause
    skipped = {name for name, outcome in outcomes(verdict).items() if outcome is Outcome.SKIPPED}
    assert skipped == {"segments-as-scheduled"}
    recovery = answer(verdict, "recovers-in-time")
    assert recovery.measured == 21.0
    assert recovery.detail == "kill at step 10: 11.0 s; ckpt_torn at step 16: 21.0 s"
    assert answer(verdict, "replays-agree").detail == "5 steps replayed, with equal values"


def test_ordinary_runs_are_not_asked():
    assert outcomes(judged(run("t"), spec())) == {}


def test_a_run_that_should_have_been_resumed_and_left_no_passes_is_invalid():
    for test_spec in (ELASTIC_SPEC, fault_spec()):
        verdict = judged(run("resumed"), test_spec)
        assert verdict.judgement is Judgement.INVALID
        assert outcomes(verdict)["passes-continuous"] is Outcome.INVALID
        assert outcomes(verdict)["state-restored"] is Outcome.INVALID
        assert outcomes(verdict)["data-resumed"] is Outcome.INVALID


PROGRAM = trainer_of_kind("command").default_spec()
FAIL, INVALID = Outcome.FAIL, Outcome.INVALID
LOST = state(8)
EMPTY = {
    "a parameter": (
        {
            "names": LOST.names[:2],
            "sizes": LOST.sizes[:2],
            "parameters": rows_of(LOST.parameters, slice(2)),
            "state_norm": LOST.state_norm[:2],
            "state_sketch": LOST.state_sketch[:2],
            "state_steps": LOST.state_steps[:2],
        },
        "the value of 1 of 3 parameters (tok_embeddings.weight)",
    ),
    "a state": (
        {
            "states": (),
            "state_norm": LOST.state_norm[:, :0],
            "state_sketch": LOST.state_sketch[:, :0],
        },
        "exp_avg of any parameter",
    ),
    "a moment": (
        {"state_norm": LOST.state_norm * np.nan},
        "exp_avg of layers.0.attention.wq.weight",
    ),
    "moments but 0": (
        {"state_norm": LOST.state_norm * 0, "state_sketch": LOST.state_sketch * 0},
        "exp_avg of any parameter but 0",
    ),
    "updates": (
        {"state_steps": LOST.state_steps * np.nan},
        "the optimizer's updates of layers.0.attention.wq.weight",
    ),
}
"""What equals itself, for it says nothing."""
ELASTIC_CASES = {
    "a step lost": (
        "passes-continuous",
        with_pass(ELASTIC, 2, steps=ELASTIC_PASSES[1].steps + 1),
        FAIL,
        "pass 2 loads step 8 and trains step 10 next: step 9 is lost",
    ),
    "a step twice": (
        "passes-continuous",
        with_pass(ELASTIC, 2, steps=ELASTIC_PASSES[1].steps - 1),
        FAIL,
        "pass 2 loads step 8 and trains step 8 next: step 8 is trained twice",
    ),
    "checkpoint ignored": (
        "passes-continuous",
        with_pass(ELASTIC, 2, loaded_step=0, loaded=None),
        FAIL,
        "pass 2 starts from the initial weights although step 8 was saved",
    ),
    "a checkpoint of nowhere": (
        "passes-continuous",
        with_pass(ELASTIC, 2, loaded_step=11, loaded=state(11)),
        FAIL,
        "pass 2 starts from step 11, which no pass before it has trained",
    ),
    "trainer's counter": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, trainer_step=0),
        FAIL,
        "the trainer is at step 0 in pass 2, which loads step 8 (FSDP 2 -> one rank)",
    ),
    "tokens": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, tokens_seen=5000),
        FAIL,
        "tokens seen: 5000 in pass 2, which loads step 8 (FSDP 2 -> one rank), 8000 were saved",
    ),
    "samples": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, samples_consumed=0),
        FAIL,
        "samples consumed: 0 in pass 2",
    ),
    "samples on one side": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, samples_consumed=None),
        INVALID,
        "samples consumed are recorded on one side only",
    ),
    "the schedule": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, schedule_steps=0),
        FAIL,
        "steps of the learning-rate schedule: 0 in pass 2, which loads step 8 (FSDP 2 -> one rank)",
    ),
    "the schedule of one side": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, schedule_steps=None),
        INVALID,
        "steps of the learning-rate schedule are recorded on one side only",
    ),
    "a buffer": (
        "state-restored",
        with_buffers(4.0, 2.0),
        FAIL,
        "the value of 1 of 1 buffers is off by up to 1 (router.bias)",
    ),
    "a buffer that is not loaded": (
        "state-restored",
        with_buffers(4.0, None),
        FAIL,
        "the value of 1 of 1 buffers is missing, zero or NaN (router.bias)",
    ),
    "a buffer that is finite only as it was saved": (
        "state-restored",
        with_buffers(4.0, np.nan),
        FAIL,
        "the value of 1 of 1 buffers is missing, zero or NaN (router.bias)",
    ),
    "a mask that comes back finite": (
        "state-restored",
        with_buffers(np.inf, 4.0),
        FAIL,
        "the value of 1 of 1 buffers is missing, zero or NaN (router.bias)",
    ),
    "updates": (
        "passes-continuous",
        with_loaded(ELASTIC, 2, state_steps=nulled(LOST.state_steps, 1)),
        FAIL,
        "the optimizer counts 0 updates of norm.weight",
    ),
    "nothing told of the load": (
        "passes-continuous",
        with_pass(ELASTIC, 2, loaded=None),
        INVALID,
        "no record of the counters",
    ),
    "nothing told of what was loaded": (
        "passes-continuous",
        with_pass(ELASTIC, 2, loaded_step=None, started=None),
        INVALID,
        "pass 2 has no record of what it loaded",
    ),
    "something else was loaded": (
        "passes-continuous",
        with_pass(ELASTIC, 2, loaded_step=None, loaded=None),
        FAIL,
        "pass 2 started from neither a checkpoint of the run",
    ),
    "no checkpoint": (
        "passes-continuous",
        with_pass(ELASTIC, 1, saved=(), whole=()),
        FAIL,
        "pass 1 has left no checkpoint of step 8",
    ),
    "a save that never returned": (
        "passes-continuous",
        with_pass(ELASTIC, 1, whole=()),
        INVALID,
        "nothing shows that the checkpoint of step 8 of pass 1 was whole",
    ),
    "an end that never came": (
        "segments-as-scheduled",
        with_pass(ELASTIC, 2, ended=False),
        INVALID,
        "segment 2 (steps 9 to 14, one rank) did not come to its end",
    ),
    "a parameter": (
        "state-restored",
        with_loaded(
            ELASTIC,
            2,
            parameters=replace(
                LOST.parameters, sketch=LOST.parameters.sketch * [[1], [1], [1 + 1e-9]]
            ),
        ),
        FAIL,
        "the value of 1 of 3 parameters is off by up to",
    ),
    "moments": (
        "state-restored",
        with_loaded(
            ELASTIC,
            2,
            state_norm=nulled(LOST.state_norm, (slice(None), 1)),
            state_sketch=nulled(LOST.state_sketch, (slice(None), 1)),
        ),
        FAIL,
        "exp_avg_sq of 3 of 3 parameters is missing, zero or NaN",
    ),
    "a state gone": (
        "state-restored",
        with_loaded(
            ELASTIC,
            2,
            states=("exp_avg",),
            state_norm=LOST.state_norm[:, :1],
            state_sketch=LOST.state_sketch[:, :1],
        ),
        FAIL,
        "exp_avg_sq of 3 of 3 parameters",
    ),
    "lr": (
        "state-restored",
        with_loaded(ELASTIC, 2, lr=1e-3 * (1 + 1e-15)),
        FAIL,
        "lr is 0.001000000000000001, 0.001 was saved",
    ),
    "no state saved": (
        "state-restored",
        with_pass(ELASTIC, 1, saved=()),
        INVALID,
        "nothing shows what was restored in pass 2",
    ),
    **{
        f"{name} on neither side": (
            "state-restored",
            with_pass(with_loaded(ELASTIC, 2, **empty), 1, saved=(replace(state(8), **empty),)),
            INVALID,
            f"nothing shows {words} as it was saved",
        )
        for name, (empty, words) in EMPTY.items()
    },
    "data lost": (
        "data-resumed",
        with_digests(ELASTIC, 2, NEW_DATA[:6]),
        FAIL,
        "step 9, right after the resume of pass 2 (FSDP 2 -> one rank), is trained on other",
    ),
    "data from the beginning": (
        "data-resumed",
        with_digests(ELASTIC, 2, RUN.batch_digests[:6]),
        FAIL,
        "those of step 1, so the data started over from the beginning",
    ),
    "data never the control's": (
        "data-resumed",
        with_digests(ELASTIC, 1, NEW_DATA[:8]),
        INVALID,
        "the samples differ at step 1, before any resume",
    ),
    "no digest": (
        "data-resumed",
        with_digests(ELASTIC, 2, (None,) * 6),
        INVALID,
        "no batch digest at step 9 of pass 2",
    ),
    "a segment too few": (
        "segments-as-scheduled",
        replace(ELASTIC, passes=ELASTIC_PASSES[:2]),
        INVALID,
        "segment 3 (steps 15 to 20, FSDP 2) never started",
    ),
    "other ranks": (
        "segments-as-scheduled",
        with_pass(ELASTIC, 2, world_size=2),
        INVALID,
        "segment 2 (steps 9 to 14, one rank) ran on 2 ranks",
    ),
    "a segment that did not end": (
        "segments-as-scheduled",
        with_pass(ELASTIC, 2, ended=False),
        INVALID,
        "segment 2 (steps 9 to 14, one rank) did not come to its end",
    ),
    "tokens of unknown degrees": (
        "passes-continuous",
        with_pass(with_loaded(ELASTIC, 2, tokens_seen=4000), 2, in_force=None),
        INVALID,
        "tokens seen: 4000 in pass 2",
    ),
    "other steps": (
        "segments-as-scheduled",
        resumed(
            a_pass(1, 0, 7, saves=[7], segment=0, ended=True),
            a_pass(2, 7, 14, ONE, saves=[14], segment=1, ended=True),
            ELASTIC_PASSES[2],
        ),
        INVALID,
        "segment 1 (steps 1 to 8, FSDP 2) trained steps 1 to 7",
    ),
    "another segment": (
        "segments-as-scheduled",
        with_pass(ELASTIC, 2, segment=0),
        INVALID,
        "pass 2 should be of segment 2",
    ),
    "other degrees in a pass": (
        "named-in-force",
        with_pass(ELASTIC, 2, in_force=ran(FSDP2)),
        INVALID,
        "dp_shard 1 is named, 2 is in force (pass 2)",
    ),
    "a silent pass": (
        "named-in-force",
        with_pass(ELASTIC, 3, in_force=None),
        INVALID,
        "pass 3 of resumed left no record",
    ),
    "an unnamed technique in a pass": (
        "nothing-unnamed",
        with_pass(ELASTIC, 3, in_force=replace(ran(FSDP2), param_dtype="bfloat16")),
        INVALID,
        "bf16 is not named (pass 3)",
    ),
    "another config in a pass": (
        "config-differs-as-declared",
        with_pass(ELASTIC, 2, in_force=replace(ran(ONE), config={"training.seq_len": 64})),
        INVALID,
        "training.seq_len (pass 2)",
    ),
}

REPEATED = replace(STRUCK[0], index=0, kind="hang")
FAULT_CASES = {
    "a replay on other samples": (
        "replays-agree",
        with_pass(BROKEN, 1, batch_digests=(*RUN.batch_digests[:8], "f" * 16)),
        FAIL,
        "step 9 is trained on other samples (pass 2 after pass 1)",
    ),
    "a replay with another rate": (
        "replays-agree",
        with_signal(BROKEN, 3, "lr", lambda step, x: x * (1 + 1e-15)),
        FAIL,
        "step 13 has lr 0.001000000000000001, 0.001 the first time (pass 3 after pass 2)",
    ),
    "a replay with another loss": (
        "replays-agree",
        with_signal(BROKEN, 3, "loss", lambda step, x: x * (1.001 if step == 14 else 1)),
        FAIL,
        "loss of step 14 is 6.",
    ),
    "late": (
        "recovers-in-time",
        replace(BROKEN, struck=(replace(STRUCK[0], at=1940.0), STRUCK[1])),
        FAIL,
        "kill at step 10: 61.0 s",
    ),
    "late in its first step alone": (
        "recovers-in-time",
        with_signal(BROKEN, 2, "at", lambda step, x: x + 3600 * (step == 9)),
        FAIL,
        "kill at step 10: 3611.0 s",
    ),
    "struck what left nothing": (
        "faults-struck",
        replace(BROKEN, passes=BROKEN_PASSES[1:]),
        INVALID,
        "kill at step 10 struck pass 1, which left no evidence",
    ),
    "never again": (
        "recovers-in-time",
        replace(BROKEN, struck=(STRUCK[0], replace(STRUCK[1], at=9999.0))),
        FAIL,
        "no step ended after the fault ckpt_torn at step 16",
    ),
    "untimed": (
        "recovers-in-time",
        with_signal(BROKEN, 3, "at", lambda step, x: None),
        INVALID,
        "it is not recorded when it ended",
    ),
    "not struck": (
        "faults-struck",
        replace(BROKEN, struck=STRUCK[1:]),
        INVALID,
        "fault 1 (kill at step 10) never struck",
    ),
    "another fault": (
        "faults-struck",
        replace(BROKEN, struck=(REPEATED, STRUCK[1])),
        INVALID,
        "fault 1 (kill at step 10) was hang at step 10",
    ),
    "too many": (
        "faults-struck",
        replace(BROKEN, struck=(*STRUCK, Struck(2, "kill", 18, 3500.0, 3))),
        INVALID,
        "3 faults struck, 2 are named",
    ),
    "a death of no fault": (
        "faults-struck",
        resumed(
            *BROKEN_PASSES[:2],
            a_pass(3, 12, 18, saves=[16]),
            a_pass(4, 16, STEPS, ended=True),
            struck=STRUCK,
        ),
        INVALID,
        "pass 3 died, and not by a fault of the script",
    ),
    "a death before the first line": (
        "faults-struck",
        replace(BROKEN, passes=(*BROKEN_PASSES[:2], replace(BROKEN_PASSES[2], number=4))),
        INVALID,
        "pass 3 left no evidence, and no fault of the script ended it",
    ),
    "a fault of a pass that nobody knows": (
        "faults-struck",
        replace(BROKEN, struck=(replace(STRUCK[0], at=1.0, number=None), STRUCK[1])),
        INVALID,
        "kill at step 10 struck an unknown pass",
    ),
    "another rank": (
        "faults-struck",
        replace(BROKEN, struck=(replace(STRUCK[0], rank=0), STRUCK[1])),
        INVALID,
        "fault 1 (kill at step 10) struck rank 0, rank 1 is named",
    ),
    "a checkpoint passed over": (
        "passes-continuous",
        resumed(
            a_pass(1, 0, 8, saves=[4, 8]),
            a_pass(2, 4, 16, saves=[8, 12, 16]),
            BROKEN_PASSES[2],
            struck=(replace(STRUCK[0], step=9), STRUCK[1]),
        ),
        FAIL,
        "pass 2 starts from step 4 although step 8 was saved",
    ),
    "a checkpoint lost to the next": (
        "passes-continuous",
        resumed(
            *BROKEN_PASSES[:2],
            a_pass(3, 0, STEPS, saves=[4, 8, 12, 16, STEPS], ended=True),
            struck=STRUCK,
        ),
        FAIL,
        (
            "pass 3 starts from the initial weights although step 12 was saved, once ckpt_torn had "
            "torn that of step 16"
        ),
    ),
    "a checkpoint never written": (
        "passes-continuous",
        with_pass(BROKEN, 3, saved=(), whole=()),
        FAIL,
        "pass 3 has left no checkpoint of step 16",
    ),
    "a replay of a step that is not told": (
        "replays-agree",
        resumed(a_pass(1, 0, 8, saves=[4, 8]), *BROKEN_PASSES[1:], struck=STRUCK),
        INVALID,
        "pass 1, which kill struck at step 10, left nothing of step 9",
    ),
    "not torn": (
        "faults-struck",
        replace(BROKEN, struck=(STRUCK[0], replace(STRUCK[1], torn=False))),
        INVALID,
        "fault 2 (ckpt_torn at step 16) left no torn checkpoint",
    ),
    "a fault without effect": (
        "faults-struck",
        replace(BROKEN, struck=(replace(STRUCK[0], number=2), STRUCK[1])),
        INVALID,
        "kill at step 10 did not end pass 2, which went on to step 16",
    ),
    "a fault in a pass that came to its end": (
        "faults-struck",
        replace(BROKEN, struck=(STRUCK[0], replace(STRUCK[1], number=3))),
        INVALID,
        "ckpt_torn at step 16 did not end pass 3, which went on to step 20",
    ),
    "torn and loaded": (
        "torn-never-loaded",
        resumed(*BROKEN_PASSES[:2], a_pass(3, 16, STEPS, ended=True), struck=STRUCK),
        FAIL,
        "pass 3 loads the checkpoint of step 16, which was torn when pass 2 wrote it",
    ),
}


@pytest.mark.parametrize(
    ("test_spec", "case"),
    [
        *((ELASTIC_SPEC, ELASTIC_CASES[name]) for name in ELASTIC_CASES),
        *((fault_spec(), FAULT_CASES[name]) for name in FAULT_CASES),
    ],
    ids=[*ELASTIC_CASES, *FAULT_CASES],
)
def test_a_run_that_must_not_pass(test_spec, case):
    name, test, outcome, words = case
    verdict = judged(test, test_spec)
    found = answer(verdict, name)
    assert found.outcome is outcome, found
    assert words in found.detail
    worst = (Judgement.FAIL,) if outcome is FAIL else (Judgement.INVALID, Judgement.FAIL)
    assert verdict.judgement in worst


def test_a_torn_checkpoint_that_was_written_again_may_be_loaded():
    test = resumed(
        *BROKEN_PASSES[:2],
        a_pass(3, 12, 17, saves=[16]),
        a_pass(4, 16, STEPS, ended=True),
        struck=(*STRUCK, Struck(2, "kill", 18, 3990.0, 3)),
    )
    faults = (*fault_spec().recovery.faults, Fault(FaultKind.KILL, 18))
    assert judged(test, fault_spec(faults=faults)).judgement is Judgement.PASS


@pytest.mark.parametrize("saved", [[8], [4, 8]])
def test_a_program_may_go_on_without_the_checkpoint_for_which_there_was_no_space(saved):
    """Pass 1 goes on from step 4; a checkpoint of it that it says to have saved is none."""
    full = Struck(0, "disk_full", 4, 1003.5, 1, torn=True)
    test = resumed(
        a_pass(1, 0, 9, saves=saved),
        a_pass(2, 8, STEPS, saves=[12, 16], ended=True),
        struck=(full, replace(STRUCK[0], index=1)),
    )
    faults = (Fault(FaultKind.DISK_FULL, 4), Fault(FaultKind.KILL, 10, rank=1))
    verdict = judged(test, fault_spec(faults=faults, within_s=2000.0))
    if saved == [8]:
        assert verdict.judgement is Judgement.PASS, verdict.cause
    else:
        assert verdict.judgement is Judgement.INVALID
        assert verdict.cause.startswith(
            "disk_full at step 4 did not end pass 1, which reported the checkpoint of step 4 as "
            "saved although its writing had failed"
        )


def test_a_death_long_after_a_full_disk_is_not_of_it():
    """Pass 1 trains on without the checkpoint of step 4; what it dies of in step 12 is unknown."""
    full = Struck(0, "disk_full", 4, 1003.5, 1, torn=True)
    test = resumed(
        a_pass(1, 0, 11, saves=[8]), a_pass(2, 8, STEPS, saves=[12, 16], ended=True), struck=(full,)
    )
    faults = (Fault(FaultKind.DISK_FULL, 4),)
    verdict = judged(test, fault_spec(faults=faults, within_s=2000.0))
    assert verdict.judgement is Judgement.INVALID
    assert (
        "pass 1 died, and not by a fault of the script" in answer(verdict, "faults-struck").detail
    )


@pytest.mark.parametrize("kind", [FaultKind.CKPT_TORN, FaultKind.DISK_FULL])
def test_a_write_that_was_no_checkpoint_s_shows_nothing(kind):
    struck = replace(STRUCK[1], kind=kind.value, torn=False)
    faults = (FAULTS[0], Fault(kind, 16))
    verdict = judged(replace(BROKEN, struck=(STRUCK[0], struck)), fault_spec(faults=faults))
    found = answer(verdict, "faults-struck")
    assert found.outcome is INVALID
    assert "not to a file of the checkpoint folder" in found.detail


def test_nan_of_a_fault_is_no_difference_of_a_replay():
    poisoned = Struck(0, "nan_batch", 9, 1008.5, number=1)
    test = replace(BROKEN, struck=(poisoned, STRUCK[1]))
    for signal in ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed"):
        test = with_signal(test, 1, signal, lambda step, x: float("nan") if step == 9 else x)
    faults = (Fault(FaultKind.NAN_BATCH, 9), fault_spec().recovery.faults[1])
    # The step that it struck ends after it, and is no recovery.
    verdict = judged(test, fault_spec(faults=faults, within_s=2000.0))
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert answer(verdict, "recovers-in-time").measured == 2001.0 - 1008.5
    unstruck = judged(replace(test, struck=STRUCK), fault_spec())
    assert answer(unstruck, "replays-agree").outcome is FAIL


@pytest.mark.parametrize(("again", "outcome"), [(1990.0, Outcome.PASS), (1970.0, FAIL)])
def test_a_step_that_a_program_finishes_after_sigterm_is_no_recovery(again, outcome):
    """Pass 1 gets SIGTERM after step 8, and trains step 9 for its last checkpoint."""
    struck = Struck(0, "preempt", 8, again - 1.0, number=1)
    late = 2001.0 - (again - 1.0)
    passes = (a_pass(1, 0, 9, saves=[4, 8, 9]), a_pass(2, 9, STEPS, saves=[12, 16], ended=True))
    times = {**passes[0].signals, "at": Column.of(np.append(np.arange(8.0), again - 0.9))}
    test = resumed(replace(passes[0], signals=times), passes[1], struck=(struck,))
    faults = (Fault(FaultKind.PREEMPT, 8),)
    found = answer(judged(test, fault_spec(faults=faults, within_s=15.0)), "recovers-in-time")
    assert (found.outcome, found.measured) == (outcome, late)


@pytest.mark.parametrize(
    ("restarts", "says"), [("torchrun", "--monitor-interval"), ("harness", "the last rank ended")]
)
def test_where_to_look_for_time_goes_by_who_restarts(restarts, says):
    late = replace(BROKEN, struck=(replace(STRUCK[0], at=1940.0), STRUCK[1]))
    verdict = judged(late, fault_spec(restarts=RestartOwner(restarts)))
    assert verdict.cause_class is CauseClass.RECOVERY
    assert says in verdict.look_at
    assert ("torchrun" in verdict.look_at) is (restarts == "torchrun")


def preempted(first, *later, saves=False):
    struck = Struck(0, "preempt", 8, 1009.0, number=1)
    test = resumed(first, *later, struck=(struck,))
    faults = (Fault(FaultKind.PREEMPT, 8, saves=saves),)
    return judged(test, fault_spec(faults=faults, within_s=2000.0))


def test_a_program_that_was_killed_before_it_stopped_goes_on_from_an_older_checkpoint():
    """It is right to go on; what it trained since then is told, and no failure."""
    rest = {"saves": [8, 12, 16], "ended": True}
    slow = preempted(a_pass(1, 0, 9, saves=[4, 8], whole=(4,)), a_pass(2, 4, STEPS, **rest))
    assert answer(slow, "faults-struck").detail == (
        "1 fault; pass 1 saved no step after SIGTERM at step 8, or not before it was killed: "
        "training goes on from step 4"
    )
    struck = (Struck(0, "kill", 6, 1005.5, number=1, rank=1), Struck(1, "preempt", 7, 2003.9, 2))
    later = judged(  # the second start saved nothing, and the third goes on from the first one's
        resumed(
            a_pass(1, 0, 5, saves=[4]), a_pass(2, 4, 7), a_pass(3, 4, STEPS, **rest), struck=struck
        ),
        fault_spec(
            faults=(Fault(FaultKind.KILL, 6, rank=1), Fault(FaultKind.PREEMPT, 7)), within_s=2000.0
        ),
    )
    assert answer(later, "faults-struck").detail.endswith(": training goes on from step 4")
    stopped = preempted(a_pass(1, 0, 9, saves=[4, 8, 9]), a_pass(2, 9, STEPS, **rest))
    assert answer(stopped, "faults-struck").detail == "1 fault"


def test_a_program_that_should_save_before_it_stops_is_invalid_if_it_saved_nothing():
    rest = a_pass(2, 4, STEPS, saves=[8, 12, 16], ended=True)
    slow = preempted(a_pass(1, 0, 9, saves=[4, 8], whole=(4,)), rest, saves=True)
    assert slow.judgement is Judgement.INVALID
    assert answer(slow, "faults-struck").detail == (
        "pass 1 saved no step after SIGTERM at step 8, or not before it was killed: training goes "
        "on from step 4. By saves = true it saves before it stops, for which it has 30 s: if it "
        "needs longer, raise grace_s"
    )
    rest = a_pass(2, 9, STEPS, saves=[12, 16], ended=True)
    saved = preempted(a_pass(1, 0, 9, saves=[4, 8, 9]), rest, saves=True)
    assert saved.judgement is Judgement.PASS, saved.cause


def test_a_preemption_that_came_too_late_to_stop_anything_says_what_to_do():
    verdict = preempted(a_pass(1, 0, STEPS, saves=[4, 8, 12, 16], ended=True))
    assert verdict.judgement is Judgement.INVALID
    detail = answer(verdict, "faults-struck").detail
    assert "name an earlier step for the fault, or train more steps" in detail


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "every rank ended with exit code 0 after kill at step 6, but …",
            "that of its last command",
        ),
        ("RuntimeError: no", "where the time goes"),
    ],
)
def test_a_restart_that_fails_says_where_to_look(message, words):
    passes = (a_pass(1, 0, 9, saves=[4, 8]), a_pass(2, 8, 8))
    test = resumed(*passes, struck=STRUCK[:1])
    error = RankError(0, message)
    test = replace(test, status=RunStatus.CRASHED, error=error, complete=False)
    verdict = judged(test, fault_spec(faults=fault_spec().recovery.faults[:1]))
    assert verdict.judgement is Judgement.FAIL
    assert message in verdict.cause
    assert words in verdict.look_at


@pytest.mark.parametrize(
    "message",
    ["OSError: [Errno 98] Address already in use", "the server failed to listen: EADDRINUSE"],
)
def test_a_restart_that_finds_its_port_taken_says_nothing_about_training(message):
    """It is not known whose process has the port."""
    passes = (a_pass(1, 0, 9, saves=[4, 8]), a_pass(2, 8, 8))
    test = resumed(*passes, struck=STRUCK[:1])
    test = replace(test, status=RunStatus.CRASHED, error=RankError(0, message), complete=False)
    verdict = judged(test, fault_spec(faults=fault_spec().recovery.faults[:1]))
    assert verdict.judgement is Judgement.ERROR
    assert f"rank 0: {message}" in verdict.cause
    found = answer(verdict, "recovers-in-time")
    assert found.outcome is Outcome.INVALID
    assert found.detail.startswith("after the fault kill at step ")
    assert found.detail.endswith(f" a port was taken: rank 0: {message}")


@pytest.mark.parametrize(
    ("torn", "words"), [(True, "which may be half of one"), (False, "where the time goes")]
)
def test_a_program_that_never_goes_on_after_a_torn_save_is_told_to_rename(torn, words):
    struck = Struck(0, "disk_full", 8, 1950.0, 1, torn=torn)
    test = resumed(a_pass(1, 0, 8, saves=[4]), a_pass(2, 4, 4), struck=(struck,))
    error = RankError(0, "RuntimeError: PytorchStreamReader failed reading zip archive")
    test = replace(test, status=RunStatus.CRASHED, error=error, complete=False)
    script = fault_spec(faults=(Fault(FaultKind.DISK_FULL, 8),))
    verdict = judged(test, replace(script, trainer=PROGRAM))
    assert verdict.cause.startswith("no recovery in time: ")
    assert words in verdict.look_at


def test_a_fault_that_broke_nothing_is_no_failure_to_recover():
    faults = (Fault(FaultKind.KILL, 10), Fault(FaultKind.JOIN, 12))
    struck = (STRUCK[0], Struck(1, "join", 12, 9999.0, 3))
    test = resumed(BROKEN_PASSES[0], a_pass(3, 8, STEPS, saves=[12, 16], ended=True), struck=struck)
    verdict = judged(test, fault_spec(faults=faults, within_s=2000.0))
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause.startswith("join at step 12 did not end pass 3")


def test_a_join_must_make_the_world_larger():
    faults = (Fault(FaultKind.JOIN, 9), Fault(FaultKind.CKPT_TORN, 16))
    struck = (Struck(0, "join", 9, 1990.0, 1), STRUCK[1])
    joined = resumed(a_pass(1, 0, 9, ONE, saves=[4, 8]), *BROKEN_PASSES[1:], struck=struck)
    verdict = judged(joined, fault_spec(faults=faults, nodes=(1, 2)))
    assert verdict.judgement is Judgement.PASS, verdict.cause
    alone = judged(
        resumed(
            a_pass(1, 0, 9, ONE, saves=[4, 8]),
            a_pass(2, 8, 16, ONE, saves=[12, 16]),
            a_pass(3, 12, STEPS, ONE, saves=[16, STEPS], ended=True),
            struck=struck,
        ),
        fault_spec(faults=faults, nodes=(1, 2)),
    )
    detail = answer(alone, "faults-struck").detail
    assert detail == "2 of 2 nodes should go on with 2 ranks, pass 2 has one rank"
    assert alone.judgement is Judgement.INVALID


def test_a_lost_node_must_make_the_world_smaller():
    faults = (Fault(FaultKind.AGENT_LOSS, 9), Fault(FaultKind.CKPT_TORN, 16))
    struck = (Struck(0, "agent_loss", 9, 1990.0, 1), STRUCK[1])
    lost = resumed(
        BROKEN_PASSES[0],
        a_pass(2, 8, 16, ONE, saves=[12, 16]),
        a_pass(3, 12, STEPS, ONE, saves=[16, STEPS], ended=True),
        struck=struck,
    )
    verdict = judged(lost, fault_spec(faults=faults, nodes=(1, 2)))
    assert verdict.judgement is Judgement.PASS, verdict.cause
    verdict = judged(replace(BROKEN, struck=struck), fault_spec(faults=faults, nodes=(1, 2)))
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause == "1 of 2 nodes should go on with one rank, pass 2 has 2 ranks"


def test_a_run_starts_with_the_nodes_of_its_script():
    """Two nodes, unless one is to join first: a late start of the second is another experiment."""
    test = resumed(a_pass(1, 0, 9, ONE, saves=[4, 8]), *BROKEN_PASSES[1:], struck=STRUCK)
    verdict = judged(test, fault_spec(nodes=(1, 2)))
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause == "2 of 2 nodes should start with 2 ranks, pass 1 has one rank"
    faults = (Fault(FaultKind.JOIN, 9), Fault(FaultKind.CKPT_TORN, 16))
    struck = (Struck(0, "join", 9, 1990.0, 1), STRUCK[1])
    test = resumed(BROKEN_PASSES[0], *BROKEN_PASSES[1:], struck=struck)
    detail = answer(judged(test, fault_spec(faults=faults, nodes=(1, 2))), "faults-struck").detail
    assert detail == "1 of 2 nodes should start with one rank, pass 1 has 2 ranks"


def test_a_node_that_no_fault_took_away_is_missed():
    test = resumed(
        BROKEN_PASSES[0], a_pass(2, 8, 16, ONE, saves=[12, 16]), BROKEN_PASSES[2], struck=STRUCK
    )
    assert judged(test, fault_spec()).judgement is Judgement.INVALID
    verdict = judged(test, fault_spec(nodes=(1, 2)))
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause == "2 of 2 nodes should go on with 2 ranks, pass 2 has one rank"


def test_a_run_that_never_loaded_a_checkpoint_tests_no_resume():
    faults = (Fault(FaultKind.KILL, 3),)
    test = resumed(
        a_pass(1, 0, 2),
        a_pass(2, 0, STEPS, saves=[4, 8, 12, 16], ended=True),
        struck=(Struck(0, "kill", 3, 1990.0, 1),),
    )
    verdict = judged(test, fault_spec(faults=faults))
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause == ("no pass loaded a checkpoint of the run, so no resume was tested")


def test_our_loader_has_to_count_its_samples():
    train_config = replace(ELASTIC_SPEC.train_config, data=SyntheticData())
    test_spec = replace(ELASTIC_SPEC, train_config=train_config)
    assert judged(ELASTIC, test_spec).judgement is Judgement.PASS
    unknown = {"samples_consumed": None}
    silent = with_pass(with_loaded(ELASTIC, 2, **unknown), 1, saved=(replace(state(8), **unknown),))
    assert judged(silent, ELASTIC_SPEC).judgement is Judgement.PASS
    verdict = judged(silent, test_spec)
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause.startswith("no record of the samples consumed of pass 2")
    # A program reads the same corpus by a loader of its own, of which nothing is known.
    can = replace(test_spec.trainer.can, counts_tokens=False)
    of_program = replace(test_spec, trainer=replace(test_spec.trainer, can=can))
    assert judged(silent, of_program).judgement is Judgement.PASS


def test_a_control_that_was_itself_resumed_shows_nothing():
    verdict = judge(run("t"), replace(ELASTIC, name="control"), spec=spec(), control_spec=spec())
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause.startswith("the control was itself resumed")


def test_a_later_replay_of_a_nan_step_is_compared():
    """The first values were made NaN by a fault, so the second are what the third must be."""
    faults = (Fault(FaultKind.NAN_BATCH, 9), Fault(FaultKind.KILL, 11))
    struck = (Struck(0, "nan_batch", 9, 1008.5, 1), Struck(1, "kill", 11, 2990.0, 2))
    test = resumed(
        a_pass(1, 0, 9, saves=[4, 8]),
        a_pass(2, 8, 10),
        a_pass(3, 8, STEPS, saves=[12, 16], ended=True),
        struck=struck,
    )
    test = with_signal(test, 1, "loss", lambda step, x: float("nan") if step == 9 else x)
    test_spec = fault_spec(faults=faults, within_s=2000.0)
    verdict = judged(test, test_spec)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    other = with_signal(test, 2, "loss", lambda step, x: x * (1.001 if step == 9 else 1))
    found = answer(judged(other, test_spec), "replays-agree")
    assert found.outcome is FAIL
    assert "loss of step 9" in found.detail
    assert "pass 3 after pass 2" in found.detail


def test_a_count_of_tokens_that_is_one_ranks_own_is_reported_and_no_failure():
    """torchtitan restores the count of one rank on every rank: half of it on half the ranks."""
    verdict = judged(with_loaded(ELASTIC, 2, tokens_seen=4000), ELASTIC_SPEC)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    detail = answer(verdict, "passes-continuous").detail
    assert "tokens seen: 4000 in pass 2" in detail
    assert "8000 were saved, because the trainer restores the count of one rank" in detail


def test_a_count_of_tokens_that_is_off_is_noted_with_its_steps():
    """The second resume doubles what was off by then, and what one rank had counted since."""
    saved = state(14, tokens_seen=10_000)
    test = with_loaded(with_loaded(ELASTIC, 2, tokens_seen=4000), 3, tokens_seen=20_000)
    test = with_pass(test, 2, saved=(saved,))
    (note,) = notes([judged(test, ELASTIC_SPEC)], {"resumed": test}, {}, {})
    assert "resumed (by -4,000 from step 9 on, by +6,000 from step 15 on)" in note
    assert "training itself does not change" in note
    assert notes([judged(ELASTIC, ELASTIC_SPEC)], {"resumed": ELASTIC}, {}, {}) == ()


# ------------------------------------------------- degrees that change on the way


DDP2 = Parallelism(dp_replicate=2)
REPLICATED = Segment(8, DDP2, 4), Segment(14, ONE, 4), Segment(STEPS, FSDP2, 4)


def copies(first: int, last: int) -> tuple[ReplicaSample, ...]:
    """Copies that were compared from a step to another, and nowhere else."""
    kinds = {"parameter": 3, "gradient": 3}
    return tuple(
        ReplicaSample(step, kinds if first <= step <= last else {}) for step in SAMPLE_STEPS
    )


def test_copies_are_expected_where_the_pass_of_a_step_has_them():
    passes = (a_pass(1, 0, 8, DDP2, saves=[8], segment=0, ended=True), *ELASTIC_PASSES[1:])
    named = replace(ELASTIC_SPEC, parallelism=DDP2, segments=REPLICATED)
    verdict = judged(resumed(*passes, replicas=copies(0, 8)), named)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    found = answer(judged(resumed(*passes, replicas=copies(4, 8)), named), "replicas-agree")
    assert (found.outcome, found.onset) == (Outcome.INVALID, 0)

    last = a_pass(3, 14, STEPS, DDP2, saves=[STEPS], segment=2, ended=True)
    named = replace(ELASTIC_SPEC, segments=(*SEGMENTS[:2], Segment(STEPS, DDP2, 4)))
    verdict = judged(resumed(*ELASTIC_PASSES[:2], last, replicas=copies(16, 16)), named)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    found = answer(judged(resumed(*ELASTIC_PASSES[:2], last), named), "replicas-agree")
    assert (found.outcome, found.onset) == (Outcome.INVALID, 16)


def test_a_factor_is_named_by_the_degrees_of_the_pass_that_it_begins_in():
    segments = (Segment(8, ONE, 4), Segment(14, DDP2, 4), Segment(STEPS, ONE, 4))
    passes = (
        a_pass(1, 0, 8, ONE, saves=[8], segment=0, ended=True),
        a_pass(2, 8, 14, DDP2, saves=[14], segment=1, ended=True),
        a_pass(3, 14, STEPS, ONE, saves=[STEPS], segment=2, ended=True),
    )
    summed = dict.fromkeys(
        ("grad_norm", "grad_norm_recomputed"),
        lambda step, value: 2 * value if 9 <= step <= 14 else value,
    )
    test = with_signals(resumed(*passes, replicas=copies(9, 14)), **summed)
    verdict = judged(test, replace(ELASTIC_SPEC, parallelism=ONE, segments=segments))
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause.startswith(
        "from step 9 on gradients are scaled by 2, which equals the replicate degree (2)"
    ), verdict.cause


# ------------------------------------------------------------------- causes


def test_lost_data_is_named_with_the_step_and_the_degrees():
    changed = with_digests(ELASTIC, 2, RUN.batch_digests[:6])
    for signal in ("loss", "loss_recomputed"):
        changed = with_signals(changed, **{signal: lambda step, x: x * (1.01 if step > 8 else 1.0)})
    verdict = judged(changed, ELASTIC_SPEC)
    assert verdict.judgement is Judgement.FAIL
    assert (verdict.cause_class, verdict.onset_step) == (CauseClass.DATA, 9)
    assert "data order is lost at the resume: step 9, right after" in verdict.cause
    assert "FSDP 2 -> one rank" in verdict.cause
    assert "started over from the beginning" in verdict.cause
    assert "note that" not in verdict.cause
    assert "components/dataloader.py" in verdict.look_at


def test_lost_data_of_streaming_point_at_its_own_settings():
    test = with_digests(ELASTIC, 2, NEW_DATA[:6])
    train_config = replace(ELASTIC_SPEC.train_config, loader=Loader.STREAMING)
    look_at = judged(test, replace(ELASTIC_SPEC, train_config=train_config)).look_at
    for name in ("num_canonical_nodes", "batching_method", "epoch_size", "shuffle_algo"):
        assert name in look_at
    assert "components/dataloader.py" not in look_at


OTHER_WEIGHTS = samples(initial=lambda name, values: values[::-1].copy())
TORN_FIRST = (
    a_pass(1, 0, 4, saves=[4]),
    a_pass(2, 0, 9, saves=[4, 8], loaded_step=None),
    a_pass(3, 8, STEPS, saves=[12, 16], ended=True),
)
"""The only checkpoint is torn, and the restart loads nothing at all."""
TORN_FIRST_STRUCK = (
    Struck(0, "ckpt_torn", 4, 1990.0, number=1, torn=True),
    Struck(1, "kill", 10, 2990.0, number=2),
)
TORN_FIRST_SPEC = fault_spec(faults=(Fault(FaultKind.CKPT_TORN, 4), Fault(FaultKind.KILL, 10)))


def test_a_restart_that_loads_nothing_is_the_cause_of_other_weights():
    test = resumed(*TORN_FIRST, samples=OTHER_WEIGHTS, struck=TORN_FIRST_STRUCK)
    verdict = judged(test, TORN_FIRST_SPEC)
    assert verdict.cause_class is CauseClass.STATE
    assert verdict.cause.startswith(
        "state is lost at the resume: while no checkpoint of the run was whole, pass 2 started "
        "from neither a checkpoint of the run nor the job's seed checkpoint, and so not "
        "with the control's weights: "
    ), verdict.cause
    assert "differ before the first step (worst " in verdict.cause
    assert "checkpoint.initial_load_path" in verdict.look_at
    assert "checkpoint.folder" in verdict.look_at


def test_a_restart_that_loads_nothing_although_a_checkpoint_is_whole_chose_wrongly():
    test = resumed(*TORN_FIRST, samples=OTHER_WEIGHTS, struck=(TORN_FIRST_STRUCK[1],))
    verdict = judged(test, TORN_FIRST_SPEC)
    assert verdict.cause.startswith("state is lost at the resume: pass 2 started from neither")
    assert "checkpoint.load_step" in verdict.look_at


def test_a_first_pass_with_other_weights_is_no_loss_of_a_resume():
    right = a_pass(2, 0, 9, saves=[4, 8])
    nowhere = replace(TORN_FIRST[0], loaded_step=None)
    for first in (TORN_FIRST[0], nowhere):
        passes = (first, right, TORN_FIRST[2])
        test = resumed(*passes, samples=OTHER_WEIGHTS, struck=TORN_FIRST_STRUCK)
        verdict = judged(test, TORN_FIRST_SPEC)
        assert verdict.cause.startswith("training does not begin with the control's weights: ")
        assert "initialises again" in verdict.look_at


def test_a_config_that_leaves_the_loader_out_is_named():
    left_out = {"checkpoint.exclude_from_loading": ["dataloader"]}
    test = with_digests(ELASTIC, 2, NEW_DATA[:6])
    config = {**ran(ONE).config, **left_out}
    test = with_pass(test, 2, in_force=replace(ran(ONE), config=config))
    verdict = judged(test, ELASTIC_SPEC)
    assert verdict.cause_class is CauseClass.DATA
    assert "checkpoint.exclude_from_loading leaves out dataloader" in verdict.cause


def test_a_schedule_that_is_not_restored_is_named_before_it_changes_the_rate():
    verdict = judged(with_loaded(ELASTIC, 2, schedule_steps=0), ELASTIC_SPEC)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is CauseClass.LEARNING_RATE
    assert verdict.cause.startswith("the learning-rate schedule is lost at the resume: steps of")


def test_a_schedule_that_starts_over_is_named_with_the_pass():
    """The rate of the optimizer came back, and the schedule that sets the next one did not."""
    left_out = {"checkpoint.exclude_from_loading": ["lr_scheduler"]}
    test = with_signals(
        with_pass(ELASTIC, 2, in_force=replace(ran(ONE), config={**ran(ONE).config, **left_out})),
        lr=lambda step, rate: rate if step < 10 else 5e-4,
        loss=lambda step, loss: loss if step < 10 else loss * 1.01,
        loss_recomputed=lambda step, loss: loss if step < 10 else loss * 1.01,
    )
    verdict = judged(test, ELASTIC_SPEC)
    assert verdict.cause_class is CauseClass.LEARNING_RATE
    assert (
        "; step 10 is part of pass 2, which loads step 8 (FSDP 2 -> one rank); "
        "checkpoint.exclude_from_loading leaves out lr_scheduler" in verdict.cause
    )


CAUSES = {
    "moments": (CauseClass.STATE, "optimizer state (exp_avg_sq) lost at the resume", 9),
    "a parameter": (CauseClass.STATE, "parameters lost at the resume", 9),
    "lr": (CauseClass.STATE, "the learning rate lost at the resume", 9),
    "tokens": (CauseClass.METRIC_ONLY, "only the trainer's count of tokens is lost", 9),
    "samples": (CauseClass.STATE, "samples consumed: 0", 9),
    "checkpoint ignored": (CauseClass.STATE, "although step 8 was saved", 1),
    "a checkpoint lost to the next": (CauseClass.STATE, "had torn that of step 16", 1),
    "no checkpoint": (CauseClass.STATE, "a checkpoint is missing: pass 1 has left", 8),
    "a replay with another loss": (CauseClass.REPLAY, "a replay differs from the first time", 14),
    "late": (CauseClass.RECOVERY, "no recovery in time: kill at step 10: 61.0 s", 10),
    "never again": (CauseClass.RECOVERY, "no step ended after the fault", 16),
    "torn and loaded": (CauseClass.STATE, "a torn checkpoint was loaded", 17),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_says_what_a_resume_lost(name):
    cases = {**ELASTIC_CASES, **FAULT_CASES}
    test_spec = ELASTIC_SPEC if name in ELASTIC_CASES else fault_spec()
    verdict = judged(cases[name][1], test_spec)
    kind, words, onset = CAUSES[name]
    assert (verdict.cause_class, verdict.onset_step) == (kind, onset), verdict.cause
    assert words in verdict.cause
    assert verdict.look_at
    assert ("rename" in verdict.look_at) == (name == "a checkpoint lost to the next")


def test_a_run_that_was_wrong_before_the_resume_is_not_called_lost_there():
    test = with_digests(ELASTIC, 2, NEW_DATA[:6])
    for signal in ("grad_norm", "grad_norm_recomputed"):
        test = with_signals(test, **{signal: lambda step, x: 2 * x})
    verdict = judged(test, ELASTIC_SPEC)
    assert verdict.cause_class is CauseClass.GRADIENT_SCALE, verdict.cause


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("moments", "what the program writes into its checkpoint"),
        ("checkpoint ignored", "which checkpoint the program loads: {resume_from}"),
        ("no checkpoint", "calls probe.saved(step)"),
        ("other data", "where the loader goes on after a load"),
    ],
)
def test_a_program_is_looked_at_where_it_saves_and_loads(name, words):
    cases = {**ELASTIC_CASES, "other data": ("", with_digests(ELASTIC, 2, NEW_DATA[:6]))}
    verdict = judged(cases[name][1], replace(ELASTIC_SPEC, trainer=PROGRAM))
    assert verdict.judgement is Judgement.FAIL
    assert words in verdict.look_at
    for of_torchtitan in ("exclude_from_loading", "checkpoint.interval", "load_step"):
        assert of_torchtitan not in verdict.look_at


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torn and loaded", "how the program tells a complete checkpoint from one that was only"),
        ("nothing whole", "what the program starts from while no checkpoint is complete"),
        ("tokens", "whether the checkpoint holds the count of tokens of all ranks"),
    ],
)
def test_advice_on_checkpoints_is_that_of_the_trainer(name, words):
    nothing_whole = resumed(*TORN_FIRST, struck=TORN_FIRST_STRUCK)
    test, test_spec = {
        "torn and loaded": (FAULT_CASES["torn and loaded"][1], fault_spec()),
        "nothing whole": (nothing_whole, TORN_FIRST_SPEC),
        "tokens": (ELASTIC_CASES["tokens"][1], ELASTIC_SPEC),
    }[name]
    of_torchtitan = judged(test, test_spec).look_at
    assert words not in of_torchtitan
    assert "torchtitan" in of_torchtitan
    of_program = judged(test, replace(test_spec, trainer=PROGRAM)).look_at
    assert words in of_program
    assert "torchtitan" not in of_program


@pytest.mark.parametrize(
    ("loaded", "advice"),
    [
        (0, "pass 2 counts its steps from 1 again, although a checkpoint of step 8 is there"),
        (8, "let the program derive them from {seed} alone"),
    ],
)
def test_a_program_with_other_weights_at_step_0_is_told_what_to_mend(loaded, advice):
    passes = (ELASTIC_PASSES[0], a_pass(2, loaded, 14, ONE, saves=[14], segment=1, ended=True))
    test = resumed(*passes, ELASTIC_PASSES[2], samples=samples(initial=lambda name, x: x + 1))
    verdict = judged(test, replace(ELASTIC_SPEC, trainer=PROGRAM))
    assert verdict.judgement is Judgement.INVALID
    assert "starts from other weights than the control" in verdict.cause
    assert advice in verdict.cause


ERROR = RankError(0, "AssertionError: dp_degree is inconsistent before and after checkpoint")


def test_a_crash_at_a_resume_is_an_error_that_says_which():
    died = a_pass(2, 8, 8, ONE, segment=1)
    for passes in ((ELASTIC_PASSES[0], died), ELASTIC_PASSES[:1]):
        test = replace(resumed(*passes), status=RunStatus.CRASHED, error=ERROR, complete=False)
        verdict = judged(test, ELASTIC_SPEC)
        assert verdict.judgement is Judgement.ERROR
        assert verdict.cause == (
            "the run crashed at the resume after step 8 (FSDP 2 -> one rank): rank 0: "
            f"{ERROR.message}"
        )


def test_a_crash_while_the_last_step_of_a_segment_is_saved_is_no_crash_at_a_resume():
    unsaved = replace(ELASTIC_PASSES[0], whole=())
    test = replace(resumed(unsaved), status=RunStatus.CRASHED, error=ERROR, complete=False)
    assert judged(test, ELASTIC_SPEC).cause == f"the run crashed: rank 0: {ERROR.message}"


def test_a_program_that_ignores_the_checkpoint_that_it_is_given_is_named_as_the_cause():
    test = ELASTIC_CASES["checkpoint ignored"][1]
    of_program = judged(test, replace(ELASTIC_SPEC, trainer=PROGRAM))
    said = "the program does not go on from the checkpoint of step 8: pass 2 starts from the "
    assert said in of_program.cause
    assert "{resume_from}" in of_program.look_at
    assert "the program" not in judged(test, ELASTIC_SPEC).cause


def test_a_crash_in_the_middle_of_a_pass_is_no_crash_at_a_resume():
    half = a_pass(2, 8, 11, ONE, segment=1)
    test = replace(resumed(ELASTIC_PASSES[0], half), status=RunStatus.CRASHED, error=ERROR)
    assert "at the resume" not in judged(test, ELASTIC_SPEC).cause


@pytest.mark.parametrize(("mode", "outcome"), [("async", Outcome.PASS), ("disabled", INVALID)])
def test_a_checkpoint_that_was_still_being_written_was_not_promised(mode, outcome):
    """torchtitan waits for the one before, so only the newest may be missing."""
    config = {**ran(FSDP2).config, "checkpoint.async_mode": mode}
    in_force = replace(ran(FSDP2), config=config)
    script = (Fault(FaultKind.KILL, 10, rank=1),)
    struck = (Struck(0, "kill", 10, 1990.0, number=1),)
    first = a_pass(1, 0, 9, saves=[4, 8], whole=(4,), in_force=in_force)
    second = a_pass(2, 4, STEPS, saves=[8, 12, 16], ended=True, in_force=in_force)
    late = resumed(first, second, struck=struck)
    verdict = judged(late, fault_spec(faults=script))
    assert answer(verdict, "passes-continuous").outcome is outcome
    never = resumed(
        replace(first, saved=(), whole=()), replace(second, loaded_step=0), struck=struck
    )
    found = answer(judged(never, fault_spec(faults=script)), "passes-continuous")
    assert found.outcome is not Outcome.PASS
