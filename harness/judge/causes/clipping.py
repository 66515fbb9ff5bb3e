"""Wrong clipping: what lies between right gradients and wrong updates, and AdamW hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.judge.causes.cause import Cause
from harness.judge.causes.families import stage_words
from harness.judge.causes.groups import describe, joined
from harness.judge.leftovers import UNCLIPPED, Clipping, clippings
from harness.judge.scene import Scene, loss_agrees
from harness.judge.tensors import TensorComparison
from harness.model import CauseClass

_CHECKS = ("clipping-first-steps", "clipping-envelope")
_MISREPORTED = "reported-grad-norm-is-recomputed"
_METRIC_CHECKS = (
    "grad-norm-first-step",
    "grad-norm-envelope",
    _MISREPORTED,
    "reported-loss-is-recomputed",
)
_BEYOND = 2.0
"""A factor that is wrong by more than this many times what gradients differ by does not follow from
them: a gradient that ranks hold otherwise, say, has another norm on each."""
_MOST_GROUPS = 4
_OWN = 1e-2
"""A group is clipped by its own norm when its factor is that, within this."""
_LOOK_AT = (
    "where gradients are clipped: max_norm, whether it is called in every step, and the norm that "
    "it uses: over all parameters, all pipeline stages and all mesh dimensions"
)

_CHANGED_AFTER = (
    "what touches gradients after clipping: the optimizer's own (weight decay added to gradients, "
    "maximize), its hooks, a communication that comes late"
)


class _Group(NamedTuple):
    """Parameters that were clipped by the same factor."""

    members: list[int]
    factor: float


def clipping(scene: Scene) -> Cause | None:
    """Gradients are multiplied by another factor than their norm asks for."""
    if not scene.failed(*_CHECKS):
        return None
    found = list(clippings(scene.case.tensors, scene.case.test, scene.case.control))
    index = next((place for place, each in enumerate(found) if each.wrong), None)
    if index is None:
        return None
    wrong, before = found[index], found[index - 1].step if index else None
    first = scene.first_failure(*_CHECKS, *_METRIC_CHECKS)
    if first is not None and first <= (before or 0):
        return None
    sample = scene.sample(wrong.step)
    if sample is None or not _by_itself(wrong, sample):
        return None
    when = (
        f"at step {wrong.step}"
        if before is None
        else f"after step {before}, where they still were, and at step {wrong.step}"
    )
    groups = _groups(wrong)
    if wrong.odd and len(groups) > _MOST_GROUPS and wrong.factors.max() > 1 + wrong.alike:
        odd = [wrong.names[index] for index in wrong.odd]
        sentence = (
            f"gradients agree, and are changed between clipping and the update {when}: clipping "
            f"multiplies all by one factor ({wrong.expected:.4g} here) and makes none longer, and "
            f"their lengths are now {wrong.factors.min():.4g} to {wrong.factors.max():.4g} of what "
            f"they were; {describe(odd, sample.names)} differ from most"
            f"{loss_agrees(scene, wrong.step)}"
        )
        return Cause(sentence, CauseClass.UPDATE, _CHANGED_AFTER)
    sentence = (
        f"gradients are not clipped as they should be {when}: "
        f"{_said(wrong, groups, sample, scene)}{loss_agrees(scene, wrong.step)}{_norm_too(scene)}"
    )
    return Cause(sentence, CauseClass.CLIPPING, _LOOK_AT)


def _by_itself(wrong: Clipping, sample: TensorComparison) -> bool:
    """Whether clipping is wrong by more than gradients that differ explain."""
    if sample.gradients is None or not sample.gradients.outside.size:
        return True
    norms = sample.test.gradients.norm if sample.test.gradients is not None else np.zeros(0)
    parts = sample.gradients.difference * norms
    apart = float(np.linalg.norm(parts) / np.linalg.norm(norms))
    return max(float(wrong.apart.max()), wrong.off) > _BEYOND * apart


def _said(wrong: Clipping, groups: Sequence[_Group], sample: TensorComparison, scene: Scene) -> str:
    asked = f"their norm asks for {wrong.expected:.4g}"
    if wrong.odd and len(groups) > _MOST_GROUPS:
        return _each_otherwise(wrong, asked)
    if wrong.odd:
        words = []
        for group in groups:
            names = [wrong.names[index] for index in group.members]
            stage = stage_words(names, sample.names, scene)
            words.append(f"{describe(names, sample.names)}{stage} by {group.factor:.4g}")
        own = ""
        if all(_own_norm(wrong, group) for group in groups):
            own = "; each group is clipped by the norm of its own gradients alone"
        return f"multiplied are {joined(words)}, where {asked}{own}"
    norm = float(np.linalg.norm(wrong.norms))
    if abs(wrong.common - 1) <= UNCLIPPED:
        return f"they are not clipped at all, where {asked} (a norm of {norm:.4g})"
    meant = f" where {wrong.most:.4g} is meant" if wrong.most is not None else ""
    return (
        f"all are multiplied by {wrong.common:.4g}, where {asked}: a norm of {norm:.4g} is clipped "
        f"to {norm * wrong.common:.4g}{meant}"
    )


def _each_otherwise(wrong: Clipping, asked: str) -> str:
    """Nearly every parameter has a factor of its own, and none is longer than before."""
    least, most = float(wrong.factors.min()), float(wrong.factors.max())
    said = f"each is multiplied by another factor, from {least:.4g} to {most:.4g}, where {asked}"
    if all(_own_norm(wrong, _Group([i], float(wrong.factors[i]))) for i in range(wrong.norms.size)):
        return f"{said}; each is clipped by the norm of its own gradient alone"
    if least >= wrong.expected * (1 - wrong.right):
        return f"{said}, and none by less: by norms of parts, as of the shards that a rank holds"
    return said


def _groups(wrong: Clipping) -> list[_Group]:
    """Parameters by their factors, the largest group first."""
    groups: list[list[int]] = []
    for index in np.argsort(wrong.factors, kind="stable"):
        last = wrong.factors[groups[-1][0]] if groups else np.nan
        if wrong.factors[index] - last <= 2 * wrong.alike * last:
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
    return [
        _Group(group, float(np.median(wrong.factors[group])))
        for group in sorted(groups, key=len, reverse=True)
    ]


def _own_norm(wrong: Clipping, group: _Group) -> bool:
    norm = float(np.linalg.norm(wrong.norms[group.members]))
    if wrong.most is None or not norm:
        return False
    return abs(group.factor / min(1.0, wrong.most / norm) - 1) <= _OWN


def _norm_too(scene: Scene) -> str:
    wrong = scene.failed(_MISREPORTED) if _MISREPORTED in scene.checks else False
    return "; the grad norm that is reported is wrong, too: clipping uses it" if wrong else ""
