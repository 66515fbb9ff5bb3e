"""Where to look, from which tensors are off: the backward pass goes from the output to the input.

What breaks in the backward pass of layer k spoils the gradients of everything upstream of it: of
the layers below k and the embeddings. What breaks in one tensor's own gradient (a reduction, a
placement) spoils that tensor alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from harness.judge.causes.groups import (
    Role,
    depth_of,
    joined,
    layers_of,
    place_of,
    role_of,
)
from harness.judge.scene import Scene

_NAMED = 4


class Hint(NamedTuple):
    """What a set of tensors that are off has in common."""

    words: str = ""
    """A clause, to follow a semicolon; empty when nothing is known."""
    look_at: str = ""


def family(off: Collection[str], among: Sequence[str], scene: Scene) -> Hint:
    """The family of bugs that spoils just these gradients.

    Args:
        off: canonical names of the tensors that are wrong.
        among: those of all tensors that have a gradient.
        scene: for the degrees of the test set.
    """
    if len(off) == len(among):
        return Hint(
            "every gradient is off, that of the output projection too, so it begins at the loss "
            "or where gradients are summed",
            "how gradients of ranks and microbatches are summed and weighted (data-parallel "
            f"reduction, no_sync, accumulation), and the backward of the loss{_with(scene)}",
        )
    roles = {role_of(name) for name in off}
    alone = _ALONE.get(next(iter(roles))) if len(roles) == 1 else None
    if alone is not None and Role.ATTENTION not in roles:
        return _norms(scene) if Role.NORM in roles else alone
    if roles <= {Role.EMBEDDING, Role.OUTPUT}:
        return _VOCABULARY
    if roles <= {Role.EXPERTS, Role.ROUTER}:
        return _MIXTURE
    upstream = _upstream(off, among, scene)
    if upstream is not None:
        return upstream
    return alone or Hint(
        "", f"the gradients of these modules: placements, reductions{_with(scene)}"
    )


_VOCABULARY = Hint(
    "only the embeddings or the output projection are off",
    "what splits or shares the vocabulary: tied weights (a gradient added twice or not at all), "
    "the sharded embedding, loss parallel, the chunked loss",
)
_MIXTURE = Hint(
    "only the mixture of experts is off",
    "the token dispatch and combine, and the reduction of expert and router gradients over ep",
)
_ALONE = {
    Role.EMBEDDING: _VOCABULARY,
    Role.OUTPUT: _VOCABULARY,
    Role.ROUTER: Hint(
        "only routers are off",
        "the reduction of router gradients over ep and tp, and the auxiliary loss",
    ),
    Role.EXPERTS: Hint(
        "only experts are off",
        "the expert parameters' reduction over their own mesh (ep, and FSDP within it), and the "
        "token dispatch",
    ),
    Role.BIAS: Hint(
        "only biases are off",
        "the reduction of bias gradients: a replicated bias of a row-parallel layer is added once",
    ),
    Role.NORM: Hint(
        "only norms are off",
        "the reduction of norm gradients, and the norm's own backward kernel",
    ),
    Role.ATTENTION: Hint(
        "only attention weights are off",
        "the attention's own projections: their placements, head splitting, and reductions",
    ),
}


def _norms(scene: Scene) -> Hint:
    if scene.degree("tp") == 1:
        return _ALONE[Role.NORM]
    return Hint(
        "only norms are off, which TP replicates: under sequence parallel each tp rank holds a "
        "part of their gradient",
        "where norm gradients are reduced over tp: SequenceParallel in the TP plan, grad "
        "placements of to_local",
    )


def _upstream(off: Collection[str], among: Sequence[str], scene: Scene) -> Hint | None:
    """Whether all is off from some layer down to the input, and nothing above it."""
    layers = layers_of(among)
    if not layers:
        return None
    wrong, last = set(off), layers[-1]
    depth = {name: depth_of(name, last) for name in among}
    top = max(depth[name] for name in wrong)
    if not 0 <= top <= last or not any(depth[name] < top for name in among):
        return None
    if any(name not in wrong for name in among if depth[name] < top):
        return None
    inside = [name for name in among if depth[name] == top]
    here = [name for name in inside if name in wrong]
    right = [name for name in inside if name not in wrong]
    if not right:
        words = f"everything from layer {top} down to the embeddings is off and all above is right"
        stage = (
            ": what a pipeline stage hands back to the one before, or"
            if scene.degree("pp") > 1
            else ":"
        )
        return Hint(words, f"the backward between layers {top} and {top + 1}{stage} layer {top}")
    modules = _modules(here)
    words = (
        f"in layer {top}, where the backward pass first goes wrong, {modules} are off and "
        f"{_modules(right)} are right; everything upstream follows"
    )
    core = _attention_core(here, right)
    if core:
        ring = "the ring of context parallel, " if scene.degree("cp") > 1 else ""
        return Hint(
            words,
            f"the backward of the attention itself: {ring}its kernel, mask, softmax statistics and "
            "the gradients of queries, keys and values",
        )
    return Hint(words, f"the backward of layer {top} at {modules}{_with(scene)}")


def _attention_core(off: Sequence[str], right: Sequence[str]) -> bool:
    """Queries, keys and values are off, and the attention's output projection is right."""
    attention = [name for name in right if role_of(name) is Role.ATTENTION]
    spoilt = [name for name in off if role_of(name) is Role.ATTENTION]
    return bool(attention) and bool(spoilt)


def _modules(names: Sequence[str]) -> str:
    modules = sorted({place_of(name).module.removesuffix(".weight") for name in names})
    more = len(modules) - _NAMED
    return joined(modules[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _with(scene: Scene) -> str:
    """What the test set has and the control has not, to narrow a search."""
    news = differences(scene)
    adds = "adds" if len(news) == 1 else "add"
    return f"; first what {joined(news)} {adds} to the control" if news else ""


def differences(scene: Scene) -> list[str]:
    """Parallelism and techniques in force in the test set and not, or less, in its control."""
    test, control = scene.case.test.in_force or {}, scene.case.control.in_force or {}
    ours, theirs = (dict(each.get("degrees") or {}) for each in (test, control))
    news = [
        f"{name} {degree}"
        for name, degree in ours.items()
        if isinstance(degree, int) and degree > 1 and degree != theirs.get(name)
    ]
    for name, key in (
        ("compile", "regions"),
        ("float8", "modules"),
        ("async_tp", "fused_nodes"),
    ):
        ran, base = (dict(each.get(name) or {}).get(key) for each in (test, control))
        if ran and not base:
            news.append(name)
    steps = "gradient_accumulation_steps"
    if test.get(steps) != control.get(steps) and (test.get(steps) or 1) != 1:
        news.append("gradient accumulation")
    return news


def stage_words(names: Collection[str], among: Sequence[str], scene: Scene) -> str:
    """`` (the end of the model, as the last pipeline stage holds it)``, or nothing."""
    layers, all_layers = layers_of(names), layers_of(among)
    if scene.degree("pp") == 1 or not layers or len(names) == len(among):
        return ""
    wrong = set(names)
    if any(name not in wrong for name in among if place_of(name).layer in layers):
        return ""
    if layers != list(range(layers[0], layers[-1] + 1)):
        return " (as the stages of one pipeline rank may hold, if its schedule is interleaved)"
    which = {True: "the last", False: "a middle"}[layers[-1] == all_layers[-1]]
    which = "the first" if layers[0] == all_layers[0] else which
    return f" (as {which} pipeline stage may hold)"
