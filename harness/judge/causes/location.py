"""Where to look, from which tensors are off: the backward pass goes from the output to the input.

An error in the backward pass of layer k makes all gradients upstream of it wrong: those of the
layers below k and of the embeddings. An error in one tensor's own gradient (a reduction, a
placement) makes only that tensor wrong (:func:`family`).

A transformer layer adds the output of its branches (attention, feed-forward) to the residual
stream. An error inside one branch changes that branch's own gradients by far more than any others,
because the residual stream carries most of both passes around it (:func:`spot`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import Context, digits
from converge_harness.judge.causes.parameter_names import (
    ParameterRole,
    depth_of,
    joined,
    layers_of,
    place_of,
    role_of,
    spans,
)
from converge_harness.judge.causes.signature import Cause
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.model import CauseClass, Floats, InForce, OwnTechniqueInForce
from converge_harness.wording import plural

_NAMED = 4


class Hint(NamedTuple):
    """What a set of tensors that are off has in common."""

    text: str = ""
    """A clause to put after a semicolon; empty when nothing is known."""
    look_at: str = ""


def family(off: Collection[str], among: Sequence[str], context: Context) -> Hint:
    """The family of bugs that makes exactly these gradients wrong.

    Args:
        off: canonical names of the tensors that are wrong.
        among: those of all tensors that have a gradient.
        context: for the degrees of the test set.
    """
    if len(off) == len(among):
        return Hint(
            "every gradient is off, that of the output projection too, so it begins at the loss "
            "or where gradients are summed",
            "how gradients of ranks and microbatches are summed and weighted (data-parallel "
            f"reduction, no_sync, accumulation), and the backward of the loss{_with(context)}",
        )
    roles = {role_of(name) for name in off}
    alone = _ALONE.get(next(iter(roles))) if len(roles) == 1 else None
    if alone is not None and ParameterRole.ATTENTION not in roles:
        return _norms(context) if ParameterRole.NORM in roles else alone
    if roles <= {ParameterRole.EMBEDDING, ParameterRole.OUTPUT}:
        return _VOCABULARY
    if roles <= {ParameterRole.EXPERTS, ParameterRole.ROUTER}:
        return _MIXTURE
    upstream = _upstream(off, among, context) or _whole_layers(off, among)
    if upstream is not None:
        return upstream
    return alone or _in_one_layer(off, among, context)


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
    ParameterRole.EMBEDDING: _VOCABULARY,
    ParameterRole.OUTPUT: _VOCABULARY,
    ParameterRole.ROUTER: Hint(
        "only routers are off",
        "the reduction of router gradients over ep and tp, and the auxiliary loss",
    ),
    ParameterRole.EXPERTS: Hint(
        "only experts are off",
        "the expert parameters' reduction over their own mesh (ep, and FSDP within it), and the "
        "token dispatch",
    ),
    ParameterRole.BIAS: Hint(
        "only biases are off",
        "the reduction of bias gradients: a replicated bias of a row-parallel layer is added once",
    ),
    ParameterRole.NORM: Hint(
        "only norms are off",
        "the reduction of norm gradients, and the norm's own backward kernel",
    ),
    ParameterRole.ATTENTION: Hint(
        "only attention weights are off",
        "the attention's own projections: their placements, head splitting, and reductions",
    ),
}


_QUERIES, _KEYS = re.compile(r"\b(wq|q_proj|query)\b"), re.compile(r"\b(wk|k_proj|key)\b")
"""Weights whose gradients grow most with the scale of attention scores."""


def of_scores(names: Collection[str]) -> bool:
    """Whether these are queries and keys, and nothing else."""
    queries = {name for name in names if _QUERIES.search(name)}
    keys = {name for name in names if _KEYS.search(name)}
    return bool(queries and keys) and queries | keys == set(names)


def scores_scaled(factor: float, where: str) -> Cause:
    """C4: one factor of the gradients ``of_scores``."""
    sentence = (
        "the forward pass of attention differs: gradients of queries and keys alone are "
        f"scaled by {digits(factor)} {where}, as attention scores on another scale do, and the "
        "loss does not show it"
    )
    look_at = (
        "the scale that attention multiplies its scores by (head dimension, softmax scale, "
        "position scaling), then the backward pass of the scores"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)


def _norms(context: Context) -> Hint:
    if context.degree("tp") == 1:
        return _ALONE[ParameterRole.NORM]
    return Hint(
        "only norms are off, which TP replicates: under sequence parallel each tp rank holds a "
        "part of their gradient",
        "where norm gradients are reduced over tp: SequenceParallel in the TP plan, grad "
        "placements of to_local",
    )


def _upstream(off: Collection[str], among: Sequence[str], context: Context) -> Hint | None:
    """A hint if everything from some layer down to the input is off, and nothing above it."""
    layers = layers_of(among)
    if not layers:
        return None
    wrong, last = set(off), layers[-1]
    depth = {name: depth_of(name, last) for name in among}
    top = max(depth[name] for name in wrong)
    if top > last:
        return _below_output(wrong, among, context)
    if top < 0 or not any(depth[name] < top for name in among):
        return None
    if any(name not in wrong for name in among if depth[name] < top):
        return None
    inside = [name for name in among if depth[name] == top]
    here = [name for name in inside if name in wrong]
    right = [name for name in inside if name not in wrong]
    if not right:
        text = (
            f"everything from layer {top} down to the embeddings is off, and everything above is "
            "right"
        )
        stage = (
            ": what a pipeline stage hands back to the one before, or"
            if context.degree("pp") > 1
            else ":"
        )
        above = f"layers {top} and {top + 1}" if top < last else f"layer {top} and the output"
        return Hint(text, f"the backward between {above}{stage} layer {top}")
    modules = _modules(here)
    text = (
        f"in layer {top}, where the backward pass first goes wrong, {modules} "
        f"{_are(here)} off and {_modules(right)} {_are(right)} right; everything upstream follows"
    )
    return Hint(text, _first_wrong(here, right, top, context))


def _below_output(wrong: Collection[str], among: Sequence[str], context: Context) -> Hint | None:
    """A hint if only the output projection is right."""
    right = [name for name in among if name not in wrong]
    if not right or any(role_of(name) is not ParameterRole.OUTPUT for name in right):
        return None
    return Hint(
        "the output projection is right and everything below it is off",
        "what the output projection and the loss hand back to the hidden states: a sum over tp "
        f"where the vocabulary is split, the chunks of a chunked loss{_with(context)}",
    )


def _first_wrong(off: Sequence[str], right: Sequence[str], layer: int, context: Context) -> str:
    """Where in a layer the backward pass goes wrong, from what is off and what is right there."""
    here = f"the backward of layer {layer}"
    wrong, fine = ({role_of(name) for name in names} for names in (off, right))
    if {ParameterRole.ATTENTION} <= wrong & fine:
        ring = "the ring of context parallel, " if context.degree("cp") > 1 else ""
        return (
            f"the backward of the attention itself: {ring}its kernel, mask, softmax statistics and "
            "the gradients of queries, keys and values"
        )
    if {ParameterRole.FEED_FORWARD} <= wrong & fine:
        return f"{here} in its feed-forward: the activation and its gate{_with(context)}"
    norm = (
        "what the projections hand back to the norm before them (a sum over tp where they are "
        "split by columns), and the norm's own backward"
    )
    if wrong == {ParameterRole.NORM} and fine & {
        ParameterRole.ATTENTION,
        ParameterRole.FEED_FORWARD,
    }:
        return f"{here}: {norm}{_with(context)}"
    if (
        wrong <= {ParameterRole.NORM, ParameterRole.ATTENTION}
        and ParameterRole.FEED_FORWARD in fine
    ):
        between = "the norm's own backward and the residual" if ParameterRole.NORM in fine else norm
        return f"{here} between its feed-forward and its attention: {between}{_with(context)}"
    return f"{here} at {_modules(off)}{_with(context)}"


def _whole_layers(off: Collection[str], among: Sequence[str]) -> Hint | None:
    """A hint if some layers are off in all of their parameters, and nothing else is."""
    layers = layers_of(off)
    if not layers or set(off) != {name for name in among if place_of(name).layer in layers}:
        return None
    verb = "is" if len(layers) == 1 else "are"
    which = f"{plural(len(layers), 'layer')} {spans(layers)} {verb}"
    return Hint(
        f"only {which} off, in every parameter, and what is upstream is right: so the error is not "
        "in the backward pass, but in what happens to gradients afterwards",
        "how these layers' gradients are reduced and laid out: their FSDP unit (reduce-scatter, "
        "the order of its shards) or bucket, no_sync, hooks",
    )


def _in_one_layer(off: Collection[str], among: Sequence[str], context: Context) -> Hint:
    """A hint for parameters that have nothing in common, except perhaps their layer."""
    layers = layers_of(off)
    alone = (
        len(layers) == 1 and layers_of(among) and all(place_of(n).layer is not None for n in off)
    )
    which = f"{_modules(list(off))} in layer {layers[0]}" if alone else "these modules"
    own = "the backward of {0}, and the placements and reductions of their gradients{1}"
    rest = "the gradients of {0}: placements, reductions{1}"
    return Hint("", (own if alone else rest).format(which, _with(context)))


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _modules(names: Sequence[str]) -> str:
    modules = sorted({place_of(name).module.removesuffix(".weight") for name in names})
    more = len(modules) - _NAMED
    return joined(modules[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _with(context: Context) -> str:
    """What the test set has and the control does not, to narrow the search."""
    news = differences(context)
    adds = "adds" if len(news) == 1 else "add"
    return f"; first what {joined(news)} {adds} to the control" if news else ""


def differences(context: Context) -> list[str]:
    """Parallelism and techniques in force in the test set, and less or not in its control."""
    test, control = context.in_force, context.compared.control.in_force or InForce()
    news = [
        f"{name} {degree}"
        for name, degree in test.degrees.items()
        if degree is not None and degree > 1 and degree != control.degrees.get(name)
    ]
    for name, ran, base in (
        ("compile", test.compile.regions, control.compile.regions),
        ("float8", test.float8.modules, control.float8.modules),
        ("async_tp", test.fused_nodes, control.fused_nodes),
    ):
        if ran and not base:
            news.append(name)
    news += [each.name for each in own_additions(context)]
    accumulation = test.gradient_accumulation_steps
    if accumulation != control.gradient_accumulation_steps and (accumulation or 1) != 1:
        news.append("gradient accumulation")
    return news


def own_additions(context: Context) -> list[OwnTechniqueInForce]:
    """What was seen of the experiment file's own techniques that the control has not."""
    control = context.compared.control.in_force or InForce()
    theirs = {each.name for each in control.own_techniques}
    return [each for each in context.in_force.own_techniques if each.name not in theirs]


