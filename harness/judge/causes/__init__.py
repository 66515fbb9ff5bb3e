"""The likely cause of a failure: its signature against the known classes of silent bugs.

Classes and their signatures were collected from public issues of torchtitan, Megatron-LM,
DeepSpeed and PyTorch. The first signature that recognises a failure names the cause in one sentence
with the numbers behind it. A failure that none recognises is called unknown: no cause is better
than a wrong one. To add a cause, write one function with the decorator ``signature`` in the module
of its stage:

- ``resume``, ``inputs``, ``replicas``, ``random_numbers``: what a run started from or resumed with
- ``forward``, ``terms``, ``metrics``, ``backward``: a step up to its gradients;
  ``low_precision``: the same from frozen steps, against a reference in float32
- ``optimizer``, ``updates``, ``buffers``: what follows from gradients
- ``curves``: what only shows over many steps, and comparisons of two curves alone

``first_wrong`` finds the module where the difference first appears, which a cause then names.

``signature`` defines in which order they are asked, ``context`` what they look at; ``factors``,
``gradient_patterns``, ``location`` and ``parameter_names`` describe numbers and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from converge_harness.judge.causes import (
    backward,
    buffers,
    curves,
    forward,
    inputs,
    low_precision,
    metrics,
    optimizer,
    random_numbers,
    replicas,
    resume,
    terms,
    updates,
)
from converge_harness.judge.causes.context import Context
from converge_harness.judge.causes.inputs import blown_up_at
from converge_harness.judge.causes.resume import follows_from_resume
from converge_harness.judge.causes.signature import Cause, ComparisonKind, Signature, in_order
from converge_harness.judge.compare.envelopes import curves_alone
from converge_harness.judge.comparison import RunComparison
from converge_harness.model import CauseClass, Check, Outcome

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

_MODULES = (
    resume,
    inputs,
    replicas,
    random_numbers,
    forward,
    terms,
    metrics,
    backward,
    low_precision,
    optimizer,
    updates,
    buffers,
    curves,
)

SIGNATURES: frozenset[Signature] = frozenset(
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Signature)
)

ORDERED: Mapping[ComparisonKind, tuple[Signature, ...]] = {
    kind: in_order(each for each in SIGNATURES if kind in each.asked_of) for kind in ComparisonKind
}
"""The signatures for each kind of comparison, most certain first: later ones only see what earlier
ones did not recognise."""


def likely_cause(compared: RunComparison, checks: Sequence[Check]) -> Cause:
    """Why a test set failed. At least one of ``checks`` is a FAIL."""
    context = Context(compared, {check.name: check for check in checks})
    found = next((cause for each in ORDERED[_kind_of(compared)] if (cause := each(context))), None)
    cause = found or _unknown(context)
    sentence = cause.sentence
    step = blown_up_at(context)
    if step is not None and cause.kind is not CauseClass.NOT_FINITE:
        sentence += f"; training then blew up at step {step}"
    doubts = [
        context.detail(name)
        for name in _DOUBTS
        if context.outcome(name) is Outcome.INVALID
        and name not in cause.quoted
        and not follows_from_resume(context, name)
    ]
    sentence += f"; note that {doubts[0]}" if doubts else ""
    return cause._replace(sentence=sentence)


def _kind_of(compared: RunComparison) -> ComparisonKind:
    if curves_alone(compared.test, compared.control):
        return ComparisonKind.CURVES
    return ComparisonKind.DRAWING if compared.draws else ComparisonKind.ORDINARY


def _unknown(context: Context) -> Cause:
    """For a failure of no known class: what failed, and nothing more."""
    failed = next(check for check in context.checks.values() if check.outcome is Outcome.FAIL)
    return Cause(f"unknown: {failed.name} failed ({failed.detail})", CauseClass.UNKNOWN)


__all__ = ["ORDERED", "SIGNATURES", "Cause", "likely_cause"]
