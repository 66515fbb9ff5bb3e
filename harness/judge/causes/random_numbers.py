"""Random numbers that start over or part, that ranks share, or that one run alone draws.

The states of the generators are recorded before every step that draws, so these causes need no
limit: whatever follows from other dropout masks looks like many other bugs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from converge_harness.judge.causes.context import Context
from converge_harness.judge.causes.location import differences
from converge_harness.judge.causes.parameter_names import joined
from converge_harness.judge.causes.resume import STATES_OF, advice_of, of_pass
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.compare.curves import common_steps
from converge_harness.judge.compare.dropout_masks import (
    first_other,
    first_shared,
    masks_again,
    other_rates,
    share_dropped,
    step_before,
)
from converge_harness.judge.compare.random_states import (
    DrawnAgain,
    Generators,
    draws_nothing,
    effect,
    is_recorded,
    met_elsewhere,
    parted_with_effect,
    repeated,
)
from converge_harness.judge.degrees import owner
from converge_harness.judge.resume.passes import loads
from converge_harness.model import CauseClass, Evidence, Outcome

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
    lost = CauseClass.STATE
    if not again and not (place or context.compared.test.replayed):
        lost = CauseClass.LATER
        sentence += _further_on(kind, step)
        look_at = f"{_BETWEEN.format(step=step)}; if the run was resumed there, {look_at}"
    return _Lost(step, again is not None, Cause(sentence + place, lost, look_at))


_BETWEEN = (
    "what else draws before step {step}, or seeds: an evaluation without model.eval(), a loop over "
    "a shuffled loader, sampling (a generator of its own, or states that are put back, keep "
    "training as it is)"
)


def _further_on(kind: Generators, step: int) -> str:
    """A clause if one run draws more of the same numbers in a step than the other."""
    met = met_elsewhere(kind.test, kind.control, step)
    if met is None:
        return ""
    amount = "more" if met.of > met.step else "fewer"
    return (
        f"; its step {met.step} begins with the numbers of the control's step {met.of}, so it goes "
        f"through the same ones and has drawn {amount} of them by then"
    )


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


@signature(
    Basis.RECORDED,
    Stage.FORWARD,
    # Ranks that draw nothing do not draw alike.
    overrides=("ranks_draw_alike",),
)
def dropout_switched(context: Context) -> Cause | None:
    """One run draws where the other draws nothing, as with dropout that is off in one of them.

    In the first step anything may be wrong besides, and what is drawn there may be the seed of a
    loader: so masks have to show that the other run drops units.
    """
    kind = next(each for each in context.compared.generators if each.whose == "torch")
    test, control = kind.test, kind.control
    if not (is_recorded(test) and is_recorded(control)):
        return None
    off, on = draws_nothing(test, control), draws_nothing(control, test)
    steps = min(off, on, key=lambda each: each[0] if each else math.inf)
    before = context.first_failure(*_ALONE)
    if not steps or before is None or before < steps[0]:
        return None
    step, first = steps[0], steps[0] == int(test.steps[0])
    one, other = (test, control) if steps == off else (control, test)
    dropped = share_dropped(other, steps)
    if share_dropped(one, steps) is not None or (first and dropped is None):
        return None
    if effect(kind, DrawnAgain(step, step)) is not True or _gradients_agree(context, step):
        return None
    when = f"from step {step} on" if _to_the_end(steps, kind) else f"at step {step}"
    silent, drawing = ("the run", "its control") if steps == off else ("its control", "the run")
    numbers = f"{silent} draws no random numbers {{}}, and {drawing} does".format
    switch = "off" if steps == off else "on"
    if dropped is None:
        sentence = f"{numbers(when)}, as if dropout were {switch}"
    else:
        share = f"{100 * dropped:.2g}% of the units"
        sentence = f"dropout is {switch} {when}: {numbers('there')} (dropping {share})"
    look_at = _MODE if first else _MODE_LATER.format(step=step)
    kind_of_cause = CauseClass.OBJECTIVE if first else CauseClass.LATER
    return Cause(sentence + of_pass(context, step), kind_of_cause, look_at)


def _gradients_agree(context: Context, step: int) -> bool:
    """Whether a step was sampled and all gradients agree there, as they do not with other masks."""
    sample = context.sample(step)
    return sample is not None and sample.gradients is not None and not sample.gradients.outside.size


def _to_the_end(steps: tuple[int, ...], kind: Generators) -> bool:
    """Whether one run alone draws in all later steps; the last one has no next step to tell."""
    later = common_steps(kind.test.steps, kind.control.steps).steps
    return steps == tuple(later[(later >= steps[0])][:-1].tolist())


_MODE = (
    "whether both models are in training mode (model.train(), model.eval()), and the dropout rates "
    "of both configurations"
)
_MODE_LATER = (
    "what calls model.eval() or model.train() before step {step} and does not switch back, such as "
    "an evaluation; then what changes dropout rates there"
)


@signature(Basis.FIRST_TENSORS, Stage.FORWARD)
def other_masks(context: Context) -> Cause | None:
    """Dropout drops other units from the first difference on, which hides all else."""
    test, control = context.compared.test, context.compared.control
    step, before = first_other(test, control), context.first_failure(*_ALONE)
    if step is None or before is None or not step_before(test, step) < before <= step:
        return None
    if _gradients_agree(context, step):
        return None
    kind = CauseClass.OBJECTIVE if step == int(test.steps[0]) else CauseClass.LATER
    rates = other_rates(test, control, step)
    if rates is not None:
        one, other = (f"{100 * each:.2g}%" for each in rates)
        return Cause(
            f"dropout drops {one} of the units at step {step}, and the control's {other}",
            kind,
            "the dropout rates of both configurations, of every module that has one; and whether "
            "all of them are in training mode",
        )
    news = differences(context)
    ours, theirs = (_state_at(each, step) for each in (test, control))
    states = ""
    if ours and theirs:
        same = ours == theirs
        states = (
            ", though its random generators begin that step in the same states: their numbers go "
            "to other places"
            if same
            else ": its random generators begin that step in other states"
        )
    sentence = (
        f"dropout drops other units than the control's at step {step}{states}; so single steps "
        "cannot agree, whether or not anything else is wrong"
    )
    spec = context.compared.spec
    own = spec is not None and spec.trainer.can.frozen_steps
    layout = f" ({joined(news)} may be why)" if news else ""
    look_at = (
        f"other microbatches, ranks and degrees draw other masks, which is no error{layout}: "
        "compare both with a dropout rate of 0, or losses over several seeds ([seeds])"
        f"{', or say own_random_numbers = true' if own else ''}; with the control's layout, which "
        "generator dropout draws from, and with which seed on which rank"
    )
    return Cause(sentence, kind, look_at)


def _state_at(run: Evidence, step: int) -> str | None:
    states = dict(zip(run.steps.tolist(), run.random_states, strict=False))
    return states.get(step)


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
