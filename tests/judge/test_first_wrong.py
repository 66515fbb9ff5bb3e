"""Which module is named, from sums of what modules got and gave, however they are distributed."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import CONTROL, broken, turned, verdict_of
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_examples import judge, with_signals

from converge_harness.judge import calibrate
from converge_harness.judge.causes.first_wrong import MODEL, FirstWrong, first_wrong
from converge_harness.judge.compare.activations import (
    compare_modules,
    distances,
    learnt_noise,
)
from converge_harness.judge.compare.precision_errors import PrecisionRuns
from converge_harness.judge.comparison import RunComparison
from converge_harness.model import (
    Activations,
    CauseClass,
    Check,
    Deviation,
    Judgement,
    Outcome,
    Parallelism,
    Precision,
    Tier,
)

SIGNS = 16
TOKENS, WIDTH = 48, 8
SIGN = np.random.default_rng(0).choice([-1.0, 1.0], (WIDTH, SIGNS))
CALLS = (
    ("embed", "out.0"),
    ("layers.0", "in.0"),
    ("layers.0.norm", "in.0"),
    ("layers.0.norm", "out.0"),
    ("layers.0.mlp", "in.0"),
    ("layers.0.mlp", "out.0"),
    ("layers.0", "out.0"),
    ("head", "in.0"),
    ("head", "out.0"),
)
SAME = {
    ("layers.0", "in.0"): ("embed", "out.0"),
    ("layers.0.norm", "in.0"): ("embed", "out.0"),
    ("layers.0.mlp", "in.0"): ("layers.0.norm", "out.0"),
    ("head", "in.0"): ("layers.0", "out.0"),
}
"""What is handed on: the same tensor, with one gradient."""
CONTROL_TENSORS = {
    (name, backward): np.random.default_rng(7 * row + backward).normal(0.3, 1.0, (TOKENS, WIDTH))
    for row, name in enumerate(CALLS)
    for backward in (False, True)
}


def changed(*rows, by=1.05, backward=False):
    """The control's tensors, of which those of some calls are off."""
    return {
        (name, back): values * by if name in rows and back is backward else values
        for (name, back), values in CONTROL_TENSORS.items()
    }


def since(call, backward=False):
    """All calls that a wrong one makes wrong as well."""
    place = CALLS.index(call)
    return CALLS[: place + 1] if backward else CALLS[place:]


def sums_of(values, held="whole", *, known=True):
    """The row that ranks add up: of the tensor, of copies, of parts of its rows, or partial.

    ``known`` says whether it is known which row is of which token.
    """
    row = np.zeros(3 + 6 * SIGNS)
    odd = np.arange(len(values)) % 3 == 0
    parts = {
        "whole": [(values, odd, 0, 0)],
        "tokens": [(values[:20], odd[:20], 0, 0), (values[20:], odd[20:], 0, 0)],
        "copies": [(values, odd, 0, 0), (values, odd, 0, WIDTH)],
        "columns": [(values[:, :4], odd, 0, 0), (values[:, 4:], odd, 0, 4)],
        "partial": [(values * 0.3, odd, 0, 0), (values * 0.7, odd, 0, WIDTH)],
    }[held]
    signs = np.concatenate([SIGN, np.roll(SIGN, 1, axis=1)])
    for part, half, here, shifted in parts:
        some = part[half] if known else part[:0]
        sums = part.sum(0), some.sum(0), (part**2).sum(0)
        tables = [signs[start : start + part.shape[1]] for start in (here, shifted)]
        row[:3] += part.size, sums[2].sum(), some.size
        row[3:] += np.concatenate([each @ table for each in sums for table in tables])
    return row


