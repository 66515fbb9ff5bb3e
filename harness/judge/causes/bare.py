"""What curves say of a cause: when they part and how, and nothing about gradients."""

from __future__ import annotations

from harness.judge.apart import apart
from harness.judge.causes.cause import Cause
from harness.judge.envelope import Envelope
from harness.judge.scene import Scene, begins, words_of
from harness.model import CauseClass, Outcome

_LOOK_AT = (
    "whether both runs had the same initial weights, samples, batch size and learning rate, which "
    "curves do not tell; then give both the probe (docs/probe.md), which names what differs"
)
_UNTOLD = (
    "what made it, two curves do not tell: initial weights, samples, learning rate, objective and "
    "gradients look alike in them"
)


def logged_twice(scene: Scene) -> Cause | None:
    """Steps that stand twice in a log, with other values."""
    conflicts = scene.case.test.replay_conflicts
    if not conflicts:
        return None
    others = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
    return Cause(
        f"steps were logged twice with other values, {conflicts[0]}{others}: by a restart that "
        "lost state, or by two runs into one log, which curves do not tell apart",
        _KIND,
        "whether the run was restarted there, and then what its checkpoint holds and loads",
    )


def curves_part(scene: Scene) -> Cause | None:
    """Where two curves part, for good or not; causes look alike in a curve."""
    failed = [check for check in scene.checks.values() if check.outcome is Outcome.FAIL]
    curves = [each for each in scene.off() if _failed(scene, each)]
    if not failed:
        return None
    if not curves:
        return Cause(f"the curves differ: {failed[0].detail}; {_UNTOLD}", _KIND, _LOOK_AT)
    curve = curves[0]
    onset = scene.first_failure()
    index = curve.index_of(onset if onset is not None else curve.onset or 0)
    index = min(index, curve.steps.size - 1)
    step, off = int(curve.steps[index]), float(curve.difference[index])
    if index and curve.onset == step:
        how = "suddenly " if begins(curve, index) else ""
        head = (
            f"the curves agree until step {step}, where {words_of(curve)} is {how}off by {off:.2g}"
        )
    else:
        test, control = apart(float(curve.test[index]), float(curve.control[index]))
        head = (
            f"the curves differ: {words_of(curve)} {test} for {control} at step {step} (relative "
            f"{off:.2g})"
        )
    lasting = onset is None and scene.detail(f"{_slug(curve)}-envelope")
    return Cause(f"{head}; {lasting + '; ' if lasting else ''}{_UNTOLD}", _KIND, _LOOK_AT)


_KIND = CauseClass.UNKNOWN


def _slug(curve: Envelope) -> str:
    return curve.signal.replace("_", "-")


def _failed(scene: Scene, curve: Envelope) -> bool:
    return scene.failed(f"{_slug(curve)}-first-step", f"{_slug(curve)}-envelope")
