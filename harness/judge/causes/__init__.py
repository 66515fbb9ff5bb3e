"""The likely cause of a failure: its signature against the known classes of silent bugs.

Classes and their signatures were collected from public issues of torchtitan, Megatron-LM,
DeepSpeed and PyTorch. A signature is a function of a :class:`Context`; the first that recognises it
says so in one sentence with the numbers behind it. What nothing recognises is called unknown: no
cause is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.judge.causes.backward import (
    faintly_scaled,
    no_gradient,
    sampled_gradients,
    sampled_gradients_later,
)
from harness.judge.causes.buffers import (
    other_buffers,
    other_tables,
    rounded_tables,
    still_buffers,
)
from harness.judge.causes.context import Context
from harness.judge.causes.curves import (
    curves_part,
    gradients_from,
    later,
    logged_twice,
    lost_at_resume,
    one_step,
    rounding_growth,
)
from harness.judge.causes.first_steps import (
    gradient_direction,
    gradients_scaled,
    norm_scaled,
    objective,
)
from harness.judge.causes.forward import (
    added_term,
    forward_on_new_data,
    hidden_forward,
    scaled_objective,
    trained_objective,
)
from harness.judge.causes.inputs import blown_up_at, not_finite, other_input
from harness.judge.causes.low_precision import (
    beyond_rounding,
    drawn_otherwise,
    draws_by_itself,
    forward_at_frozen_weights,
    scaled_at_frozen_weights,
)
from harness.judge.causes.metrics import (
    contradiction,
    loss_of_right_gradients,
    loss_scaled_alone,
    metric_only,
)
from harness.judge.causes.optimizer import (
    averaged_otherwise,
    clipping,
    counted_first,
    counted_otherwise,
    moments_lost,
)
from harness.judge.causes.replicas import replicas
from harness.judge.causes.resume import (
    data_lost,
    follows_from_resume,
    not_continued,
    nothing_loaded,
    recovered_late,
    replayed_otherwise,
    state_lost,
    torn_loaded,
)
from harness.judge.causes.signature import Cause
from harness.judge.causes.updates import (
    frozen,
    initial,
    moved_too_far,
    rounded,
    some_parted,
    updated,
)
from harness.judge.compare.envelopes import curves_alone
from harness.judge.comparison import RunComparison
from harness.model import CauseClass, Check, Outcome

_DOUBTS = (
    "same-data",
    "same-tokens",
    "same-lr",
    "named-in-force",
    "nothing-unnamed",
    "config-differs-as-declared",
    "control-in-force",
    "probed-alike",
)
"""Integrity checks that, when INVALID, may explain a difference by themselves."""

Signature = Callable[[Context], Cause | None]

SIGNATURES: tuple[Signature, ...] = (
    nothing_loaded,
    data_lost,
    torn_loaded,
    state_lost,
    not_continued,
    replayed_otherwise,
    recovered_late,
    not_finite,
    other_input,
    no_gradient,
    still_buffers,
    replicas,
    initial,
    draws_by_itself,
    counted_first,
    other_tables,
    clipping,
    scaled_objective,
    trained_objective,
    added_term,
    metric_only,
    loss_of_right_gradients,
    loss_scaled_alone,
    scaled_at_frozen_weights,
    hidden_forward,
    forward_at_frozen_weights,
    averaged_otherwise,
    other_buffers,
    sampled_gradients,
    beyond_rounding,
    faintly_scaled,
    gradients_scaled,
    gradient_direction,
    objective,
    lost_at_resume,
    frozen,
    counted_otherwise,
    moments_lost,
    one_step,
    rounding_growth,
    gradients_from,
    sampled_gradients_later,
    moved_too_far,
    rounded,
    some_parted,
    forward_on_new_data,
    updated,
    later,
    contradiction,
    rounded_tables,
)
"""Most certain first: later ones only see what earlier ones did not recognise."""

OF_CURVES: tuple[Signature, ...] = (
    not_finite,
    other_input,
    no_gradient,
    metric_only,
    loss_scaled_alone,
    norm_scaled,
    logged_twice,
    one_step,
    rounding_growth,
    curves_part,
)
"""Those that need no more than curves. Of wrong gradients a grad norm shows one factor at every
step; where they point, and whether the forward pass is right, it does not show."""

OF_DRAWING: tuple[Signature, ...] = (
    not_finite,
    other_input,
    no_gradient,
    replicas,
    initial,
    metric_only,
    drawn_otherwise,
    scaled_at_frozen_weights,
    beyond_rounding,
)
"""Those that compare no single steps, for a set that draws random numbers of its own. Its losses
differ by what it draws, so they do not tell a forward from a backward fault."""


def likely_cause(compared: RunComparison, checks: Sequence[Check]) -> Cause:
    """Why a test set failed. ``checks`` hold at least one FAIL."""
    context = Context(compared, {check.name: check for check in checks})
    bare = curves_alone(compared.test, compared.control)
    signatures = OF_CURVES if bare else OF_DRAWING if compared.draws else SIGNATURES
    found = next((cause for signature in signatures if (cause := signature(context))), None)
    cause = found or _unknown(context)
    sentence = cause.sentence
    step = blown_up_at(context)
    if step is not None and cause.kind is not CauseClass.NOT_FINITE:
        sentence += f"; training then blew up at step {step}"
    doubts = [
        context.detail(name)
        for name in _DOUBTS
        if context.outcome(name) is Outcome.INVALID
        and context.detail(name) not in sentence
        and not follows_from_resume(context, name)
    ]
    sentence += f"; mind that {doubts[0]}" if doubts else ""
    return cause._replace(sentence=sentence)


def _unknown(context: Context) -> Cause:
    """No class fits: say what failed and nothing more."""
    failed = next(check for check in context.checks.values() if check.outcome is Outcome.FAIL)
    return Cause(f"unknown: {failed.name} failed ({failed.detail})", CauseClass.UNKNOWN)


__all__ = ["Cause", "Signature", "likely_cause"]
