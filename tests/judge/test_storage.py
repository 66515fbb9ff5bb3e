"""What each parameter is stored in, where a run has parameters of two types."""

from dataclasses import replace

import numpy as np
from judge_examples import SAMPLE_STEPS, judge, left_after, run, spec

from converge_harness.judge.calibration import flaw_of, tensor_differences
from converge_harness.judge.compare.floors import SPACING, SPACING_FLOAT32, spacing, storage
from converge_harness.model import Judgement, Precision, TensorRows, TensorSample

MATRIX, NORM, EMBEDDING = "layers.0.up.weight", "norm.weight", "tok_embeddings.weight"
SIZES = {MATRIX: 16384, NORM: 256, EMBEDDING: 4096}
RATE = 1e-3
"""What a parameter's entries move by in a step: less than bfloat16's spacing around 1."""
MIXED = "bfloat16+float32"
SPEC = spec()


def as_bfloat16(values):
    """The nearest numbers of eight binary digits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(fraction * 2**8) / 2**8, exponent)


def as_float32(values):
    return values.astype(np.float32).astype(np.float64)


def rows(tensors):
    """As the probe leaves them: each entry goes into one of 64 sums, with a sign."""
    sums = np.zeros((len(tensors), 64))
    for row, (name, values) in enumerate(tensors.items()):
        draw = np.random.default_rng(list(name.encode()))
        places, signs = draw.integers(64, size=values.size), draw.choice([-1, 1], values.size)
        np.add.at(sums[row], places, signs * values)
    norms = np.array([float(np.linalg.norm(values)) for values in tensors.values()])
    nothing = np.zeros(len(tensors), dtype=np.int64)
    return TensorRows(sums, norms, nothing, nothing)


def samples(stored, change=lambda step, name, moved: moved):
    """A norm's weights that begin at 1, and others drawn at random; stored as the names say."""
    draw = np.random.default_rng(0)
    weights = {name: 0.02 * draw.standard_normal(size) for name, size in SIZES.items()}
    weights[NORM] = np.ones(SIZES[NORM])
    weights = {name: stored[name](values) for name, values in weights.items()}
    found, last = [], 0
    for step in SAMPLE_STEPS:
        for _ in range(step - last):
            for name, values in weights.items():
                moved = RATE * draw.standard_normal(values.size)
                weights[name] = stored[name](values + change(step, name, moved))
        last = step
        gradients = {name: draw.standard_normal(size) for name, size in SIZES.items()}
        before = rows(gradients) if step else None
        sizes = np.array(list(SIZES.values()))
        after = left_after(step, before) if before else None
        found.append(TensorSample(step, tuple(SIZES), sizes, rows(weights), before, after, None))
    return tuple(found)


STORED = {MATRIX: as_bfloat16, NORM: as_float32, EMBEDDING: as_bfloat16}
FORCE = replace(
    run().in_force,
    param_dtype=MIXED,
    param_dtypes={"bfloat16": (MATRIX, EMBEDDING), "float32": (NORM,)},
)


def trained(name="t", stored=STORED, force=FORCE, **changes):
    return run(name, samples=samples(stored, **changes), in_force=force, precision=Precision.BF16)


CONTROL = trained("control")


def fine(test, control):
    return storage(test, control, SPACING_FLOAT32).fine


def test_each_parameter_counts_as_its_own_type():
    assert fine(CONTROL, CONTROL) == {NORM}
    found = storage(CONTROL, CONTROL, SPACING_FLOAT32).spacings((MATRIX, NORM))
    assert found.tolist() == [SPACING["bfloat16"], SPACING_FLOAT32]
    assert spacing(CONTROL, 0.0) == SPACING["bfloat16"]


def test_where_a_run_does_not_say_which_has_which_the_coarsest_counts():
    """As runs of before they said it."""
    silent = replace(CONTROL, in_force=replace(FORCE, param_dtypes={}))
    assert not fine(silent, silent)
    assert set(storage(silent, silent, 0.0).spacings(tuple(SIZES))) == {SPACING["bfloat16"]}


def test_where_all_are_of_one_type_or_the_test_set_has_others_the_coarsest_counts():
    alike = replace(CONTROL, in_force=replace(FORCE, param_dtype="bfloat16", param_dtypes={}))
    both = {"bfloat16": [MATRIX, EMBEDDING], "float16": [NORM]}
    changed = replace(FORCE, param_dtype="bfloat16+float16", param_dtypes=both)
    float16 = replace(CONTROL, in_force=changed)
    assert not fine(alike, alike)
    assert not fine(float16, float16)
    assert not fine(alike, CONTROL)
    assert set(storage(alike, CONTROL, 0.0).spacings(tuple(SIZES))) == {SPACING["bfloat16"]}
    float32 = replace(CONTROL, in_force=replace(FORCE, param_dtype="float32", param_dtypes={}))
    assert set(storage(float32, float32, 0.0).spacings(tuple(SIZES))) == {0.0}


def judged(test, control=CONTROL):
    return judge(test, control, spec=SPEC, control_spec=SPEC)


def stands_still(tensor):
    return lambda step, name, moved: 0 * moved if name == tensor else moved


def off(verdict):
    """Names of the tensors whose updates are outside of their limits."""
    return {
        each.tensor
        for check in verdict.checks
        if check.name.startswith("updates")
        for each in check.deviations
    }


def test_a_norm_in_float32_is_judged_as_sharply_as_elsewhere():
    still = judged(trained(change=stands_still(NORM)))
    assert still.judgement is Judgement.FAIL
    assert off(still) == {NORM}
    rounded = judged(trained(stored={**STORED, NORM: as_bfloat16}))
    assert NORM in off(rounded)


def test_a_norm_in_bfloat16_is_not_judged_by_what_is_lost_in_storing_it():
    force = replace(FORCE, param_dtype="bfloat16", param_dtypes={})
    stored = {**STORED, NORM: as_bfloat16}
    still = trained(stored=stored, force=force, change=stands_still(NORM))
    assert NORM not in off(judged(still, trained("control", stored=stored, force=force)))


def test_a_matrix_in_bfloat16_beside_it_keeps_its_limits():
    assert off(judged(trained(change=stands_still(MATRIX)))) == {MATRIX}
    rest = judged(trained())
    assert rest.judgement is not Judgement.FAIL
    assert not off(rest)


def test_repeats_are_held_to_each_type_too():
    lost = tensor_differences(CONTROL, [trained("control.ulp")]).lost[4]
    of = dict(zip(SIZES, lost, strict=True))
    assert of[NORM] == 0.0
    assert of[MATRIX] > 0.1  # of the update
    assert not flaw_of(starts_at(1 + 1e-7), CONTROL)
    assert "starts from other weights" in flaw_of(starts_at(1 + 1e-4), CONTROL)


def starts_at(norm):
    """A repeat by an ulp, and weights of a norm that it begins with."""
    first, *rest = CONTROL.samples
    row = list(SIZES).index(NORM)
    begins = np.where(np.arange(len(SIZES)) == row, norm, 1.0)
    moved = replace(
        first.parameters,
        sketch=first.parameters.sketch * begins[:, None],
        norm=first.parameters.norm * begins,
    )
    start = replace(first, parameters=moved)
    return replace(CONTROL, name="control.ulp", repeat="ulp", samples=(start, *rest))
