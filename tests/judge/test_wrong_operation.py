"""The operation that the judge names inside of a wrong module, and when it names none."""

from dataclasses import replace

import numpy as np
import pytest

from converge_harness.judge import wrong_operation
from converge_harness.judge.causes.first_wrong import MODEL
from converge_harness.model import (
    GIVEN,
    UNSEEN,
    ModuleCall,
    Operation,
    Precision,
    TensorSums,
)
from converge_harness.run_folder import operations as file

SHAPE = (6, 8)
SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], (32, *SHAPE))
X, WEIGHT, OTHER = (np.random.default_rng(seed).normal(0.2, 1.0, SHAPE) for seed in (1, 2, 3))


class Running:
    """A module of operations on arrays, recorded as a rank records them."""

    def __init__(self):
        self.operations = []
        self._made = {}

    def sums(self, value):
        made_by, _, kind = self._made.get(id(value), (UNSEEN, value, "float32"))
        return TensorSums(
            f"{kind}{list(value.shape)}",
            float(np.linalg.norm(value)),
            tuple(np.tensordot(SIGNS, np.broadcast_to(value, SHAPE), 2)),
            0,
            made_by,
        )

    def given(self, value):
        self._made[id(value)] = (GIVEN, value, "float32")
        return self.sums(value)

    def __call__(self, name, function, *values, settings=(), module="", kind="float32"):
        inputs = tuple(map(self.sums, values))
        result = np.array(function(*values))
        self._made[id(result)] = (len(self.operations), result, kind)
        outputs = (self.sums(result),)
        self.operations.append(Operation(f"aten.{name}", module, settings, inputs, outputs))
        return result


def call_of(program, x=X, problem=""):
    running = Running()
    inputs = (running.given(x),)
    output = program(running, x)
    return ModuleCall(
        "layers.1.norm",
        problem,
        tuple(running.operations),
        0,
        inputs,
        (running.sums(output),),
    )


def norm(run, x, *, eps=1e-5, weight=WEIGHT):
    """RMSNorm as the control computes it."""
    mean = run("mean", lambda a: np.square(a).mean(-1, keepdims=True), x)
    shifted = run("add", lambda a: a + eps, mean, settings=(str(eps),))
    scale = run("rsqrt", lambda a: a**-0.5, shifted)
    return run("mul", np.multiply, run("mul", np.multiply, x, scale), weight)


def same_norm(run, x, *, eps=1e-5):
    """The same function by other operations."""
    mean = run("mean", lambda a: np.square(a).mean(-1, keepdims=True), x)
    root = run("sqrt", np.sqrt, run("add", lambda a: a + eps, mean, settings=(str(eps),)))
    return run("mul", np.multiply, run("div", np.divide, x, root), WEIGHT)


def norm_with_eps_outside(run, x):
    mean = run("mean", lambda a: np.square(a).mean(-1, keepdims=True), x)
    root = run("add", lambda a: a + 1e-2, run("sqrt", np.sqrt, mean))
    return run("mul", np.multiply, run("div", np.divide, x, root), WEIGHT)


def finding(program, control=norm, *, repeats=(), precision=Precision.FP32):
    calls = [{0: call_of(each)} for each in (program, control)]
    return wrong_operation(*calls, [{0: call_of(each)} for each in repeats], precision)


def test_an_operation_that_is_off_while_its_inputs_agree_is_named_with_what_it_gets():
    found = finding(lambda run, x: norm(run, x, eps=0.1))
    assert found.operation == "aten.add"
    assert found.sentence.startswith("inside layers.1.norm, aten.add (operation 2 of 5) is off by ")
    assert found.sentence.endswith(
        "(rounding: 1e-06) while its inputs agree; it gets 0.1 (control: 1e-05)"
    )


def test_arguments_that_only_one_of_the_runs_gives_are_shown():
    def gelu(by, *settings):
        return lambda run, x: run("gelu", lambda a: a * by, x, settings=settings)

    found = finding(gelu(1.1, "approximate=tanh"), gelu(1.0))
    assert found.sentence.endswith(
        "; besides tensors it gets approximate=tanh, in the control nothing"
    )


def test_a_right_module_has_no_wrong_operation():
    found = finding(norm)
    assert (found.operation, found.is_right) == ("", True)
    assert found.sentence == (
        "no operation inside layers.1.norm is wrong: in the rerun its first call returns what "
        "the control's does"
    )


def test_other_operations_that_compute_the_same_are_not_wrong():
    assert finding(same_norm).is_right


def test_other_operations_that_compute_something_else_are_listed_beside_the_controls():
    found = finding(norm_with_eps_outside)
    assert found.operation == "aten.sqrt"
    assert (
        "after aten.mean (operation 1 of 5), which agrees, the test set runs aten.sqrt (float32), "
        "aten.add (float32), aten.div (float32) where the control runs aten.add (float32), "
        "aten.rsqrt (float32), aten.mul (float32); what the module returns is off by "
    ) in found.sentence


