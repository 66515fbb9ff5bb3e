"""C3: ranks that hold the same shard hold different bits. Which copies differ first shows why."""

from __future__ import annotations

from collections.abc import Sequence

from converge_harness.judge.causes.context import Context
from converge_harness.judge.causes.parameter_names import fold, joined
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.causes.updates import first_part
from converge_harness.model import CauseClass, Disagreement, ReplicaSample

_NAMED = 3


@signature(
    Basis.HELD,
    Stage.WEIGHTS,
    # Copies that differ at the start also differ from the control's weights.
    overrides=("initial",),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.DRAWING),
)
def replicas(context: Context) -> Cause | None:
    """Copies differ, and may have done so when anything else first went wrong.

    Some tensors of each kind are listed, so copies of a kind that is not listed agree.
    """
    if not context.failed("replicas-agree"):
        return None
    agreed, first = -1, None
    for sample in context.compared.test.replicas:
        if sample.count:
            first = sample
            break
        agreed = sample.step
    parted = context.first_failure("replicas-agree")
    # Copies are compared at some steps only: they began to differ after the last one that agreed.
    if first is None or (parted is not None and agreed + 1 > parted):
        return None
    kinds = {each.kind for each in first.disagreements}
    why, look_at = _why(first, kinds, agreed, context)
    seen = _seen(first, kinds)
    sentence = f"replicas differ: at step {first.step} {seen}: {why}{first_part(context)}"
    return Cause(sentence, CauseClass.REPLICAS, look_at)


def _why(first: ReplicaSample, kinds: set[str], agreed: int, context: Context) -> tuple[str, str]:
    dims = sorted({dim for each in first.disagreements for dim in each.mesh_dims})
    mesh = f" over {joined(dims)}" if dims else ""
    if first.step == 0:
        return _began_otherwise(kinds, mesh)
    if kinds == {"buffer"}:
        return (
            "a buffer is updated by each rank from its own numbers",
            f"where these buffers are updated and reduced{mesh}",
        )
    began = _since(first, agreed, context)
    reduction = (
        f"the gradient reduction{mesh} of these tensors: gradient placements of to_local, "
        "no_sync and last-microbatch flags, hooks that some ranks skip"
    )
    if "gradient" in kinds:
        when = "from the first step on " if first.step == 1 else ""
        late = began if first.step > 1 else ""
        text = f"{when}a reduction of these gradients{mesh} is missing, or is not the same on all"
        return f"{text}{late}", reduction
    state, step = _step_by_rank(first, kinds, mesh)
    text = "their gradients were the same before clipping, so the update differs by rank"
    return f"{text}{began}{state}", step


def _step_by_rank(first: ReplicaSample, kinds: set[str], mesh: str) -> tuple[str, str]:
    """What the optimizer's state shows about an update that differs, and what to look at."""
    if "optimizer state" in kinds:
        said = "; the optimizer's state differs, too: it took other gradients, decay rates or steps"
        doings = "clipping by its own norm, skipped steps, the optimizer's betas and state"
    elif kinds and first.compared.get("optimizer state"):
        said = "; the optimizer's state is the same: it took the same gradients"
        doings = "the optimizer's learning rate, weight decay and epsilon, the update's precision"
    else:
        said, doings = "", "clipping by its own norm, skipped steps, optimizer settings or state"
    return said, f"what each rank does between reduction and step{mesh}: {doings}"


def _began_otherwise(kinds: set[str], mesh: str) -> tuple[str, str]:
    if kinds == {"buffer"}:
        return (
            "these ranks began with different values of a buffer, which were never synchronised",
            f"where these buffers are built{mesh}: the settings and the seed of each rank",
        )
    return (
        "these ranks began with different values, which were never synchronised",
        (
            f"initialisation and loading{mesh}: the seed of each rank, and what broadcasts the "
            "parameters or loads the checkpoint"
        ),
    )


def _since(first: ReplicaSample, agreed: int, context: Context) -> str:
    """Between which steps the copies began to differ."""
    if agreed < 0:
        return ""
    parted = context.first_failure("replicas-agree")
    if parted is None or not agreed + 1 < first.step or parted > first.step:
        return f", after step {agreed}"
    return f", after step {agreed} and by step {parted}, where the run leaves its control"


def _seen(first: ReplicaSample, kinds: set[str]) -> str:
    """Which tensors, of which kinds, along which dimensions."""
    if not first.disagreements:
        return f"{first.count} tensors are not the same on all ranks that hold them"
    parts = []
    for kind in sorted(kinds):
        some = [each for each in first.disagreements if each.kind == kind]
        parts.append(f"the {kind} of {_tensors(some)}{_along(some)}")
    more = first.count - len(first.disagreements)
    groups = first.disagreements[0].groups
    ranks = f" (ranks {' against '.join(str(list(group)) for group in groups)})" if groups else ""
    others = f", and {more} more tensors" if more > 0 else ""
    return f"{joined(parts)}{others} differ between copies{ranks}"


def _tensors(some: Sequence[Disagreement]) -> str:
    names = fold({each.tensor for each in some}, {each.tensor for each in some})
    return ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")


def _along(some: Sequence[Disagreement]) -> str:
    dims = sorted({dim for each in some for dim in each.mesh_dims})
    return f" along {joined(dims)}" if dims else ""
