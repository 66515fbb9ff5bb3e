"""Causes from copies that disagree: which first, tells why."""

from dataclasses import replace

from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    broken,
    changed,
    scaled,
    since,
    turned,
    verdict_of,
)

from converge_harness.model import CauseClass, Disagreement, Parallelism, ReplicaSample

TP2 = Parallelism(dp_shard=2, tp=2)
NORMS = [f"layers.{layer}.attention_norm.weight" for layer in range(4)]


def differing(first, *kinds, steps=(0, 1, 2, 4, 8, 16), dims=("tp",), count=4):
    """Replicas of which the norms differ from a step on."""
    wrong = tuple(
        Disagreement(kind, name, dims, ((0, 2), (1, 3))) for kind in kinds for name in NORMS
    )
    return tuple(
        ReplicaSample(step, {"parameter": 9}, wrong, len(wrong) or count)
        if step >= first
        else ReplicaSample(step, {"parameter": 9})
        for step in steps
    )


def test_weights_that_were_never_synchronised():
    verdict = verdict_of(broken(TP2, replicas=differing(0, "parameter")))
    assert verdict.cause_class is CauseClass.REPLICAS
    assert verdict.cause.startswith(
        "replicas differ: at step 0 the parameter of layers.*.attention_norm.weight along tp "
        "differ between copies (ranks [0, 2] against [1, 3]): these ranks began with different "
        "values"
    )
    assert verdict.look_at.startswith("initialisation and loading over tp")


def test_a_reduction_that_is_missing():
    test = broken(TP2, replicas=differing(1, "gradient", "optimizer state", "parameter"))
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.REPLICAS
    assert "from the first step on a reduction of these gradients over tp is missing" in (
        verdict.cause
    )
    assert verdict.look_at.startswith("the gradient reduction over tp")


def test_an_update_that_differs_by_rank():
    verdict = verdict_of(broken(TP2, replicas=differing(1, "optimizer state", "parameter")))
    assert "the update differs by rank, after step 0" in verdict.cause
    assert "clipping by its own norm" in verdict.look_at
    late = verdict_of(broken(TP2, replicas=differing(8, "parameter")))
    assert "at step 8" in late.cause
    assert "the update differs by rank, after step 4" in late.cause


def test_a_buffer_of_each_rank():
    verdict = verdict_of(broken(TP2, replicas=differing(1, "buffer")))
    assert "a buffer is updated by each rank from its own numbers" in verdict.cause
    assert verdict.look_at == "where these buffers are updated and reduced over tp"


def test_tensors_without_names_and_dimensions():
    test = broken(replicas=differing(1, dims=(), count=7))
    assert "7 tensors are not the same on all ranks" in verdict_of(test).cause
    nowhere = differing(1, "gradient", dims=())
    assert " along " not in verdict_of(broken(replicas=nowhere)).cause


def test_gradients_of_copies_that_differ_from_the_control_are_said_beside():
    test = broken(TP2, gradient=scaled(2), replicas=differing(1, "gradient"))
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.REPLICAS
    assert "at step 1 all gradients are 2 times the control's" in verdict.cause


def test_copies_that_begin_to_differ_after_something_else_are_not_the_cause():
    test = broken(TP2, gradient=scaled(2), replicas=differing(8, "parameter"))
    assert verdict_of(test).cause_class is CauseClass.GRADIENT_SCALE


def test_a_loss_that_parts_between_two_comparisons_may_be_due_to_the_copies():
    copies = broken(TP2, replicas=differing(8, "parameter"))
    parted = changed(copies, lambda step, x: x * (1.001 if step > 5 else 1), *BOTH_LOSSES)
    assert verdict_of(parted).cause_class is CauseClass.REPLICAS
    before = changed(copies, lambda step, x: x * (1.001 if step > 3 else 1), *BOTH_LOSSES)
    assert verdict_of(before).cause_class is CauseClass.LATER


def test_a_metric_that_is_wrong_from_the_first_step_comes_before_late_copies():
    test = changed(broken(TP2), lambda _, x: 2 * x, BOTH_NORMS[0])
    verdict = verdict_of(replace(test, replicas=differing(8, "parameter")))
    assert verdict.cause_class is CauseClass.METRIC_ONLY


def test_kinds_that_are_not_listed_agree_however_many_tensors_differ():
    replicas = [
        replace(each, count=78) if each.count else each for each in differing(8, "parameter")
    ]
    test = broken(TP2, gradient=since(8, turned(lambda name: True)), replicas=tuple(replicas))
    test = changed(test, lambda step, x: x * (1.3 if step >= 5 else 1), *BOTH_NORMS)
    verdict = verdict_of(test)
    assert "74 more tensors differ" in verdict.cause
    assert "the update differs by rank, after step 4 and by step 5" in verdict.cause
    assert verdict.look_at.startswith("what each rank does between reduction and step")


def test_a_buffer_that_one_rank_built_otherwise():
    verdict = verdict_of(broken(TP2, replicas=differing(0, "buffer")))
    assert "these ranks began with different values of a buffer" in verdict.cause
    assert verdict.look_at.startswith("where these buffers are built over tp")


def test_the_state_of_the_optimizer_tells_the_gradients_that_it_took_from_its_settings():
    took = verdict_of(broken(TP2, replicas=differing(1, "optimizer state", "parameter")))
    assert "the optimizer's state differs, too: it took other gradients" in took.cause
    assert "clipping by its own norm" in took.look_at
    compared = {"parameter": 9, "optimizer state": 9}
    known = [replace(each, compared=compared) for each in differing(1, "parameter")]
    settings = verdict_of(broken(TP2, replicas=tuple(known)))
    assert "the optimizer's state is the same" in settings.cause
    assert "over tp: the optimizer's learning rate, weight decay" in settings.look_at
    unknown = verdict_of(broken(TP2, replicas=differing(1, "parameter")))
    assert "the optimizer's state" not in unknown.cause