def test_a_right_rewrite_before_a_wrong_operation_is_not_blamed():
    """Values in between differ, but not what comes of them."""

    def two(first, factor):
        def program(run, x):
            return run("tanh", lambda a: np.tanh(a) * factor, first(run, x), module="layers.1.act")

        return program

    found = finding(two(same_norm, 1.01), two(norm, 1.0))
    assert found.operation == "aten.tanh"
    assert "aten.tanh (operation 6 of 6 in layers.1.act) is off by 0.01 " in found.sentence
    assert finding(two(same_norm, 1.0), two(norm, 1.0)).is_right


def test_what_only_the_test_set_runs_or_lacks_is_named_also_before_the_same_operations():
    def then_tanh(first):
        return lambda run, x: run("tanh", np.tanh, first(run, x))

    def scaled(run, x):
        return run("mul", lambda a: a * 1.01, norm(run, x), settings=("1.01",))

    found = finding(then_tanh(scaled), then_tanh(norm))
    assert found.operation == "aten.mul"
    assert "the test set runs aten.mul (float32) in addition" in found.sentence
    found = finding(then_tanh(norm), then_tanh(scaled))
    assert found.operation == "aten.mul"
    assert "after aten.mul (operation 5 of 7), which agrees, the test set lacks" in found.sentence


def test_an_operation_that_changes_nothing_in_the_control_is_still_one():
    """As one with a weight of ones."""

    def times(by, name="mul", first=norm):
        return lambda run, x: run(name, lambda a: a * by, first(run, x), settings=(str(by),))

    found = finding(times(1.1), times(1.0))
    assert found.operation == "aten.mul"
    assert "operation 6 of 6) is off by 0.1 (" in found.sentence
    assert "; it gets 1.1 (control: 1.0)" in found.sentence
    found = finding(times(1.0), times(1.1))
    assert "aten.mul (operation 6 of 6) is off by 0.091 (" in found.sentence
    found = finding(times(1.1, "div"), times(1.0))
    assert "test set runs aten.div (float32) where the control runs aten.mul" in found.sentence
    found = finding(times(1.1, first=times(1.0)), times(1.0))
    assert "test set runs aten.mul (float32) in addition" in found.sentence


def test_an_operation_may_get_a_wrong_weight_or_the_result_of_another_operation():
    found = finding(lambda run, x: norm(run, x, weight=OTHER))
    assert "input 2 of aten.mul (operation 5 of 5) is off by " in found.sentence
    assert "made by nothing that could be seen: a weight, a constant, or" in found.sentence

    def crossed(first, second):
        def program(run, x):
            parts = [run("sin", np.sin, x), run("cos", np.cos, x)]
            return run("exp", np.exp, parts[second if first else 0])

        return program

    found = finding(crossed(first=True, second=1), crossed(first=True, second=0))
    assert "input 1 of aten.exp (operation 3 of 3) is off by " in found.sentence
    assert "the result of aten.cos (operation 2), and in the control" in found.sentence


def test_a_rewrite_that_begins_with_the_same_operation_on_other_tensors_is_listed_whole():
    def cubed(run, x):
        return run("mul", np.multiply, run("mul", np.multiply, x, x), x)

    def doubled(run, x):
        return run("exp", np.exp, run("mul", np.multiply, x, run("cos", np.cos, x)))

    found = finding(cubed, doubled)
    assert (
        "at its begin, the test set runs aten.mul (float32), aten.mul (float32) where the control "
        "runs aten.cos (float32), aten.mul (float32), aten.exp (float32)"
    ) in found.sentence


def test_another_data_type_makes_it_another_operation():
    def cast(run, x):
        half = run("_to_copy", lambda a: a.astype(np.float16), x, kind="bfloat16")
        return run("mul", np.multiply, half, WEIGHT)

    found = finding(cast, lambda run, x: run("mul", np.multiply, x, WEIGHT))
    assert "the test set runs aten._to_copy (bfloat16)" in found.sentence


def test_rounding_is_what_repeats_show_but_at_least_that_of_the_precision():
    def off(by):
        return lambda run, x: run("exp", lambda a: np.exp(a) * (1 + by), x)

    assert finding(off(3e-6), off(0)).is_right
    assert finding(off(3e-5), off(0)).operation == "aten.exp"
    assert finding(off(3e-5), off(0), repeats=[off(0), off(1e-5)]).is_right
    assert finding(off(3e-3), off(0), precision=Precision.BF16).is_right
    assert finding(off(3e-2), off(0), precision=Precision.BF16).operation == "aten.exp"