def activations(tensors=CONTROL_TENSORS, held="whole", calls=CALLS, scale=1.0, known=True):
    def table(backward):
        by = scale if backward else 1.0
        # The gradient that comes from the loss is never a partial sum.
        first = {"head": "whole"} if backward and held == "partial" else {}
        return np.stack(
            [
                np.zeros(3 + 6 * SIGNS)
                if backward and first_of(name) != name
                else sums_of(tensors[name, backward] * by, first.get(name[0], held), known=known)
                for name in calls
            ]
        )[None]

    def first_of(name):
        return SAME.get(name, name) if SAME.get(name, name) in calls else name

    return Activations(
        modules=tuple(module for module, _ in calls),
        tensors=tuple(tensor for _, tensor in calls),
        widths=np.full(len(calls), 4 if held == "columns" else WIDTH),
        same_as=np.array([calls.index(first_of(name)) for name in calls]),
        forward=table(backward=False),
        backward=table(backward=True),
    )


def compared(test, control=None, precision=Precision.FP32, noise=None):
    control = replace(CONTROL, activations=control or activations(), precision=precision)
    test = replace(CONTROL, name="test", activations=test, precision=precision)
    return RunComparison(test, control, modules=compare_modules(test, control, noise or {}))


def place_of(test, kind=CauseClass.OBJECTIVE, **more):
    return first_wrong(compared(test, **more), {}, kind)


@pytest.mark.parametrize("held", ["whole", "tokens", "copies", "columns", "partial"])
def test_a_right_run_agrees_however_its_tensors_are_held(held):
    found = compared(activations(held=held)).modules
    assert found.first_off is None
    assert max(each.distance for each in found.forward + found.backward) < 1e-12


def test_modules_of_one_run_alone_are_named_as_not_compared():
    mlp = "layers.0.mlp"
    fewer = tuple(call for call in CALLS if call[0] != mlp)
    assert compared(activations()).modules.not_compared == ()
    assert compared(activations(calls=fewer)).modules.not_compared == (mlp,)
    assert compared(activations(), activations(calls=fewer)).modules.not_compared == (mlp,)


@pytest.mark.parametrize("held", ["whole", "tokens", "copies", "columns", "partial"])
@pytest.mark.parametrize("by", [1.0001, 0.5, 2.0, -1.0])
def test_the_module_whose_output_is_wrong_first_is_named(held, by):
    if held in ("partial", "copies") and by in (2.0, 0.5):
        by *= 1.5  # on two ranks half the value may be a partial sum, and twice a copy
    wrong = changed(*since(("layers.0.mlp", "out.0")), by=by)
    place = place_of(activations(wrong, held))
    assert place.module == "layers.0.mlp"
    assert "while all its inputs are right" in place.sentence
    assert "the output of layers.0.mlp is off by" in place.sentence


def test_tokens_that_are_exchanged_show_where_it_is_known_which_is_which():
    moved = dict(CONTROL_TENSORS)
    for name in since(("layers.0.mlp", "in.0")):
        moved[name, False] = np.roll(moved[name, False], 1, axis=0)
    assert place_of(activations(moved)).module == "layers.0"
    assert place_of(activations(moved, known=False)).module == ""
    assert place_of(activations(moved), control=activations(known=False)).module == ""


def test_a_module_whose_own_modules_are_right_is_named_itself():
    place = place_of(activations(changed(*since(("layers.0", "out.0")))))
    assert place.module == "layers.0"
    assert place.sentence.endswith("and all modules in it are right")


def test_what_a_module_gets_wrong_is_of_the_code_that_calls_it():
    place = place_of(activations(changed(*since(("layers.0.mlp", "in.0")))))
    assert place.module == "layers.0"
    assert "after layers.0.norm and before layers.0.mlp" in place.sentence
    first = place_of(activations(changed(*since(("layers.0", "in.0")))))
    assert first.module == MODEL  # the list `layers` is not called


@pytest.mark.parametrize(
    ("call", "module", "words"),
    [
        (("layers.0.norm", "out.0"), "layers.0.mlp", "w.r.t. the input of layers.0.mlp"),
        (("layers.0.mlp", "out.0"), "layers.0", "layers.0 uses it"),
        (("layers.0", "out.0"), "head", "while the one w.r.t. its output is right"),
    ],
)
def test_a_wrong_gradient_is_of_what_gets_the_tensor(call, module, words):
    wrong = changed(*since(call, backward=True), by=-1.0, backward=True)
    place = place_of(activations(wrong), CauseClass.GRADIENT_DIRECTION)
    assert place.module == module
    assert place.sentence.startswith("all outputs are right; the gradient w.r.t. ")
    assert words in place.sentence