def stage_clause(names: Collection[str], among: Sequence[str], context: Context) -> str:
    """`` (the end of the model, as the last pipeline stage holds it)``, or nothing."""
    layers, all_layers = layers_of(names), layers_of(among)
    if context.degree("pp") == 1 or not layers or len(names) == len(among):
        return ""
    wrong = set(names)
    if any(name not in wrong for name in among if place_of(name).layer in layers):
        return ""
    if layers != list(range(layers[0], layers[-1] + 1)):
        return " (as the stages of one pipeline rank may hold, if its schedule is interleaved)"
    which = {True: "the last", False: "a middle"}[layers[-1] == all_layers[-1]]
    which = "the first" if layers[0] == all_layers[0] else which
    return f" (as {which} pipeline stage may hold)"


ATTENTION, FEED_FORWARD, EXPERTS = "attention", "feed-forward", "mixture of experts"
_BRANCHES = (
    (EXPERTS, re.compile(r"moe|expert|router")),
    (FEED_FORWARD, re.compile(r"feed_forward|mlp|ffn|post_attention|\bln_2\b")),
    (ATTENTION, re.compile(r"attn|attention|input_layernorm|\bln_1\b")),
)
"""The first that matches: Llama's ``post_attention_layernorm`` comes before the feed-forward."""
_LAST = re.compile(
    r"\b(wo|w2|o_proj|out_proj|c_proj|down_proj|linear_proj|linear_fc2|dense|dense_4h_to_h)\b"
)
"""The last weight of a branch: its gradient is the branch's hidden state times the gradient of the
residual stream."""
STANDS_OUT = 3.0
"""A place stands out when it is off by this many times as much as all others."""
_COMPARABLE = 0.2
"""Share of the place's difference from which on its last weight is off about as much."""
_FEWEST_LAYERS = 2
_LEAST = 1e-4
"""Share of the largest difference; smaller ones count as this."""


