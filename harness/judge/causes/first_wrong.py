"""The module where a difference first appears, by module inputs and outputs of the first batches.

A module is to blame when its output is wrong and all that was computed before it is right, in the
order of the control's calls; in the backward pass, when the gradient w.r.t. its input is wrong and
all gradients before it are right. If what a module gets is the first wrong tensor, or if several
modules or none get a tensor whose gradient is wrong, it is the code around: that of the module that
contains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from converge_harness.judge.compare.activations import ModuleComparison, ModuleDifference
from converge_harness.judge.comparison import RunComparison
from converge_harness.model import CauseClass, Check, Outcome

_OF_A_STEP = frozenset(
    {
        CauseClass.NOT_FINITE,
        CauseClass.NO_GRADIENT,
        CauseClass.GRADIENT_SCALE,
        CauseClass.GROUP_SCALE,
        CauseClass.GRADIENT_DIRECTION,
        CauseClass.OBJECTIVE,
        CauseClass.ROUNDING_GROWTH,
        CauseClass.UNKNOWN,
    }
)
"""Classes of bugs of the forward or backward pass; of others modules do not show the place."""
_SAME_START = ("same-data", "same-initial-parameters", "starts-as-the-control")
"""If one of these is not right, every module differs."""
MODEL = "the model"
"""The code of the model itself, outside of its modules."""
_NEARLY_ONE = 1e-3


class FirstWrong(NamedTuple):
    """Where a difference first appears."""

    module: str = ""
    """Canonical name, or MODEL; empty if no module is wrong, or nothing was recorded."""
    sentence: str = ""
    """With the numbers; empty if nothing was recorded."""
    forward: bool = False
    """Whether it is the module's output that is wrong, or its input, and not a gradient."""


def first_wrong(
    compared: RunComparison, checks: Mapping[str, Check], kind: CauseClass | None
) -> FirstWrong:
    """The module where a failed test set first differs from its control."""
    modules = comparable_modules(compared, checks)
    if modules is None or kind not in _OF_A_STEP:
        return FirstWrong()
    wrong = modules.first_off
    if wrong is None:
        return _none(modules, kind, _off_gradients(checks))
    if wrong.row.backward:
        return FirstWrong(*_backward(modules, wrong))
    return FirstWrong(*_forward(modules, wrong), forward=True)


def comparable_modules(
    compared: RunComparison, checks: Mapping[str, Check]
) -> ModuleComparison | None:
    """The modules of both runs; None if they compute with other weights, samples or drawings."""
    other_start = any(
        name in checks and checks[name].outcome in (Outcome.FAIL, Outcome.INVALID)
        for name in _SAME_START
    )
    return None if other_start or compared.draws else compared.modules


def _forward(modules: ModuleComparison, wrong: ModuleDifference) -> tuple[str, str]:
    row = wrong.row
    by = amount_of(wrong)
    if not row.is_input:
        inside = any(each.row.module.startswith(f"{row.module}.") for each in modules.forward)
        after = ", and all modules in it are right" if inside else ""
        return (
            row.module,
            f"the output of {row.module} {by}, while all its inputs are right{after}",
        )
    parent = _caller(modules, row.module)
    called = _called_before(modules, wrong, parent)
    between = f"after {called} and before {row.module}" if called else f"before {row.module}"
    return parent, f"the input of {row.module} ({row.tensor}) {by}; {parent} computes it {between}"


def _backward(modules: ModuleComparison, wrong: ModuleDifference) -> tuple[str, str]:
    row, by = wrong.row, amount_of(wrong)
    right = "all outputs are right"
    takers = [
        name
        for name in wrong.taken_by
        if not any(other.startswith(f"{name}.") for other in wrong.taken_by)
    ]
    if len(takers) == 1:
        module = takers[0]
        return module, (
            f"{right}; the gradient w.r.t. the input of {module} {by}, while the one "
            "w.r.t. its output is right"
        )
    if takers:
        some = ", ".join(takers[:-1]) + f" and {takers[-1]}"
        return _caller(modules, *takers), (
            f"{right}; the gradient w.r.t. the input of {some} {by}, while those "
            "w.r.t. their outputs are right"
        )
    if wrong is modules.backward[-1]:
        return MODEL, (
            f"{right}; the gradient of the loss w.r.t. the output of {row.module} {by}, so the "
            "loss is a different function of it"
        )
    caller = _caller(modules, row.module)
    return caller, (
        f"{right}; the gradient w.r.t. the output of {row.module} {by}, while those w.r.t. all "
        f"later tensors are right; {caller} uses it"
    )


def _none(
    modules: ModuleComparison, kind: CauseClass | None, gradients: tuple[str, ...]
) -> FirstWrong:
    """No module computes anything wrong; the gradients of one module's weights may still be."""
    every = (*modules.forward, *modules.backward)
    count = len({each.row.module for each in modules.forward})
    furthest = max(every, key=lambda each: each.distance, default=None)
    to = f" to {furthest.distance:.1g} (rounding: {furthest.noise:.1g})" if furthest else ""
    scaled = abs(modules.factor - 1) > _NEARLY_ONE
    divided = f" once they are divided by {modules.factor:.4g}" if scaled else ""
    owners = {_caller(modules, name) for name in gradients}
    owner = owners.pop() if len(owners) == 1 and kind is not CauseClass.OBJECTIVE else MODEL
    if kind is CauseClass.OBJECTIVE:
        so = "the difference is in the loss, or too small to see here"
    elif owner == MODEL:
        so = "what differs comes after them: in the gradients of weights or their reduction"
    else:
        so = f"only the gradients of {owner}'s own weights are wrong"
    sentence = (
        f"no module: in the first batches the outputs of all {count} modules agree{to}, and so do "
        f"the gradients that flow back through them{divided}; so {so}"
    )
    return FirstWrong("" if owner == MODEL else owner, sentence)


def _off_gradients(checks: Mapping[str, Check]) -> tuple[str, ...]:
    """Names of weights whose gradients are wrong at the first step at which any is."""
    failed = (
        check.deviations
        for name, check in checks.items()
        if "gradient" in name and check.outcome is Outcome.FAIL and check.deviations
    )
    deviations = next(failed, ())
    first = min((each.step for each in deviations), default=0)
    return tuple(each.tensor for each in deviations if each.step == first)


def amount_of(wrong: ModuleDifference) -> str:
    """By how much a tensor is wrong, in words."""
    if wrong.is_zero:
        return "is zero"
    if not math.isfinite(wrong.distance):
        return "is not finite"
    return f"is off by {wrong.distance:.2g} (rounding: {wrong.noise:.1g})"


def _caller(modules: ModuleComparison, *called: str) -> str:
    """The innermost module whose code calls all of these; lists of modules are not called."""
    known = {each.row.module for each in modules.forward}
    name = called[0]
    while name:
        name = name.rpartition(".")[0]
        if name in known and all(each.startswith(f"{name}.") for each in called):
            return name
    return MODEL


def _called_before(modules: ModuleComparison, wrong: ModuleDifference, caller: str) -> str:
    """The last module with an output before a wrong input, if the same module calls both."""
    before = modules.forward[: modules.forward.index(wrong)]
    siblings = [
        each.row.module
        for each in before
        if not each.row.is_input and _caller(modules, each.row.module) == caller
    ]
    return siblings[-1] if siblings else ""