def test_where_several_modules_get_a_tensor_the_code_around_is_named(monkeypatch):
    monkeypatch.setitem(SAME, ("layers.0.mlp", "in.0"), ("embed", "out.0"))
    wrong = changed(("embed", "out.0"), by=-1.0, backward=True)
    place = place_of(activations(wrong), CauseClass.GRADIENT_DIRECTION)
    assert place.module == "layers.0"
    assert "w.r.t. the input of layers.0.norm and layers.0.mlp is off" in place.sentence


def test_another_loss_is_not_taken_for_a_wrong_module():
    tensors = dict(CONTROL_TENSORS)
    for name in CALLS:
        tensors[name, True] = np.roll(tensors[name, True], 1, axis=1)
    place = place_of(activations(tensors))
    assert place.module == MODEL
    assert "the loss is a different function of it" in place.sentence


def test_a_factor_of_all_gradients_is_no_module():
    place = place_of(activations(scale=4.0), CauseClass.GRADIENT_SCALE)
    assert place.module == ""
    begins = "no module: in the first batches the outputs of all 5 modules agree to "
    assert place.sentence.startswith(begins)
    assert "the gradients that flow back through them once they are divided by 4; so" in (
        place.sentence
    )
    assert place.sentence.endswith("in the gradients of weights or their reduction")


@pytest.mark.parametrize(
    ("weights", "module"),
    [
        (["layers.0.mlp.weight", "layers.0.mlp.bias"], "layers.0.mlp"),
        (["layers.0.mlp.w1.weight"], "layers.0.mlp"),  # a fused weight's row, named apart
        (["layers.0.mlp.weight", "head.weight"], ""),
        (["embed.weight"], "embed"),
        ([], ""),
    ],
)
def test_gradients_of_one_modules_weights_name_it_where_all_modules_are_right(weights, module):
    late = Deviation("head.weight", 4, 1.0, 0.1)
    off = tuple(Deviation(name, 1, 1.0, 0.1) for name in weights)
    check = Check("gradients-first-step", "", Tier.FIRST_STEP, Outcome.FAIL)
    checks = {check.name: replace(check, deviations=(*off, late) if off else ())}
    right = compared(activations())
    place = first_wrong(right, checks, CauseClass.GRADIENT_DIRECTION)
    assert place.module == module
    assert ("own weights are wrong" in place.sentence) == bool(module)
    assert first_wrong(right, checks, CauseClass.OBJECTIVE).module == ""


def test_a_gradient_that_never_comes_is_named():
    gone = changed(*since(("layers.0", "out.0"), backward=True), by=0.0, backward=True)
    place = place_of(activations(gone), CauseClass.NO_GRADIENT)
    assert (place.module, place.forward) == ("head", False)
    assert "the gradient w.r.t. the input of head is zero" in place.sentence


def test_what_is_not_finite_is_named():
    tensors = changed(("head", "out.0"), by=np.nan)
    place = place_of(activations(tensors), CauseClass.NOT_FINITE)
    assert (place.module, place.forward) == ("head", True)
    assert "the output of head is not finite" in place.sentence


def test_calls_that_a_run_lacks_are_left_out():
    shorter = [call for call in CALLS if "layers.0." not in call[0]]
    wrong = changed(*since(("layers.0.mlp", "out.0")))
    assert place_of(activations(wrong, calls=shorter)).module == "layers.0"


def test_nothing_is_named_where_it_would_say_nothing():
    wrong = activations(changed(*CALLS))
    nothing = FirstWrong("", "", forward=False)
    assert place_of(wrong, CauseClass.CLIPPING) == nothing
    assert first_wrong(compared(None), {}, CauseClass.OBJECTIVE) == nothing
    data = Check("same-data", "", Tier.INTEGRITY, Outcome.FAIL)
    assert first_wrong(compared(wrong), {"same-data": data}, CauseClass.OBJECTIVE) == nothing


