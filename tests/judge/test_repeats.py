"""Repeats that are out of line: one that is far off would excuse a test set with its fault."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import judge, run, samples, spec, with_signals

from converge_harness.judge import calibrate
from converge_harness.judge import calibration as vetting
from converge_harness.judge.calibration import SIGNAL_OUTLIER, TENSOR_OUTLIER, tensor_differences
from converge_harness.model import Judgement

CONTROL = run()
SPEC = spec()
LOSSES, NORMS = ("loss", "loss_recomputed"), ("grad_norm", "grad_norm_recomputed")
KINDS = ("ulp", "ulp", "ulp", "permute", "permute")


def judged(test, control=CONTROL, *, repeats):
    learnt = calibrate(control, repeats)
    return judge(test, control, learnt, spec=SPEC, control_spec=SPEC)


def outlier_among(control, repeats):
    return vetting.outlier_among(control, repeats, tensor_differences(control, repeats))


def answer(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


def drawn(size=1e-8, names=KINDS):
    """Right repeats: each differs by rounding of its own."""
    draw = np.random.default_rng(len(names))
    made = []
    for number, kind in enumerate(names):
        noise = dict(enumerate(size * draw.standard_normal(len(CONTROL.steps)), 1))

        def change(step, value, noise=noise):
            return value * (1 + noise[step])

        repeat = with_signals(run(f"{kind}.{number}"), **dict.fromkeys(LOSSES + NORMS, change))
        jitter = np.random.default_rng(number)

        def turn(step, name, values, jitter=jitter, size=size):
            return values * (1 + size * jitter.standard_normal(values.shape))

        made.append(replace(repeat, repeat=kind, samples=samples(gradient=turn)))
    return made


def times(repeat, factor, *signals, start=1):
    """The same with signals off by a factor, from a step on."""
    return with_signals(
        repeat, **dict.fromkeys(signals, lambda step, x: x * factor if step >= start else x)
    )


def with_one(repeats, number, change):
    return [change(each) if at == number else each for at, each in enumerate(repeats)]


@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("names", [KINDS, KINDS[:2], KINDS[:1], ("rounding",) * 3, (None,) * 4])
def test_right_repeats_are_in_line_however_large_their_rounding_is(size, names):
    assert outlier_among(CONTROL, drawn(size, names)) is None


ATTACKS = {
    "the issue's": (1, lambda each: times(each, 1.005, *LOSSES)),
    "a permuted one": (3, lambda each: times(each, 1.005, *LOSSES)),
    "from half-way on": (2, lambda each: times(each, 1.005, *LOSSES, start=11)),
    "at the last step": (0, lambda each: times(each, 1.005, *LOSSES, start=20)),
    "norms": (0, lambda each: times(each, 1.05, *NORMS)),
}


@pytest.mark.parametrize("size", [1e-8, 1e-5])
@pytest.mark.parametrize("case", ATTACKS)
def test_one_bad_repeat_does_not_open_the_gate(case, size):
    number, change = ATTACKS[case]
    repeats = with_one(drawn(size), number, change)
    (problem,) = calibrate(CONTROL, repeats).problems
    assert problem.startswith(f"the repeat {repeats[number].name} is out of line: its ")
    assert judged(change(run("t")), repeats=repeats).judgement is not Judgement.PASS
    # A test set that deals samples as the control does is not judged by permuted repeats.
    of_right = Judgement.PASS if repeats[number].repeat == "permute" else Judgement.INVALID
    assert judged(run("t"), repeats=repeats).judgement is of_right


@pytest.mark.parametrize(("factor", "expected"), [(2.08, "INVALID"), (60.0, "FAIL")])
def test_a_norm_is_wrong_only_where_it_is_further_off_than_a_repeat_out_of_line(factor, expected):
    """Megatron-Core with tied embeddings in bf16: a repeat was off by more than the set's 1.08."""

    def bad(each):
        return times(each, 2.5, *NORMS, start=18)

    repeats = with_one(drawn(1e-5, ("ulp",) * 5), 0, bad)
    assert calibrate(CONTROL, repeats).problems
    verdict = judged(times(run("t"), factor, *NORMS, start=20), repeats=repeats)
    assert verdict.judgement.value == expected
    in_line = judged(times(run("t"), factor, *NORMS, start=20), repeats=drawn(1e-5, ("ulp",) * 5))
    assert in_line.judgement is Judgement.FAIL


