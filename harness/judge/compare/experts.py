"""Single experts of a mixture: after the first step all experts of a layer are compared as one.

Which expert a token goes to is a step function of its scores. At the first step two runs have the
same weights, and hand out the same tokens but for a few near a tie: each expert's gradient is
compared by itself. Later, rounding hands out some tokens anew: one expert's gradient loses what
another's wins. How much that is, relative to the expert's own gradient, depends on how many tokens
it happens to have: it is infinite for one that gets none in one of the runs. Of the gradients of
all experts of its layer together it is the share of the tokens that moved, whichever experts
exchanged them. So after the first step the matrices that are the same but for the expert's number
are compared as the one tensor that some frameworks keep them in, in test sets and in repeats of the
control. Each of them is then off by as much as all of them together are. One whose gradient is zero
in only one of the runs is still missing, unless its share of its layer is so small that rounding
may have moved all of its tokens (``converge_harness.judge.compare.tensors``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from converge_harness.model import Floats

SAME_TOKENS = 1
"""The step up to which two runs have the same weights, and route by them."""
FEW_TOKENS = 0.25
"""Largest share of its layer's gradient, in equal shares, of an expert whose tokens rounding may
have moved altogether. In bf16, 4 experts a layer, 0.1 was measured (5% of the layer's)."""
_ONE_EXPERT = re.compile(r"\bexperts\.\d+\.")


def is_of_one_expert(name: str) -> bool:
    """Whether a parameter is of one expert, as far as its canonical name shows.

    Rounding decides which tokens it gets after the first step: few, or none at all. A tensor that
    stacks all experts of a layer always gets some.
    """
    return _ONE_EXPERT.search(name) is not None


def together(lengths: Floats, names: Sequence[str]) -> Floats:
    """Shape (parameters,): lengths of tensors, for a single expert's that of its layer's experts.

    That is the root of the sum of squares of those that are finite; one that is not stays itself.
    """
    layers: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if is_of_one_expert(name) and np.isfinite(lengths[row]):
            layers.setdefault(_ONE_EXPERT.sub("experts.*.", name), []).append(row)
    found = np.array(lengths, dtype=np.float64)
    for rows in layers.values():
        found[rows] = np.linalg.norm(lengths[rows])
    return found


def equal_shares(names: Sequence[str]) -> Floats:
    """Shape (parameters,): the share of one of n equally long, orthogonal experts: 1 / sqrt(n).

    1 for parameters that are not of a single expert.
    """
    return 1 / together(np.ones(len(names)), names)
