"""How coarsely a source prints a signal."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.model import Column


def half_unit(places: int) -> float:
    """Half a unit of the last of some decimal places; 0 for none: whole numbers are exact."""
    return 0.5 * 10.0**-places if places else 0.0


def rounding_of(signals: Mapping[str, Column], signal: str, places: int) -> dict[str, float]:
    """``Evidence.rounding`` when a tool that rounds to so many places wrote a signal.

    Versions that do not round are told by their values: one with more places shows it.
    """
    column = signals[signal]
    values = column.values[column.present]
    finite = values[np.isfinite(values)]
    if finite.size and (np.round(finite, places) == finite).all():
        return {signal: half_unit(places)}
    return {}