@pytest.mark.parametrize("identical", [0, 3])
@pytest.mark.parametrize(
    ("signals", "factor"), [(LOSSES, 1.005), (NORMS, 1.09)], ids=["loss", "norm"]
)
def test_the_only_repeat_that_differs_does_not_open_the_gate(signals, factor, identical):
    """A rerun that is bit-identical teaches nothing, so it is no other to be in line with."""
    alone = times(drawn(names=("ulp",))[0], factor, *signals)
    repeats = [*(replace(run(f"rerun.{n}"), repeat="rerun") for n in range(identical)), alone]
    (problem,) = calibrate(CONTROL, repeats).problems
    assert problem.startswith("the repeat ulp.0 is out of line: its ")
    assert "no other repeat differs" in problem
    test = times(run("t"), factor, *signals)
    assert judged(test, repeats=repeats).judgement is not Judgement.PASS


def with_experts(run):
    names = tuple(name.replace("wq", "experts") for name in run.samples[0].names)
    return replace(run, samples=tuple(replace(each, names=names) for each in run.samples))


FEW = [("ulp",), (None, None, "ulp"), ("ulp", "permute"), (None, "ulp", "ulp", "permute")]


def few(names):
    """Repeats: those of kind ``ulp`` show rounding to bfloat16, others hardly differ."""
    size = 1e-4 if len(names) > 1 else 3e-4
    made = [drawn(size if kind == "ulp" else 1e-8, (kind,))[0] for kind in names]
    return [replace(each, name=f"{at}.{each.name}") for at, each in enumerate(made)]


@pytest.mark.parametrize("names", FEW)
def test_few_repeats_that_show_how_experts_round_are_in_line(names):
    """GPT-OSS in float32: ``ulp`` repeats are 6.1e-4 off in the norm, others by rounding."""
    repeats = few(names)
    assert outlier_among(CONTROL, repeats), "in a dense model this is no rounding"
    assert outlier_among(with_experts(CONTROL), list(map(with_experts, repeats))) is None


@pytest.mark.parametrize(
    ("signals", "factor"), [(LOSSES, 1.005), (NORMS, 1.09)], ids=["loss", "norm"]
)
@pytest.mark.parametrize("names", FEW)
def test_a_bad_repeat_of_few_does_not_hide_behind_experts(names, signals, factor):
    for bad in range(len(names)):
        if names[bad] is None:
            continue  # this test breaks ulp and permute repeats, and leaves reruns as they are
        repeats = with_one(few(names), bad, lambda each: times(each, factor, *signals))
        assert calibrate(with_experts(CONTROL), list(map(with_experts, repeats))).problems


@pytest.mark.parametrize("bad", [(0, 1), (3, 4), (0, 3)])
def test_two_bad_repeats_of_five_do_not_hide_each_other(bad):
    repeats = drawn()
    for number in bad:
        repeats = with_one(repeats, number, lambda each: times(each, 1.008, *LOSSES))
    found = outlier_among(CONTROL, repeats)
    assert found is not None
    assert found.name in {repeats[number].name for number in bad}
    test = times(run("t"), 1.008, *LOSSES)
    assert judged(test, repeats=repeats).judgement is not Judgement.PASS


def test_a_control_that_is_far_from_all_of_its_repeats_is_named_itself():
    off = times(CONTROL, 1.005, *LOSSES)
    problems = calibrate(off, drawn()).problems
    assert problems[0].startswith("the control fsdp2 is out of line: its loss")
    verdict = judged(times(run("t"), 1.005, *LOSSES), off, repeats=drawn())
    assert verdict.judgement is Judgement.INVALID


@pytest.mark.parametrize("factor", [0.0, 1.15, 1e300], ids=["zero", "off by 15%", "huge"])
@pytest.mark.parametrize("signals", [LOSSES, NORMS], ids=["loss", "norm"])
def test_a_control_that_is_off_at_one_late_step_is_named(signals, factor):
    """Its norm was passed over there, as one that leaps by chance in correct runs."""
    at = int(CONTROL.steps[-2])

    def change(step, value):
        return value * factor if step == at else value

    off = with_signals(CONTROL, **dict.fromkeys(signals, change))
    problems = calibrate(off, drawn()).problems
    assert problems[0].startswith(f"the control fsdp2 is out of line: its {signals[0]}")
    for test in (run("t"), replace(off, name="t")):
        assert judged(test, off, repeats=drawn()).judgement is not Judgement.PASS


def test_a_gradient_that_is_off_in_one_repeat_is_named():
    def turned(each):
        def change(step, name, values):
            return values[::-1] if (step, name) == (4, "norm.weight") else values

        return replace(each, samples=samples(gradient=change))

    found = outlier_among(CONTROL, with_one(drawn(), 2, turned))
    assert found is not None
    assert found.name == "ulp.2"
    assert "its gradient of norm.weight at step 4 differs" in found.what


