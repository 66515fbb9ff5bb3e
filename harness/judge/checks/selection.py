"""Which checks a verdict is made of: what was asked for, and what can be asked of these runs.

An ordinary test set has to be the same as its control, step by step. A change that is meant to
change numbers cannot be, and neither can runs of other seeds: fewer checks are asked of them, and
the verdict names those that were not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from converge_harness.judge.checks import (
    comparability,
    envelope,
    equivalence,
    first_step,
    integrity,
    precision,
    random_numbers,
    resume,
    tensors,
)
from converge_harness.judge.checks import (
    seeds as seed_checks,
)
from converge_harness.judge.checks.question import Question
from converge_harness.judge.checks.seeds import of_every
from converge_harness.judge.comparison import RunComparison
from converge_harness.model import Ask, Check, Outcome, Tier

CHECKS: tuple[Question, ...] = (
    *integrity.CHECKS,
    integrity.something_trained,
    *comparability.CHECKS,
    *first_step.CHECKS,
    *integrity.TENSOR_CHECKS,
    *precision.CHECKS,
    *tensors.CHECKS,
    *tensors.POST_STEP_CHECKS,
    *envelope.CHECKS,
    *random_numbers.CHECKS,
    *equivalence.CHECKS,
    *resume.CHECKS,
    *resume.REPLAY_CHECKS,
    *resume.FAULT_CHECKS,
)
"""Every check of a test set against its control. Those of tensors belong to several tiers; those of
the resume tier are asked only of runs that were made in several passes, or should have been."""

SEED_CHECKS: tuple[Question, ...] = (
    integrity.test_set_trained,
    *seed_checks.CHECKS,
    *seed_checks.TARGET_CHECKS,
)
"""Every check of the losses of several seeds, and of an intended change."""

FIRST = (
    integrity.control_sound,
    integrity.something_trained,
    comparability.control_in_force,
    comparability.same_numbering,
    comparability.same_means,
    integrity.starts_as_the_control,
)
"""Asked first: when the control is broken or learns nothing, when steps are numbered or losses are
means otherwise than its own, or when another start was made, no other answer means anything."""

NEEDED = ("loss-first-step", "loss-envelope")
"""Unless both of these PASS there is no PASS, whatever the others say: if they are skipped, nothing
was compared."""

_OF_ONE_RUN = (
    integrity.test_set_trained,
    integrity.complete,
    integrity.steps_increase,
    integrity.values_present,
    integrity.finite,
    comparability.same_steps,
    comparability.ranks_see_same_batch,
    comparability.named_in_force,
    comparability.nothing_unnamed,
    tensors.replicas_agree,
)
"""Asked of every run, whatever it is compared with."""

_OF_A_PAIR = (
    comparability.same_data,
    comparability.same_tokens,
    comparability.config_differs_as_declared,
)
"""What runs of one seed have in common, whatever was changed on purpose."""

_OF_EVERY_SEED = frozenset(
    question.name
    for question in (
        integrity.control_sound,
        integrity.something_trained,
        comparability.control_in_force,
        comparability.same_numbering,
        comparability.same_means,
        comparability.same_lr,
        *_OF_ONE_RUN,
    )
)


_OF_DRAWING = (
    *(each for each in CHECKS if each.tier is Tier.INTEGRITY and each not in FIRST),
    first_step.reported_loss_is_recomputed,
    first_step.reported_grad_norm_is_recomputed,
    first_step.gradients_present,
    *(each for each in precision.CHECKS if each.tier is not Tier.INTEGRITY),
    tensors.optimizer_steps,
    tensors.same_initial_parameters,
    tensors.gradients_finite,
    tensors.replicas_agree,
    *random_numbers.CHECKS,
    *equivalence.CHECKS,
)
"""Asked of a set that draws other random numbers than its control: all checks that do not compare
single steps."""


class SelectedChecks(NamedTuple):
    """The checks of one verdict."""

    first: tuple[Question, ...]
    """If one of these is INVALID, the rest is not asked."""
    rest: tuple[Question, ...]
    needed: tuple[str, ...]
    """Without these answered there is no PASS."""
    not_asked: tuple[str, ...] = ()
    """Names of checks of an ordinary verdict that this one leaves out."""


def select_checks(
    ask: Ask,
    *,
    seeds: bool,
    same_seed: bool,
    in_passes: bool,
    target: bool = False,
    draws: bool = False,
) -> SelectedChecks:
    """Which checks to ask.

    ``seeds`` says that there are several, ``same_seed`` that the first two runs have one, and
    ``in_passes`` that the test set was made in several passes. With a ``target`` it is asked when
    the seeds reach it, and not how low they end. ``draws`` says that the test set draws other
    random numbers than its control: then steps are not compared one by one.
    """
    ordinary = [each for each in CHECKS if in_passes or each.tier is not Tier.RESUME]
    first, rest = _questions(ask, ordinary, seeds=seeds, same_seed=same_seed)
    if target:
        rest = tuple(
            seed_checks.target_no_later if each is seed_checks.loss_no_worse else each
            for each in rest
            if each is not comparability.same_steps  # a run may end where it reached the target
        )
    if draws:
        kept = tuple(each for each in rest if each in _OF_DRAWING or each not in CHECKS)
        rest = (*kept, precision.drawn_alike)
    names = {question.name for question in (*first, *rest)}
    stepwise_too = NEEDED if names.issuperset(NEEDED) else ()
    seeds_question = (
        seed_checks.loss_no_worse if ask is Ask.NO_WORSE else seed_checks.loss_same_over_seeds
    )
    seeds_question = seed_checks.target_no_later if target else seeds_question
    # The question of the mean loss, asked over seeds instead of steps.
    by_seeds = ask is Ask.SAME and seeds
    return SelectedChecks(
        first,
        rest,
        (
            *stepwise_too,
            *([seeds_question.name] if seeds_question.name in names else ()),
            *([precision.gradient_errors.name] if draws else ()),
        ),
        tuple(
            question.name
            for question in ordinary
            if question.name not in names and not (question in equivalence.CHECKS and by_seeds)
        ),
    )


def _questions(
    ask: Ask, ordinary: Sequence[Question], *, seeds: bool, same_seed: bool
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Those that are asked first, and the rest."""
    sound, budget = (
        ((seed_checks.seeds_comparable,), (seed_checks.same_token_budget,)) if seeds else ((), ())
    )
    of_losses = (
        (seed_checks.loss_no_worse,)
        if ask is Ask.NO_WORSE
        else (seed_checks.loss_same_over_seeds, seed_checks.trajectory_same_over_seeds)
        if seeds
        else ()
    )
    if ask is Ask.SAME and same_seed:
        own = (integrity.test_set_trained,) if seeds else ()
        rest = tuple(question for question in ordinary if question not in FIRST)
        return (*FIRST, *sound), (*rest, *own, *budget, *of_losses)
    first = (
        integrity.control_sound,
        integrity.something_trained,
        comparability.control_in_force,
        comparability.same_numbering,
        comparability.same_means,
        *sound,
    )
    rates = (comparability.same_lr,) if ask is Ask.SAME else ()
    pair = _OF_A_PAIR if same_seed else ()
    return first, (*_OF_ONE_RUN, *rates, *pair, *budget, *of_losses)


def check_of(question: Question, compared: RunComparison) -> Check:
    """Ask a question, of every run where there are several seeds and it is about one run."""
    if compared.seeds is not None and question.name in _OF_EVERY_SEED:
        return of_every(question, compared, compared.seeds)
    check = question(compared)
    skipped = question in equivalence.CHECKS and check.outcome is Outcome.SKIPPED
    if compared.draws and compared.seeds is None and skipped:
        # No other check is asked of what comes after the first update.
        return replace(check, outcome=Outcome.INCONCLUSIVE)
    return check
