"""C4: the objective is made of something else, where a program shows what it is made of.

``Probe.terms`` shows how much each token weighs in the loss, and the terms that are weighed, in the
order in which they are computed. On the same samples, weights and scores they are the same in a
correct set-up, whatever its microbatches, ranks and padding are. So the first that differs is wrong
by itself, and later ones may only follow from it. Which tokens weigh something is compared before
the terms, since their sums are over these tokens; how much they weigh after them.
"""

from __future__ import annotations

from converge_harness.judge.causes.context import Context, off_at_first_step
from converge_harness.judge.causes.signature import Basis, Cause, Stage, signature
from converge_harness.judge.compare.objective_terms import (
    TermsDiffer,
    compare_terms,
    even_in,
    same_values_elsewhere,
)
from converge_harness.model import CauseClass, ObjectiveTerm, ObjectiveTerms, Outcome

_STEP, _RANK = "step", "rank"
_EVEN_IN = {
    None: "tokens of one sample have different weights",
    _STEP: "all tokens of the step weigh the same",
    _RANK: "tokens weigh the same in each rank only, as if each divided by its own",
    "microbatch": "tokens weigh the same in each microbatch only, as if each divided by its own",
    "sample": "tokens weigh the same in each sample only, as if each divided by its own",
}
_WHERE_COUNTED = (
    "which tokens are masked out of the loss: padding after a response, its last token, the prompt"
)
_WHERE_DIVIDED = (
    "by which count the loss is divided (tokens of the step, a rank, a microbatch, a sequence or "
    "its padded length; gathered over which ranks), and how often"
)


@signature(
    Basis.FIRST_TENSORS,
    Stage.OBJECTIVE,
    # Where terms show nothing, that another loss was trained is all that is known.
    overrides=("trained_objective",),
)
def term_differs(context: Context) -> Cause | None:
    """Another term, other tokens, another mean, or a term without its gradient."""
    found = _compared(context)
    if found is None:
        return None
    if found.counts_others:
        return Cause(_counted(found), CauseClass.OBJECTIVE, _WHERE_COUNTED)
    if found.wrong:
        return _wrong(found)
    if found.evened_otherwise or found.sums_otherwise:
        return Cause(_weighed(found), CauseClass.OBJECTIVE, _WHERE_DIVIDED)
    return _detached(found) if found.detached else None


def divisor_clause(context: Context) -> str:
    """What the loss is divided by, with a leading semicolon; empty if the terms do not say it."""
    found = _compared(context)
    if found is None or found.counts_others or found.wrong or found.evened_otherwise:
        return ""
    divisors = _divisors(found)
    return f"; {divisors}" if found.sums_otherwise and divisors else ""


def _compared(context: Context) -> TermsDiffer | None:
    """The terms at the first step of the runs, if nothing before them is wrong."""
    scores = context.compared.envelopes.get("loss_recomputed")
    if scores is None or off_at_first_step(scores) or context.failed("same-initial-parameters"):
        return None
    if context.outcome("same-data") is not Outcome.PASS:
        return None
    step = int(scores.steps[0])
    ours, theirs = (
        next((each for each in run.terms if each.step == step), None)
        for run in (context.compared.test, context.compared.control)
    )
    return compare_terms(ours, theirs, context.precision) if ours and theirs else None


def _counted(found: TermsDiffer) -> str:
    ours, theirs = found.ours, found.theirs
    more = ours.tokens - theirs.tokens
    off = f"{abs(more)} {'more' if more > 0 else 'fewer'}"
    each = f", one for each of {ours.samples} samples" if abs(more) == ours.samples else ""
    return (
        f"the objective counts other tokens: {ours.tokens} weigh something in the loss of step "
        f"{ours.step}, {theirs.tokens} in the control ({off}{each}); {ours.targets} have a label"
    )


def _wrong(found: TermsDiffer) -> Cause:
    first = found.wrong[0]
    ours, theirs = found.ours.terms[first], found.theirs.terms[first]
    names = list(found.theirs.terms)
    before = [f"`{name}`" for name in names[: names.index(first)]]
    right = f"; right before it: {', '.join(before)}" if before else ""
    later = ", ".join(f"`{name}`" for name in found.wrong[1:])
    follow = f"; {later} {'differ' if len(found.wrong) > 2 else 'differs'} with it" if later else ""  # noqa: PLR2004
    elsewhere = same_values_elsewhere(ours, theirs, found.theirs.tokens)
    same = ": its values are the control's, on other tokens" if elsewhere else ""
    sentence = (
        f"the objective differs from its term `{first}` on: at step {found.ours.step}, over the "
        f"tokens that count, {_described(ours, found.ours)} (control: "
        f"{_described(theirs, found.theirs)}){same}{right}{follow}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, f"how `{first}` is computed, and from what")


def _described(term: ObjectiveTerm, terms: ObjectiveTerms) -> str:
    tokens = max(terms.tokens, 1)
    return f"mean {term.total / tokens:.4g}, root mean square {(term.squares / tokens) ** 0.5:.4g}"


def _weighed(found: TermsDiffer) -> str:
    ours, theirs = (_evenness(each) for each in (found.ours, found.theirs))
    step = found.ours.step
    clauses = [
        f"the objective is another mean of the same terms: at step {step} {ours}, and in the "
        f"control {theirs}"
        if found.evened_otherwise
        else f"the objective is weighed otherwise at step {step}"
    ]
    if found.sums_otherwise:
        clauses.append(
            f"weights add up to {found.ours.weight:.4g} (control: {found.theirs.weight:.4g})"
        )
        clauses += [each for each in [_divisors(found)] if each and not found.evened_otherwise]
    return "; ".join(clauses)


def _evenness(terms: ObjectiveTerms) -> str:
    part = even_in(terms)
    alone = " (it has one microbatch)" if part == _RANK and terms.microbatches == 1 else ""
    return f"{_EVEN_IN[part]}{alone}"


def _divisors(found: TermsDiffer) -> str:
    """What all tokens of the step are divided by; empty if they do not all weigh the same."""
    if {even_in(found.ours), even_in(found.theirs)} != {_STEP}:
        return ""
    ours, theirs = (
        each.tokens / each.weight if each.weight else 0.0 for each in (found.ours, found.theirs)
    )
    return (
        f"each of {found.ours.tokens} tokens weighs as if divided by {ours:.5g}, and by "
        f"{theirs:.5g} in the control"
    )


def _detached(found: TermsDiffer) -> Cause:
    first = found.detached[0]
    has = "has a gradient, and none in the control"
    lost = "has no gradient, and one in the control"
    said = has if found.ours.terms[first].trains else lost
    sentence = (
        f"the term `{first}` of the objective {said}: its values of step {found.ours.step} are the "
        "control's"
    )
    look_at = f"what cuts `{first}` off from the parameters (detach, no_grad), or should"
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)