def test_rounding_that_an_operation_amplifies_is_not_told():
    def drifting(by):
        def program(run, x):
            first = run("exp", lambda a: np.exp(a) * (1 + by), x)
            return run("square", np.square, first)

        return program

    found = finding(drifting(3e-6), drifting(0.0))
    assert not found.operation
    assert "as of rounding" in found.sentence


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda call: replace(call, problem="it is compiled"), "in the test set, it is compiled"),
        (
            lambda call: replace(call, inputs=(replace(call.inputs[0], kind="float32[3, 8]"),)),
            "on rank 0, it gets float32[3, 8], and in the control float32[6, 8]",
        ),
        (
            lambda call: replace(call, inputs=call_of(norm, OTHER).inputs),
            "on rank 0, what it gets is off by",
        ),
        (
            lambda call: replace(call, outputs=(replace(call.outputs[0], kind="float16[1]"),)),
            "it returns tensors of other shapes or types",
        ),
        (lambda call: replace(call, left_out=7), "it has more than 5 operations"),
        (
            lambda call: replace(call, outputs=(replace(call.outputs[0], made_by=UNSEEN),)),
            "computed where no operation is seen, as in compiled code",
        ),
        (
            lambda call: replace(call, outputs=(replace(call.outputs[0], made_by=0),)),
            "changed in place through another view",
        ),
    ],
)
def test_what_cannot_be_compared_is_not_told(change, why):
    wrong = call_of(norm_with_eps_outside)
    found = wrong_operation({0: change(wrong)}, {0: call_of(norm)}, [], Precision.FP32)
    assert not found.operation
    assert why in found.sentence
    assert wrong_operation({0: wrong}, {0: call_of(norm)}, [], Precision.FP32).operation


def test_an_input_that_differs_already_is_named_such_as_a_mask():
    """Masks are of no floating-point type: the sums of modules do not show them."""

    def with_mask(value):
        mask = replace(Running().sums(value), kind="bool[6, 8]")
        call = call_of(norm)
        return replace(call, inputs=(*call.inputs, mask))

    found = wrong_operation({0: with_mask(X)}, {0: with_mask(OTHER)}, [], Precision.FP32)
    assert not found.operation
    assert "on rank 0, its input 2 of 2, bool[6, 8], is off by " in found.sentence
    assert found.sentence.endswith(" already, while others agree: look at what makes it")
    assert wrong_operation({0: with_mask(X)}, {0: with_mask(X)}, [], Precision.FP32).is_right


def test_no_rank_may_have_recorded_it():
    found = wrong_operation({}, {0: call_of(norm)}, [], Precision.FP32)
    assert found.sentence.endswith("in the test set, no rank has recorded it")


def test_a_rank_is_compared_with_the_one_that_got_the_same_and_a_single_wrong_one_is_named():
    def wrong(run, x):
        return norm(run, x, eps=0.1)

    control = {0: call_of(norm), 1: call_of(norm, OTHER)}
    found = wrong_operation(
        {0: call_of(norm), 2: call_of(wrong, OTHER)}, control, [], Precision.FP32
    )
    assert found.operation == "aten.add"
    assert found.sentence.startswith("on rank 2, but not on rank 0: inside layers.1.norm, aten.add")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (call_of(norm, OTHER + 5), "on rank 1, what it gets is off by"),
        (call_of(norm, problem="it was not called"), "on rank 1, it was not called"),
    ],
)
def test_a_module_is_not_right_if_a_rank_was_not_compared(other, why):
    control = {0: call_of(norm), 1: call_of(norm, OTHER)}
    found = wrong_operation({0: call_of(norm), 1: other}, control, [], Precision.FP32)
    assert not found.is_right
    assert f"is right in the rerun on the ranks 0, and {why}" in found.sentence


def test_a_repeat_that_differs_without_bound_is_no_noise():
    control = call_of(norm)
    odd = replace(control, inputs=(replace(control.inputs[0], not_finite=3),))
    test = call_of(norm, OTHER)
    found = wrong_operation({0: test}, {0: control}, [{0: odd}], Precision.FP32)
    assert "on rank 0, what it gets is off by" in found.sentence


def test_a_repeat_of_other_tensors_is_left_out():
    control = call_of(norm)
    (first, *rest) = control.operations
    fewer = replace(control, operations=(replace(first, inputs=()), *rest))
    none = replace(control, outputs=())
    for repeat in (fewer, none):
        found = wrong_operation(
            {0: call_of(lambda run, x: norm(run, x, eps=0.1))},
            {0: control},
            [{0: repeat}],
            Precision.FP32,
        )
        assert found.operation == "aten.add"


def test_entries_that_are_not_finite_count():
    control = call_of(norm)
    bad = replace(control.outputs[0], not_finite=1, made_by=4)
    last = replace(control.operations[-1], outputs=(bad,))
    test = replace(control, operations=(*control.operations[:-1], last), outputs=(bad,))
    found = wrong_operation({0: test}, {0: control}, [], Precision.FP32)
    assert found.operation == "aten.mul"
    assert "entries that are not finite" in found.sentence


def test_names_and_marks_are_those_of_the_files():
    assert (file.MODEL, file.GIVEN, file.UNSEEN) == (MODEL, GIVEN, UNSEEN)