@pytest.mark.parametrize(
    ("name", "step", "named"),
    [
        ("layers.3.mlp.experts.1.linear_fc2.weight", 4, False),
        ("layers.3.mlp.experts.1.linear_fc2.weight", 1, True),
        ("layers.3.moe.experts.w1", 4, True),
        ("layers.3.mlp.router.weight", 4, True),
    ],
)
def test_one_expert_may_get_other_tokens_in_a_repeat_after_the_first_step(name, step, named):
    def renamed(each):
        names = (tuple(name if of == "norm.weight" else of for of in s.names) for s in each.samples)
        return replace(
            each,
            samples=tuple(replace(s, names=of) for s, of in zip(each.samples, names, strict=True)),
        )

    def turned(each):
        def change(at, of, values):
            return 50 * values[::-1] if (at, of) == (step, "norm.weight") else values

        return replace(each, samples=samples(gradient=change))

    repeats = [renamed(each) for each in with_one(drawn(), 2, turned)]
    found = outlier_among(renamed(CONTROL), repeats)
    assert (found is not None) is named
    assert not named or f"its gradient of {name} at step {step} differs" in found.what


def test_such_an_expert_does_not_widen_the_limits_of_other_tensors():
    def renamed(each):
        names = (tuple(OF_AN_EXPERT.get(of, of) for of in s.names) for s in each.samples)
        return replace(
            each,
            samples=tuple(replace(s, names=of) for s, of in zip(each.samples, names, strict=True)),
        )

    def idle(each):
        def without_tokens(sample):
            expert = np.array([name == "norm.weight" for name in sample.names])
            sketch = np.where(expert[:, None], 0.0, sample.gradients.sketch)
            norm = np.where(expert, 0.0, sample.gradients.norm)
            return replace(sample, gradients=replace(sample.gradients, sketch=sketch, norm=norm))

        return replace(
            each,
            samples=tuple(without_tokens(s) if s.step == 4 else s for s in each.samples),
        )

    def learnt(repeats):
        return calibrate(renamed(CONTROL), list(map(renamed, repeats))).tensors[4]

    usual, one_idle = learnt(drawn()), learnt(with_one(drawn(), 2, idle))
    assert usual.gradient_spread == one_idle.gradient_spread > 0
    at = one_idle.names.index(OF_AN_EXPERT["norm.weight"])
    assert one_idle.gradient[at] > 100 * usual.gradient[at]


OF_AN_EXPERT = {"norm.weight": "layers.3.mlp.experts.1.linear_fc2.weight"}


@pytest.mark.parametrize(("stored", "named"), [("float32", True), ("bfloat16", False)])
def test_an_update_that_storing_rounds_off_puts_no_repeat_out_of_line(stored, named):
    """A norm weight of 1 in bfloat16 moves by a whole spacing or not at all, in each repeat."""

    def moved(each):
        def change(step, name, values):
            return 1.2 * values if (step, name) == (4, "norm.weight") else values

        return replace(each, samples=samples(update=change))

    control = replace(CONTROL, in_force=replace(CONTROL.in_force, param_dtype=stored))
    found = outlier_among(control, with_one(drawn(), 2, moved))
    assert (found is not None) is named
    assert (
        not named
        or "its update of norm.weight at step 4 differs from the control's by 0.2 of its norm"
        in found.what
    )


def test_limits_are_above_what_right_repeats_were_measured_at_and_below_what_opens_a_gate():
    for factor, named in ((SIGNAL_OUTLIER / 3, False), (SIGNAL_OUTLIER * 3, True)):
        loud = drawn(1e-6 * factor)[2]
        found = outlier_among(CONTROL, [*drawn(1e-6)[:2], loud])
        assert (found is not None) is named
    assert TENSOR_OUTLIER < 1 / 6e-3  # what is not there at all, against bfloat16's rounding


def test_a_repeat_that_starts_elsewhere_is_none():
    def moved(size):
        return samples(initial=lambda name, values: values * (1 + size))

    for kind, size, named in (
        ("ulp", 2e-7, False),
        ("ulp", 3e-7, True),
        ("permute", 5e-8, True),
        ("rerun", 0.0, False),
    ):
        repeat = replace(run(kind), repeat=kind, samples=moved(size))
        problems = calibrate(CONTROL, [repeat]).problems
        assert any("starts from other weights" in each for each in problems) is named, kind


def test_weights_that_begin_at_zero_may_be_moved_by_an_ulp():
    def zeros_and(offset):
        return samples(
            initial=lambda name, values: values * 0 + offset if name == "norm.weight" else values
        )

    control = replace(CONTROL, samples=zeros_and(0.0))
    for kind, offset, named in (
        ("ulp", 1.4e-45, False),
        ("ulp", 1e-30, True),
        ("permute", 1.4e-45, True),
    ):
        repeat = replace(run(kind), repeat=kind, samples=zeros_and(offset))
        problems = calibrate(control, [repeat]).problems
        assert any("starts from other weights" in each for each in problems) is named, kind


