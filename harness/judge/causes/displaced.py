"""Gradients that are right numbers in wrong places: their norms tell.

The norm of a tensor does not depend on the order of its entries, and is taken in float64. Shards
that are exchanged and tensors that are transposed keep it; a gradient that another parameter got
has the norm of the other's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.judge.causes.groups import joined
from harness.model import Floats, Integers

SAME_NORM = 1e-5
"""Relative difference of two norms that sums in another order explain, with room to spare."""
FAR = 0.1
"""A gradient that is off by this and keeps its norm to ``SAME_NORM`` does not by chance."""
_NAMED = 3


def displaced(
    names: Sequence[str],
    sizes: Integers,
    norms: tuple[Floats, Floats],
    turned: Sequence[int],
    difference: Floats,
) -> str:
    """A clause, after a semicolon, if all wrong gradients seem displaced; else empty.

    Args:
        names: of all parameters.
        sizes: entries of each, shape (parameters,).
        norms: of the gradients of the test set and of the control, shape (parameters,) each.
        turned: indices of the gradients that are wrong in direction.
        difference: relative differences, shape (parameters,).
    """
    ours, theirs = norms
    far = [index for index in turned if difference[index] > FAR and theirs[index] > 0]
    if not far or len(far) < len(turned):
        return ""
    if all(abs(ours[index] / theirs[index] - 1) <= SAME_NORM for index in far):
        return (
            "; every one has the norm of the control's: the same numbers in other places, as when "
            "shards or ranks are exchanged, or a tensor is transposed"
        )
    found = []
    for index in far:
        alike = (sizes == sizes[index]) & (np.abs(theirs - ours[index]) <= SAME_NORM * ours[index])
        alike[index] = False
        if np.count_nonzero(alike) != 1:
            return ""
        found.append(f"{names[index]} that of {names[int(np.flatnonzero(alike)[0])]}")
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"; by its norm {joined(found[:_NAMED])}{more} in the control: gradients are exchanged"