def test_gradients_that_cancel_are_measured_by_their_size():
    # Gradients of keys add up to zero over a softmax's tokens: only rounding is left of the sum.
    cancelling = np.random.default_rng(5).normal(size=(TOKENS, WIDTH))
    cancelling -= cancelling.mean(0)
    rounded = cancelling * (1 + 1e-7 * np.random.default_rng(6).normal(size=cancelling.shape))
    control, test = (
        activations({**CONTROL_TENSORS, (("layers.0.mlp", "out.0"), True): each})
        for each in (cancelling, rounded)
    )
    found = distances(test, control)
    assert max(found.values()) < 1e-6


def test_a_difference_begins_where_it_leaves_noise():
    # In low precision the culprit's own difference may be below what is surely more than noise.
    slightly = changed(("layers.0.norm", "out.0"), by=1 + 1.5e-5)
    tensors = {
        **slightly,
        **{k: v for k, v in changed(("head", "out.0")).items() if "head" in k[0]},
    }
    quiet = compared(activations(slightly)).modules
    noise = {each.row: each.distance / 3 for each in quiet.forward if each.distance}
    assert place_of(activations(slightly), noise=noise).module == ""
    assert place_of(activations(tensors), noise=noise).module == "layers.0.norm"


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_infinities_that_the_control_has_too_say_nothing():
    masked = {**CONTROL_TENSORS, (("layers.0", "in.0"), False): np.full((TOKENS, WIDTH), -np.inf)}
    control = activations(masked)
    assert place_of(activations(masked), control=control).module == ""
    off = changed(*since(("layers.0.mlp", "out.0")))
    off[("layers.0", "in.0"), False] = masked[("layers.0", "in.0"), False]
    assert place_of(activations(off), control=control).module == "layers.0.mlp"
    repeat = replace(CONTROL, activations=control)
    assert np.isfinite(list(learnt_noise(repeat, [repeat]).values())).all()


def test_noise_is_the_median_of_the_repeats():
    repeats = [
        replace(CONTROL, activations=activations(changed(*CALLS, by=1 + by)))
        for by in (1e-6, 2e-6, 0.5)
    ]
    noise = learnt_noise(replace(CONTROL, activations=activations()), repeats)
    assert 1e-6 < max(noise.values()) < 1e-5
    off = activations(changed(*CALLS, by=1 + 1e-5))
    assert place_of(off).module == "embed"
    assert place_of(off, noise=dict.fromkeys(noise, 1e-05)).module == ""


def test_low_precision_is_measured_by_its_own_error():
    reference = replace(CONTROL, activations=activations())
    matched = replace(
        CONTROL, activations=activations(changed(*CALLS, by=1.01)), precision=Precision.BF16
    )
    for by, module in ((1.02, None), (1.2, "embed")):
        test = replace(
            CONTROL, activations=activations(changed(*CALLS, by=by)), precision=Precision.BF16
        )
        found = compare_modules(test, reference, {}, PrecisionRuns(matched, reference)).first_off
        assert (found and found.row.module) == module


@settings(deadline=None)  # an example takes a quarter of a second on a busy machine
@given(st.floats(1e-9, 1e3), st.sampled_from(["whole", "tokens", "copies", "columns"]))
def test_a_distance_is_relative(size, held):
    tensors = {name: values * size for name, values in CONTROL_TENSORS.items()}
    wrong = {name: values * 1.01 for name, values in tensors.items()}
    found = distances(activations(wrong, held), activations(tensors))
    assert all(0.005 < each < 0.05 for each in found.values())


def test_a_verdict_says_what_is_wrong_first():
    wrong = broken(Parallelism(dp_shard=2), gradient=turned(lambda name: "layers.1" in name, 0.5))
    assert verdict_of(wrong).first_wrong == ""  # nothing was recorded
    off = activations(changed(*since(("layers.0.norm", "out.0"), backward=True), backward=True))
    verdict = verdict_of(
        replace(wrong, activations=off), replace(CONTROL, activations=activations())
    )
    assert verdict.judgement is Judgement.FAIL
    assert verdict.module == "layers.0.mlp"
    assert "the gradient w.r.t. the input of layers.0.mlp" in verdict.first_wrong


