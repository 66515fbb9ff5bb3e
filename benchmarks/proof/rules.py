"""Other projects' gates, reimplemented from their published code: which runs they call broken.

Each is a pure function of the test curve, its control's curve and the curves of the control's
repeats. It does what the original does, also with NaN and missing steps. Versions are those of 2025
and 2026. The originals compare a configuration with its own golden values; here they compare two
configurations, for which people use them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

from proof.curves import Curve

Gate = Callable[[Curve, Curve, Sequence[Curve]], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A gate with its name and source."""

    name: str
    source: str
    flags: Gate
    """Whether it calls the test curve broken."""


def exact(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Losses are equal, bit for bit in float32, at the same steps.

    torchtitan, ``scripts/loss_compare.py --assert-equal``: reads TensorBoard (float32); the sets of
    steps must be equal, then every value by ``==``. NaN equals nothing, not even NaN.
    """
    if test.loss.keys() != control.loss.keys():
        return True
    return any(test.loss[step] != value for step, value in control.loss.items())


def close_1e5(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Every loss is within atol 1e-8 + rtol 1e-5 of the control's.

    Liger-Kernel, ``test/utils.py: assert_verbose_allclose`` with its defaults, as its convergence
    tests use it for fp32 losses. A different number of steps fails; NaN or infinity on one side
    only fails, on both sides at the same step passes.
    """
    if len(test.loss) != len(control.loss):
        return True
    pairs = zip(test.loss.values(), control.loss.values(), strict=True)
    return any(not _allclose(mine, golden) for mine, golden in pairs)


def _allclose(mine: float, golden: float, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    if math.isfinite(mine) and math.isfinite(golden):
        return abs(mine - golden) <= atol + rtol * abs(golden)
    return mine == golden or (math.isnan(mine) and math.isnan(golden))


def megatron_exact(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Losses are equal after rounding to five decimals, at every step of the golden values.

    Megatron-LM, ``tests/functional_tests/python_test_utils/common.py``, ``DeterministicTest`` on
    "lm loss": ``np.isclose`` with no tolerance, every step. A missing step counts as infinity, and
    infinity equals infinity; NaN equals nothing. Goldens have every fifth step or every step; here
    every step, which is stricter.
    """
    return not all(_megatron_close(test, control, rtol=0.0))


def megatron_5_percent(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Losses are within 5%, except for one step in a hundred, and always for one step.

    The same file, ``ApproximateTest(rtol=0.05)``, as ``test_pretraining_regular_pipeline.py`` sets
    it for "lm loss": the share of close steps must reach 1 - k / n with k = n // 100, at least 1
    and at most 50. So one step of a run may have any value, even NaN.
    """
    close = _megatron_close(test, control, rtol=0.05)
    if len(close) == 1:
        return not close[0]
    allowed = min(max(len(close) // 100, 1), 50)
    return bool(np.mean(close) < 1 - allowed / len(close))


def _megatron_close(test: Curve, control: Curve, rtol: float) -> list[bool]:
    """Per step of the golden values: whether the run's value is close."""
    steps = sorted(control.loss)
    mine = [round(test.loss[step], 5) if step in test.loss else math.inf for step in steps]
    golden = [round(control.loss[step], 5) for step in steps]
    return np.isclose(mine, golden, rtol=rtol, atol=0.0).tolist()


def within_1_percent(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Every loss is within 1% of the control's.

    Megatron-LM, ``test_grpo_training_loop.py: validate_with_tolerance``: a step that is missing
    fails, further steps are ignored. A difference fails if it is greater than 1%, and NaN is not
    greater than anything: a NaN passes. A golden value below 1e-6 asks for one below 1e-6.
    """
    return any(_beyond_1_percent(test.loss.get(at), golden) for at, golden in control.loss.items())


def _beyond_1_percent(mine: float | None, golden: float) -> bool:
    if mine is None:
        return True
    if abs(golden) < 1e-6:  # noqa: PLR2004 - the original's
        return abs(mine) > 1e-6  # noqa: PLR2004
    return abs(mine - golden) / abs(golden) > 0.01  # noqa: PLR2004


def megatron_bridge(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Shape, bands and end of the loss curve: convergence is validated by several measures.

    Megatron-Bridge, ``scripts/performance/utils/evaluate.py: validate_convergence`` with its
    defaults: Pearson correlation at least .95; relative difference at most 10% where the golden
    loss is above 2, 5% above 0.5, else 2%, with at most 10% of the points outside; final loss
    within 3%; at most 10% of the residuals beyond three of their own standard deviations. Losses
    come from a log with seven digits. A missing step is NaN, and every comparison with NaN is
    false, so that it passes; but a NaN or infinity in the run's own grad norm fails.
    """
    if any(not math.isfinite(norm) for norm in test.grad_norm.values()):
        return True
    steps = sorted(control.loss)
    golden = np.array([_seven_digits(control.loss[step]) for step in steps])
    mine = np.array([_seven_digits(test.loss.get(step, math.nan)) for step in steps])
    with np.errstate(all="ignore"):
        if len(steps) > 1 and np.corrcoef(mine, golden)[0, 1] < 0.95:  # noqa: PLR2004
            return True
        band = np.where(golden > 2.0, 0.10, np.where(golden > 0.5, 0.05, 0.02))  # noqa: PLR2004
        relative = np.abs(mine - golden) / np.abs(golden)
        if np.mean(relative > band) > 0.1 or relative[-1] > 0.03:  # noqa: PLR2004
            return True
        residuals = mine - golden
        outliers = np.abs(residuals - residuals.mean()) > 3.0 * residuals.std()
    return bool(outliers.mean() > 0.1)  # noqa: PLR2004


def _seven_digits(value: float) -> float:
    return float(f"{value:.6E}")


def final_1_percent(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """The last loss is within 1% of the control's.

    A common way to compare two runs by their end. A NaN, or no value at the control's last step,
    fails.
    """
    last = max(control.loss)
    mine, golden = test.loss.get(last, math.nan), control.loss[last]
    return not abs(mine - golden) <= 0.01 * abs(golden)


def converges_too_fast(test: Curve, control: Curve, repeats: Sequence[Curve] = ()) -> bool:
    """A one-sided t-test at 5%: the run reaches a target loss earlier than reference runs do.

    MLPerf, ``mlperf_logging/rcp_checker``: reference convergence points. There, epochs to a quality
    target; here, steps until the loss first reaches the control's of three quarters of the run,
    interpolated between steps. References are the control and its repeats; as there, the fastest
    and the slowest are left out, the standard deviation is the references' own for both sides,
    without Bessel's correction, and without any spread the limit is their mean. There, a submission
    is several runs; here it is one. A slower run never fails, unless it does not reach the target
    at all (NaN included), which is not a result there either. With fewer than four references
    nothing fails.
    """
    if len(repeats) < 3:  # noqa: PLR2004 - two are left out, and a spread needs two
        return False
    steps = sorted(control.loss)
    target = control.loss[steps[math.ceil(0.75 * len(steps)) - 1]]
    references = sorted(_steps_to(target, run.loss) for run in (control, *repeats))[1:-1]
    with np.errstate(invalid="ignore"):  # a reference that never reaches it: infinity - infinity
        mean, deviation = float(np.mean(references)), float(np.std(references))
    count = len(references)
    margin = scipy.stats.t.ppf(0.95, count - 1) * deviation * math.sqrt(1 / count + 1)
    mine = _steps_to(target, test.loss)
    return math.isinf(mine) or mine < mean - margin


def _steps_to(target: float, loss: Mapping[int, float]) -> float:
    """Steps until the loss first reaches the target; infinite if it never does."""
    before: tuple[int, float] | None = None
    for step, value in sorted(loss.items()):
        if value <= target:
            if before is None:
                return float(step)
            at, above = before
            return at + (step - at) * (above - target) / (above - value)
        before = (step, value) if math.isfinite(value) else None
    return math.inf


def grad_norm_1_percent(test: Curve, control: Curve, _repeats: Sequence[Curve] = ()) -> bool:
    """Every grad norm is within 1% of the control's, or within 0.01.

    slime (THUDM), ``--ci-load-grad-norm``: ``math.isclose(rel_tol=0.01, abs_tol=0.01)`` in each
    step of the run against the value that was saved for that step. NaN is never close; a step
    without a saved value fails; steps that the run did not reach are not compared.
    """
    return any(
        step not in control.grad_norm
        or not math.isclose(norm, control.grad_norm[step], rel_tol=0.01, abs_tol=0.01)
        for step, norm in test.grad_norm.items()
    )


ONE_PERCENT = "1% at every step"
RULES: tuple[Rule, ...] = (
    Rule("exact equality", "torchtitan loss_compare.py", exact),
    Rule("rtol 1e-5", "Liger-Kernel", close_1e5),
    Rule("equal to 5 decimals", "Megatron-LM golden values", megatron_exact),
    Rule(ONE_PERCENT, "Megatron-LM GRPO test", within_1_percent),
    Rule("5%, one step excused", "Megatron-LM golden values", megatron_5_percent),
    Rule("correlation and bands", "Megatron-Bridge", megatron_bridge),
    Rule("final loss 1%", "common practice", final_1_percent),
    Rule("one-sided t-test", "MLPerf reference convergence points", converges_too_fast),
    Rule("grad norm 1%", "slime --ci-load-grad-norm", grad_norm_1_percent),
)
"""All rules, on the loss except the last one; strictest first."""
