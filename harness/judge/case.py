"""What a judge looks at: the evidence of one test set, of its control, and of its repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.judge.envelope import Envelope, learn
from harness.judge.floors import JUDGED_SIGNALS
from harness.judge.soundness import disordered
from harness.model import Evidence, SetSpec


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of all checks; a check takes those that its parameters name."""

    test: Evidence
    control: Evidence
    repeats: tuple[Evidence, ...] = ()
    spec: SetSpec | None = None
    """What the test set names; None for curves that are not ours: then nothing is audited."""
    control_spec: SetSpec | None = None
    envelopes: Mapping[str, Envelope] = field(default_factory=dict)
    """Signal to envelope, without the signals that the two runs cannot be compared on."""


def make_case(
    test: Evidence,
    control: Evidence,
    repeats: Sequence[Evidence] = (),
    spec: SetSpec | None = None,
    control_spec: SetSpec | None = None,
    tolerances: Mapping[str, float] | None = None,
) -> Case:
    """Gather the inputs and learn the envelopes.

    A run whose steps are out of order has no envelope: which of its values is which is not known.
    Raises ValueError for an unusable tolerance.
    """
    ordered = disordered(test) is None and disordered(control) is None
    signals = JUDGED_SIGNALS if ordered else ()
    learnt = [learn(signal, test, control, repeats, tolerances) for signal in signals]
    return Case(
        test=test,
        control=control,
        repeats=tuple(repeats),
        spec=spec,
        control_spec=control_spec,
        envelopes={envelope.signal: envelope for envelope in learnt if envelope is not None},
    )
