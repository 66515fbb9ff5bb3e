"""How far apart neighbouring numbers lie in what a run stores its parameters in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.judge.floors import SPACING
from harness.model import Evidence, Floats


def spacing(run: Evidence, otherwise: float) -> float:
    """Of the coarsest type that a run stores parameters in; ``otherwise`` where all are fine."""
    return max(SPACING.get(name, otherwise) for name in _types(run))


@dataclass(frozen=True, slots=True)
class Storage:
    """The spacings of a pair of runs, parameter by parameter."""

    coarse: float
    """Of the coarsest type of the two."""
    otherwise: float
    """Of what is stored finely."""
    fine: frozenset[str]
    """Names of parameters that are stored finely beside coarse ones."""

    def spacings(self, names: Sequence[str]) -> Floats:
        """Shape (parameters,): relative to the numbers."""
        return np.array([self.otherwise if name in self.fine else self.coarse for name in names])


def storage(test: Evidence, control: Evidence, otherwise: float) -> Storage:
    """How a pair of runs stores each parameter; ``otherwise`` is the spacing of fine types.

    The control says which of its parameters are fine. A test set of the same types has to store
    each as the control does; where it has other types, all count as the coarsest of the two.
    """
    coarse = max(spacing(run, otherwise) for run in (test, control))
    fine = _finely_stored(control) if _types(test) == _types(control) else frozenset()
    return Storage(coarse, otherwise, fine)


def _types(run: Evidence) -> tuple[str, ...]:
    return tuple(str((run.in_force or {}).get("param_dtype")).split("+"))


def _finely_stored(run: Evidence) -> frozenset[str]:
    """Parameters of a run of several types that are stored in a fine one."""
    by_type: Mapping[str, Sequence[str]] = (run.in_force or {}).get("param_dtypes") or {}
    return frozenset(
        name for dtype, names in by_type.items() if dtype not in SPACING for name in names
    )