def test_outputs_show_that_the_forward_pass_differs_where_the_loss_hardly_does():
    """Experts' scores in a wrong order (benchmark): the loss is off by 3e-6, as by rounding."""
    weight = "layers.1.feed_forward.w1.weight"
    test = broken(gradient=turned(lambda name: name == weight, 0.5))
    test = with_signals(test, loss_recomputed=lambda _, loss: loss * (1 + 5e-10))
    control = replace(CONTROL, activations=activations())
    repeats = (
        with_signals(control, loss=lambda _, loss, by=by: loss * (1 + by))
        for by in (1e-8, 2e-8, 3e-8)
    )
    learnt = calibrate(control, [replace(each, repeat="ulp") for each in repeats])
    assert learnt.modules

    def verdict(calls, calibration, **back):
        wrong = activations(changed(*since(calls, **back), by=1.1, **back))
        return judge(replace(test, activations=wrong), control, calibration)

    out = ("layers.0.mlp", "out.0")
    forward = verdict(out, learnt)
    assert forward.cause_class is CauseClass.OBJECTIVE
    assert "the output of layers.0.mlp is off by 0.21 (rounding: 1e-06)" in forward.cause
    # First only gradients of modules are off; then no repeat shows how far modules may be off.
    for other in (verdict(out, learnt, backward=True), verdict(out, None)):
        assert other.cause_class is CauseClass.GRADIENT_DIRECTION
    # Of a model with experts, these repeats do not show how they round.
    names = (*control.samples[0].names[:-1], "moe.experts.w1")
    control, test = (
        replace(run, samples=tuple(replace(each, names=names) for each in run.samples))
        for run in (control, test)
    )
    assert verdict(out, learnt).cause_class is CauseClass.GRADIENT_DIRECTION


def cause_of_other_digests(test, since=1, weights=None, precision=Precision.FP32):
    """The verdict where batches have other digests from a step on, and modules computed this."""
    control = replace(CONTROL, activations=activations(), precision=precision)
    digests = [
        digest if step < since else "f" * 16
        for step, digest in zip(CONTROL.steps.tolist(), CONTROL.batch_digests, strict=True)
    ]
    other = broken(weights=weights) if weights else broken()
    other = with_signals(other, loss=lambda step, x: x * (1.01 if step >= since else 1))
    other = replace(other, activations=test, batch_digests=tuple(digests), precision=precision)
    return verdict_of(other, control)


def test_labels_differ_where_all_modules_compute_the_same_of_other_batches():
    verdict = cause_of_other_digests(activations())
    assert verdict.cause.startswith(
        "labels differ: t has other labels than the control at step 1 on the same inputs (the "
        "outputs of all 5 modules in the first batches agree to "
    )
    assert verdict.cause_class is CauseClass.DATA
    assert "shifted by one once" in verdict.look_at
    assert "loader" not in verdict.look_at


def test_the_order_of_samples_differs_where_the_first_module_gets_others():
    verdict = cause_of_other_digests(activations(changed(*CALLS)))
    assert verdict.cause.startswith("data order: t trained on other samples than the control at")
    assert "labels" not in verdict.look_at


@pytest.mark.parametrize(
    "case",
    {
        "modules show the first step alone": {"test": activations(), "since": 3},
        "nothing was recorded": {"test": None},
        # Positions or masks may be others, and so may the tokens.
        "a later module": {"test": activations(changed(*since(("layers.0.mlp", "in.0"))))},
        # In low precision one token of many is within rounding.
        "within rounding": {
            "test": activations(changed(*CALLS, by=1.001)),
            "precision": Precision.BF16,
        },
    }.items(),
    ids=lambda case: case[0],
)
def test_inputs_and_labels_are_not_told_apart_where_nothing_shows_it(case):
    verdict = cause_of_other_digests(**case[1])
    assert verdict.cause.startswith("the batch or its labels differ: t trained on other samples")
    assert "loader" in verdict.look_at
    assert "labels" in verdict.look_at