def test_a_permuted_repeat_that_hardly_differs_makes_no_other_an_outlier():
    repeats = drawn(1e-4)
    repeats[3] = replace(drawn(1e-12)[3], samples=samples())
    assert outlier_among(CONTROL, repeats) is None
    # With no other kind to say what is usual, it would.
    assert outlier_among(CONTROL, repeats[3:]) is not None


def test_three_repeats_of_a_kind_that_agree_are_in_line_however_quiet_another_kind_is():
    """Float8 all-gather of torchtitan 0.2.2: to permute samples changes next to nothing there."""
    loud = drawn(1e-3, KINDS[:3])
    quiet = drawn(1e-6, KINDS)[3:]
    assert {each.repeat for each in loud}.isdisjoint(each.repeat for each in quiet)
    assert outlier_among(CONTROL, [*loud, *quiet]) is None
    # Two permuted ones cannot hide behind each other, nor two of three behind the third.
    hiding = outlier_among(CONTROL, [*drawn(1e-6, KINDS[:3]), *drawn(1e-3, KINDS)[3:]])
    assert hiding.name in {each.name for each in quiet}
    assert "over 30 times as much" in hiding.what
    third = drawn(1e-6, KINDS[:3])[0]
    assert outlier_among(CONTROL, [third, *loud[1:], *quiet]) is not None


@pytest.mark.parametrize(
    "coarse", [(True,) * 5, (False, False, False, False, True), (True, *[False] * 4)]
)
def test_repeats_that_are_printed_coarsely_put_nobody_out_of_line(coarse):
    """They are rounded, and as near as that shows."""

    def printed(repeat):
        shown = {
            name: lambda step, value: None if value is None else round(float(value), 2)
            for name in (*LOSSES, *NORMS)
        }
        return replace(with_signals(repeat, **shown), rounding=dict.fromkeys(shown, 5e-3))

    made = [
        printed(each) if as_text else each for each, as_text in zip(drawn(), coarse, strict=True)
    ]
    control = CONTROL
    found = vetting.outlier_among(control, made, vetting.TensorDistances({}, {}, {}, {}))
    assert found is None, found
    bad = with_signals(made[-1], loss=lambda step, value: value * 1.02)
    assert (
        vetting.outlier_among(control, [*made[:-1], bad], vetting.TensorDistances({}, {}, {}, {}))
        is not None
    )


def leaping(kind, number, begins, by, start):
    """A repeat that begins ``begins`` from the control, and is ``by`` from it from a step on."""

    def change(step, value):
        return value * (1 + (by if step >= start else begins))

    return replace(
        with_signals(run(f"{kind}.{number}"), **dict.fromkeys(LOSSES, change)), repeat=kind
    )


@pytest.mark.parametrize(("permuted", "in_line"), [(1e-6, True), (1e-3, False)])
def test_permuted_repeats_speak_for_the_others_where_they_begin_as_near(permuted, in_line):
    """Tied weights in bf16 mixed: right repeats leap, each at its own step, one of three far less.

    Where samples that meet in one tensor change each other's rounding (Float8), permuted repeats
    are far off from the start: then they excuse nobody.
    """
    repeats = [
        leaping("rounding", 1, 8e-5, 2.5e-3, 7),
        leaping("rounding", 2, 1e-5, 3e-5, 8),
        leaping("rounding", 3, 1e-5, 2e-5, 10),
        leaping("permute", 1, permuted, 3.3e-3, 9),
        leaping("permute", 2, permuted, 3.2e-3, 9),
    ]
    learnt = calibrate(CONTROL, repeats)
    assert not learnt.problems
    assert (not learnt.alike.problems) is in_line
    assert in_line or "rounding.1 is out of line" in learnt.alike.problems[0]


def test_permuted_repeats_excuse_no_other_that_is_off_from_its_first_step():
    repeats = with_one(drawn(1e-5), 1, lambda each: times(each, 1.005, *LOSSES))
    learnt = calibrate(CONTROL, repeats)
    assert all("ulp.1 is out of line" in each.problems[0] for each in (learnt, learnt.alike))


@pytest.mark.parametrize(("leaping", "in_line"), [(4, True), (2, False)])
def test_where_norms_of_most_repeats_leap_losses_are_compared_up_to_there(leaping, in_line):
    """Two of five that leap may be broken together; of a majority nobody could tell."""
    repeats = drawn(1e-5)
    for number in range(leaping):
        repeats[number] = times(repeats[number], 1.3, *NORMS, start=11)
    repeats = with_one(repeats, 0, lambda each: times(each, 1.005, *LOSSES, start=12))
    assert (outlier_among(CONTROL, repeats) is None) is in_line
    early = with_one(repeats, 0, lambda each: times(each, 1.005, *LOSSES, start=3))
    found = outlier_among(CONTROL, early)
    assert found is not None
    assert found.name == "ulp.0"