class Spot(NamedTuple):
    """A branch of some layers whose gradients are off by more than all others."""

    kind: str
    layers: tuple[int, ...]
    every: bool
    """Whether these are all layers."""
    difference: float
    """How much they are off, in the median."""
    others: float
    """The same of the next branch or parameter."""
    last_too: bool
    """Whether the last weight of the branch is off about as much, in each of these layers."""

    @property
    def text(self) -> str:
        if self.every:
            return f"the {self.kind} of every layer"
        return f"the {self.kind} of {plural(len(self.layers), 'layer')} {spans(self.layers)}"


def branch_of(name: str) -> tuple[int, str] | None:
    """Layer and branch of a parameter; None for one in no layer, or in no known branch."""
    place = place_of(name)
    if place.layer is None:
        return None
    kind = next((kind for kind, found in _BRANCHES if found.search(place.module)), None)
    return (place.layer, kind) if kind is not None else None


def spot(sample: TensorComparison | None) -> Spot | None:
    """The one place whose gradients stand out; None where there is none."""
    if sample is None or sample.gradients is None:
        return None
    return spot_of(sample.names, sample.gradients.difference)


def spot_of(names: Sequence[str], difference: Floats) -> Spot | None:
    """The same, from how much each parameter is off."""
    branches: dict[tuple[int, str] | str, list[int]] = {}
    for index, name in enumerate(names):
        if np.isfinite(difference[index]):
            branches.setdefault(branch_of(name) or name, []).append(index)
    median = {branch: float(np.median(difference[members])) for branch, members in branches.items()}
    order = sorted(median, key=lambda branch: -median[branch])
    layers = {branch[0] for branch in order if isinstance(branch, tuple)}
    if len(layers) < _FEWEST_LAYERS or not median[order[0]]:
        return None
    falling = [max(median[branch], _LEAST * median[order[0]]) for branch in order]
    kinds = [branch[1] if isinstance(branch, tuple) else None for branch in order]
    alike = sum(1 for _ in takewhile(lambda kind: kind == kinds[0], kinds)) if kinds[0] else 0
    gaps = [one / other for one, other in pairwise(falling[: alike + 1])]
    count = int(np.argmax(gaps)) + 1 if gaps else 0
    chosen = [branch for branch in order[:count] if isinstance(branch, tuple)]
    if not chosen or gaps[count - 1] < STANDS_OUT:
        return None
    here = sorted(layer for layer, _ in chosen)
    of_all = float(np.median([median[branch] for branch in chosen]))
    last_too = all(
        _last_off(difference[i] for i in branches[branch] if _LAST.search(names[i]))
        >= _COMPARABLE * median[branch]
        for branch in chosen
    )
    every = set(here) == layers
    return Spot(chosen[0][1], tuple(here), every, of_all, median[order[count]], last_too)


def _last_off(differences: Iterable[float]) -> float:
    return max(differences, default=0.0)
