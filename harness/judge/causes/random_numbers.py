"""Random numbers that start over, that are others from a step on, or that ranks share.

The states of the generators are recorded before every step that draws, so these causes need no
limit: whatever follows from other dropout masks looks like many other bugs.
"""

from __future__ import annotations

from typing import NamedTuple

from converge_harness.judge.causes.context import Context
from converge_harness.judge.causes.resume import STATES_OF, advice_of, of_pass
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.compare.dropout_masks import (
    first_shared,
    masks_again,
    step_before,
)
from converge_harness.judge.compare.random_states import (
    Generators,
    parted_with_effect,
    repeated,
)
from converge_harness.judge.degrees import owner
from converge_harness.judge.resume.passes import loads
from converge_harness.model import CauseClass, Outcome

_ASKED_OF = (ComparisonKind.ORDINARY, ComparisonKind.DRAWING)
_ALONE = (
    "recovers-in-time",
    "random-numbers-go-on",
    "ranks-draw-apart",
    "dropout-masks-differ",
)


@signature(
    Basis.RECORDED,
    Stage.RESUME,
    # A replay with other random numbers has other values.
    overrides=("replayed_otherwise",),
    asked_of=_ASKED_OF,
)
def random_numbers_lost(context: Context) -> Cause | None:
    """C6: the generators start over, or are in other states from a step on, before all else."""
    found = [_lost(context, each) for each in context.compared.generators]
    causes = [each for each in found if each is not None]
    # Numbers that are drawn again have an effect that is known, others may have none.
    first = min(causes, key=lambda each: (not each.again, each.step), default=None)
    return first.cause if first else _masks_again(context) or _masks_alike(context, resumed=True)


def _masks_again(context: Context) -> Cause | None:
    """Masks that come again, where the states of the generators do not."""
    compared = context.compared
    again = masks_again(compared.test, compared.control)
    if again is None or not _may_begin(context, again.step):
        return None
    sentence = (
        f"dropout draws the masks of step {again.of} again at step {again.step}, on every rank"
    )
    # They may start over at a later step, after something else has failed.
    if not context.failed("random-numbers-go-on"):
        sentence += ", though the random numbers (RNG) that are recorded do not start over"
    return Cause(
        sentence + of_pass(context, again.step),
        CauseClass.STATE,
        "what seeds the generator that dropout draws from, such as a seed by a counter of steps: "
        "whether that goes on after a resume, and which states a checkpoint holds",
    )


def _may_begin(context: Context, step: int) -> bool:
    """Whether masks that are seen at a sampled step may be why anything failed at first.

    They may have been wrong since the sampled step before.
    """
    if not context.failed("dropout-masks-differ"):
        return False
    before = context.first_failure(*_ALONE)
    return before is None or before > step_before(context.compared.test, step)


class _Lost(NamedTuple):
    step: int
    again: bool
    """Whether the generators start over, and are not in other states alone."""
    cause: Cause


def _lost(context: Context, kind: Generators) -> _Lost | None:
    """What one kind of generators lost, and where."""
    again = repeated(kind) if context.failed("random-numbers-go-on") else None
    step = again.step if again else parted_with_effect(kind)
    before = context.first_failure(*_ALONE)
    if step is None or (before is not None and before < step) or (before is None and not again):
        return None
    torch = kind.whose == "torch"
    whose = "" if torch else f" of {kind.whose}"
    drawn = "dropout masks" if torch else "augmentations of samples, or their order"
    if again:
        sentence = (
            f"the random numbers (RNG){whose} start over at step {step}: the generators are as "
            f"they were before step {again.of}, so what it drew then is drawn again, such as "
            f"{drawn}"
        )
    else:
        sentence = (
            f"the random numbers (RNG){whose} are others than the control's from step {step} on, "
            "after steps that drew the same"
        )
    shared = context.checks.get("ranks-draw-apart")
    if torch and shared is not None and shared.outcome is Outcome.FAIL and shared.onset == step:
        sentence += ", and ranks that train on other samples now draw the same"
    place = of_pass(context, step) + (_not_restored(context, step) if torch else "")
    look_at = advice_of(context).generators if torch else _saved_of(kind.whose)
    return _Lost(step, again is not None, Cause(sentence + place, CauseClass.STATE, look_at))


def _saved_of(whose: str) -> str:
    return (
        f"what a checkpoint holds of {whose}, on every rank: {STATES_OF[whose]}; whether it is "
        "restored after everything that draws or seeds at a start"
    )


def _not_restored(context: Context, step: int) -> str:
    """A clause if a step follows a load after which generators are not as they were saved."""
    each = owner(context.compared.test, step)
    for load in loads(context.compared.test):
        if load.into is not each or load.saved is None or load.into.loaded is None:
            continue
        before, now = load.saved.random_states, load.into.loaded.random_states
        off = sum(was != found for was, found in zip(before, now, strict=False))
        if len(before) == len(now) and off:
            ranks = f"{off} of {len(now)} ranks"
            return f"; after the load, the generators of {ranks} are not in the states saved"
    return ""


@signature(Basis.RECORDED, Stage.FORWARD, asked_of=_ASKED_OF)
def ranks_draw_alike(context: Context) -> Cause | None:
    """Data-parallel ranks drop the same units, which those of the control do not."""
    if not context.failed("ranks-draw-apart"):
        return _masks_alike(context, resumed=False)
    onset = context.checks["ranks-draw-apart"].onset
    before = context.first_failure(*_ALONE)
    if before is not None and onset is not None and before < onset:
        return None
    return Cause(
        f"ranks draw the same random numbers (RNG): {context.detail('ranks-draw-apart')}, so all "
        "of them drop the same units",
        CauseClass.OBJECTIVE,
        "where each rank is seeded: ranks that train on other samples need seeds of their own, "
        "such as the seed plus the data-parallel rank, and ranks that share samples (TP) the same "
        "seed for what all of them hold",
    )


def _masks_alike(context: Context, *, resumed: bool) -> Cause | None:
    """The same by masks, where the states of the generators do not show it.

    ``resumed``: only if it is seen in a pass that loaded a checkpoint, which explains replays.
    """
    compared = context.compared
    step = first_shared(compared.test, compared.control)
    if step is None or not _may_begin(context, step):
        return None
    place = of_pass(context, step)
    if resumed and not place:
        return None
    return Cause(
        f"ranks drop the same units: at step {step} the dropout masks of ranks that train on other "
        f"samples are the same, and those of the control's ranks are not{place}",
        CauseClass.STATE if place else CauseClass.OBJECTIVE,
        "what seeds the generator that dropout draws from on each rank, such as a seed of its own "
        "inside the model, or a tracker of named states",
    )
