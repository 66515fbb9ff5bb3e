"""What the probe saw of training loops that are not ours: pure questions about runs.

A program without the probe leaves only a curve. One with the probe leaves the evidence that our
ranks leave, except what only its loop knows: where gradients were taken, whether the probe got its
logits, and a grad norm of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from converge_harness.judge.compare.curves import has
from converge_harness.model import JUDGED_SIGNALS, Evidence, InForce, Probing, SetSpec


def is_curve(spec: SetSpec | None) -> bool:
    """Whether a set is a program without the probe, which leaves only a curve."""
    return spec is not None and not spec.trainer.can.probed


def probing(evidence: Evidence) -> Probing:
    """How a run was probed; without a record of it, as our ranks probe theirs."""
    return (evidence.in_force or InForce()).probing


def required(test: Evidence, control: Evidence) -> tuple[str, ...]:
    """Signals of a probed program without which there is no verdict.

    Not every loop computes a norm or gives the probe its logits; both sides must have the same.
    """
    optional = {
        "grad_norm": has(test, "grad_norm") or has(control, "grad_norm"),
        "loss_recomputed": probing(test).recomputes_loss and probing(control).recomputes_loss,
    }
    return tuple(signal for signal in JUDGED_SIGNALS if optional.get(signal, True))


def differently_probed(test: Evidence, control: Evidence) -> Iterator[str]:
    """One clause per reason why the evidence of two runs is not comparable."""
    ours, theirs = probing(test), probing(control)
    if ours.late != theirs.late:
        taken, base = (each.gradients for each in (ours, theirs))
        yield (
            f"gradients were taken {taken} in {test.name}, {base} in {control.name}: call "
            "probe.gradients() in both, before anything is clipped"
        )
    if ours.recomputes_loss != theirs.recomputes_loss:
        with_it, without = (test, control) if ours.recomputes_loss else (control, test)
        yield (
            f"the loss was recomputed in {with_it.name} and not in {without.name}: call "
            "probe.logits(logits, labels) in both or in neither"
        )
