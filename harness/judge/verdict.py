"""All checks of one test set to one verdict. Fails closed: what was not compared never passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from converge_harness.judge.causes import Cause, likely_cause
from converge_harness.judge.causes.first_wrong import first_wrong
from converge_harness.judge.checks import integrity
from converge_harness.judge.checks.envelope import open_curves, what_settles
from converge_harness.judge.checks.selection import (
    SEED_CHECKS,
    SelectedChecks,
    check_of,
    select_checks,
)
from converge_harness.judge.compare.envelopes import curves_alone
from converge_harness.judge.compare.limits import FEWEST_REPEATS
from converge_harness.judge.compare.precision_errors import PrecisionRuns
from converge_harness.judge.compare.tost import ALPHA
from converge_harness.judge.comparison import RunComparison, compare_runs
from converge_harness.judge.resume.passes import at_resume
from converge_harness.judge.soundness import non_finite
from converge_harness.model import (
    Ask,
    Calibration,
    CauseClass,
    Check,
    Evidence,
    Judgement,
    Outcome,
    RunStatus,
    SeedRuns,
    SetSpec,
    Verdict,
)

PROBED = 'both runs with the probe, [trainer] kind = "command": docs/any-trainer.md'


class JudgedPair(NamedTuple):
    """A verdict, and the comparison that it comes from."""

    verdict: Verdict
    comparison: RunComparison
    """Made once: reports that show the two runs side by side take it from here."""


def judge(
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None = None,
    *,
    spec: SetSpec | None = None,
    control_spec: SetSpec | None = None,
    tolerances: Mapping[str, float] | None = None,
    margin: float | None = None,
    own_start: bool = False,
    measure: PrecisionRuns | None = None,
    one_path: bool = False,
    ask: Ask | None = None,
    seeds: SeedRuns | None = None,
    same_seed: bool = True,
    target: float | None = None,
    level: float = ALPHA,
) -> JudgedPair:
    """Judge one test set against its control.

    Returns the verdict, and what was compared for it.

    ``calibration`` comes from A/A repeats of the control
    (:func:`converge_harness.judge.calibration.calibrate`). ``spec`` and ``control_spec`` say what
    the runs are meant to be; without them (curves from anywhere) techniques in force are not
    audited. ``tolerances`` map signals to relative differences that replace the learnt envelope,
    and ``margin`` is the largest relative difference of the mean loss that is equivalent; by
    default the spec's. ``own_start`` says that each run was given a seed checkpoint of its own:
    other initial weights are then not the run's fault, and it is not judged. ``measure`` are the
    runs that errors of low precision are measured against. ``one_path`` says that test and control
    were read from one file or folder.

    ``ask`` is what the test set has to show, by default the spec's, else that it is the same.
    ``seeds`` are the runs of control and test set with several seeds, ``control`` and ``test`` the
    first of each: then the checks over seeds are asked, too. ``same_seed`` says that these two
    first runs have one seed and saw the same samples; if not, they are not compared step by step,
    and the checks over seeds alone answer. ``target`` is a loss: then it is asked whether the test
    set's seeds reach it in no more steps than the control's by the margin, which makes the question
    that of *no worse*. What was not asked, the verdict names. ``level`` is that of the test of
    equivalence, smaller if this is one of several looks at a run
    (:func:`converge_harness.judge.compare.tost.level_of_look`).

    FAIL if any check fails; else ERROR if the run did not end by itself; else INVALID if any
    check is invalid; else INCONCLUSIVE if any is; PASS only if loss was compared from the first
    step to the last. Raises ValueError for a tolerance that is negative or not finite, for runs of
    other seeds without ``seeds``, and for ``seeds`` whose first runs are not these.
    """
    _refuse_unusable(test, control, seeds, same_seed=same_seed)
    if target is not None:
        if seeds is None or margin is None or not math.isfinite(target):
            raise ValueError(f"a target of {target} needs seeds and a margin, and to be finite")
        ask = Ask.NO_WORSE
    if ask is None:
        ask = spec.ask if spec else Ask.SAME
    if tolerances is None:
        tolerances = spec.tolerances if spec else {}
    if margin is None and spec is not None:
        margin = spec.margin
    compared = compare_runs(
        test,
        control,
        calibration,
        spec=spec,
        control_spec=control_spec,
        tolerances=tolerances,
        margin=margin,
        own_start=own_start,
        measure=measure,
        one_path=one_path,
        seeds=seeds,
        target=target,
        level=level,
    )
    in_passes = bool(test.passes) or (spec is not None and spec.resumes)
    selected = select_checks(
        ask,
        seeds=seeds is not None,
        same_seed=same_seed,
        in_passes=in_passes,
        target=target is not None,
        draws=compared.draws,
    )
    by_limits = integrity.repeats_sound in selected.rest and _by_limits_alone(compared)
    questions = (*selected.first, integrity.repeats_sound) if by_limits else selected.first
    first = tuple(check_of(question, compared) for question in questions)
    broken = [check for check in first if check.outcome is Outcome.INVALID]
    if broken:
        cause = Cause(broken[0].detail)
        verdict = _verdict(compared, ask, selected, Judgement.INVALID, first, cause)
        return JudgedPair(verdict, compared)
    rest = tuple(check_of(each, compared) for each in selected.rest if each not in questions)
    checks = first + rest
    judgement = _judgement(_ended(compared).status, checks, selected.needed)
    cause = _cause(compared, judgement, checks, stepwise=_stepwise(selected) or compared.draws)
    verdict = _verdict(compared, ask, selected, judgement, checks, cause)
    if judgement is Judgement.FAIL:
        place = first_wrong(compared, {check.name: check for check in checks}, cause.kind)
        verdict = replace(
            verdict,
            module=place.module,
            first_wrong=place.sentence,
            wrong_forward=place.forward,
        )
    return JudgedPair(verdict, compared)


def _refuse_unusable(
    test: Evidence, control: Evidence, seeds: SeedRuns | None, *, same_seed: bool
) -> None:
    if seeds is None:
        if not same_seed:
            raise ValueError("runs of other seeds are compared over several: give seeds")
        return
    if not seeds.test or not seeds.control:
        raise ValueError("seeds without a run on one side")
    if seeds.test[0] is not test or seeds.control[0] is not control:
        raise ValueError("test and control must be the first runs of seeds")
    if seeds.paired and len(seeds.test) != len(seeds.control):
        raise ValueError(f"{len(seeds.test)} and {len(seeds.control)} seeds are no pairs")


def _stepwise(selected: SelectedChecks) -> bool:
    """Whether the two runs are compared step by step."""
    return "loss-envelope" in selected.needed


def _ended(compared: RunComparison) -> Evidence:
    """The first run of the test set that did not end by itself; else its first."""
    runs = compared.seeds.test if compared.seeds else (compared.test,)
    return next((each for each in runs if each.status is not RunStatus.FINISHED), compared.test)


def _by_limits_alone(compared: RunComparison) -> bool:
    """Whether only learnt limits can show that the test set is wrong; unsound repeats give none.

    That is so for curves alone, unless the test set's has a NaN or an infinity.
    """
    return curves_alone(compared.test, compared.control) and non_finite(compared.test) is None


def _judgement(status: RunStatus, checks: Sequence[Check], needed: Sequence[str]) -> Judgement:
    outcomes = {check.outcome for check in checks}
    if Outcome.FAIL in outcomes:
        return Judgement.FAIL
    if status is not RunStatus.FINISHED:
        return Judgement.ERROR
    settled = (Outcome.PASS, Outcome.INCONCLUSIVE)
    answered = {check.name for check in checks if check.outcome in settled}
    if Outcome.INVALID in outcomes or not answered.issuperset(needed):
        return Judgement.INVALID
    return Judgement.INCONCLUSIVE if Outcome.INCONCLUSIVE in outcomes else Judgement.PASS


def _cause(
    compared: RunComparison, judgement: Judgement, checks: Sequence[Check], *, stepwise: bool
) -> Cause:
    """Of a FAIL, with its class; else only the sentence."""
    ended = _ended(compared).status is RunStatus.FINISHED
    if judgement is Judgement.FAIL:
        failed = {check.name for check in checks if check.outcome is Outcome.FAIL}
        by_groups = not stepwise or failed <= {question.name for question in SEED_CHECKS}
        cause = _as_found(checks) if by_groups else likely_cause(compared, checks)
        how = "" if ended else f"; the run then {_how_it_ended(compared)}"
        return cause._replace(sentence=cause.sentence + how)
    if judgement is Judgement.ERROR:
        return Cause(f"the run {_how_it_ended(compared)}")
    if judgement is Judgement.INVALID:
        found = [check.detail for check in checks if check.outcome is Outcome.INVALID]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return Cause(found[0] + more if found else "nothing was compared")
    if judgement is Judgement.INCONCLUSIVE:
        equivalent = next((each for each in checks if each.name == "loss-equivalent"), None)
        mean = equivalent.measured if equivalent else None
        if stepwise and (left := open_curves(compared.envelopes)):
            return Cause(what_settles(left, mean))
        return Cause(next(c.detail for c in checks if c.outcome is Outcome.INCONCLUSIVE))
    return Cause()


def _as_found(checks: Sequence[Check]) -> Cause:
    """A FAIL as its first check describes it: a loss alone does not show what caused it."""
    failed = next(check for check in checks if check.outcome is Outcome.FAIL)
    kind = CauseClass.NOT_FINITE if failed.name == "finite" else CauseClass.UNKNOWN
    limit = f"; the margin is {failed.limit.value:g}" if failed.limit else ""
    return Cause(f"{failed.detail}{limit}", kind)


def _how_it_ended(compared: RunComparison) -> str:
    test = _ended(compared)
    ending = {
        RunStatus.CRASHED: "crashed",
        RunStatus.HUNG: "hung: no step finished within the timeout",
        RunStatus.TIMED_OUT: "ran into the time limit of its job",
        RunStatus.CANCELLED: "was cancelled",
        RunStatus.REFUSED: "was refused by the scheduler",
        RunStatus.INTERRUPTED: "was interrupted",
        RunStatus.STOPPED: "was stopped",
        RunStatus.SKIPPED: "was not started, because something it needs did not finish",
    }[test.status]
    if test.status in (RunStatus.CRASHED, RunStatus.HUNG):
        ending += at_resume(test, compared.spec)
    return f"{ending}: {test.error.text}" if test.error else ending


def _verdict(
    compared: RunComparison,
    ask: Ask,
    selected: SelectedChecks,
    judgement: Judgement,
    checks: Sequence[Check],
    cause: Cause,
) -> Verdict:
    return Verdict(
        name=compared.test.name,
        control=compared.control.name,
        judgement=judgement,
        cause=cause.sentence,
        cause_class=cause.kind,
        look_at=cause.look_at,
        onset_step=_onset(checks),
        checks=tuple(checks),
        next_command=_next_command(
            compared, judgement, checks, ask, stepwise=_stepwise(selected) or compared.draws
        ),
        ask=ask,
        not_asked=selected.not_asked,
    )


def _onset(checks: Sequence[Check]) -> int | None:
    """The first step at which a check failed; without failures, at which one was invalid."""
    for outcome in (Outcome.FAIL, Outcome.INVALID):
        onsets = [check.onset for check in checks if check.outcome is outcome]
        known = [onset for onset in onsets if onset is not None]
        if known:
            return min(known)
    return None


def _next_of_curves(compared: RunComparison, judgement: Judgement, checks: Sequence[Check]) -> str:
    """The command that would show more than these curves do; empty where it needs other curves."""
    same = _same_comparison(compared)
    if judgement is Judgement.FAIL:
        return f"converge run EXPERIMENT.toml  # {PROBED}"
    if judgement is Judgement.INCONCLUSIVE and open_curves(compared.envelopes):
        known = compared.calibration
        # Those that taught a file are not at hand, so the command does not name them.
        there = known.taught_by if known and known.sources else 0
        missing = range(1, FEWEST_REPEATS - there + 1)
        return same + "".join(f" --repeat RUN_{number}" for number in missing)
    options = next((each.compare_with for each in checks if each.compare_with), "")
    return f"{same} {options}" if options and judgement is Judgement.INVALID else ""


def _same_comparison(compared: RunComparison) -> str:
    """These runs again, with the repeats: without them the limits would change."""
    sources = compared.calibration.sources if compared.calibration else ()
    repeats = "".join(f" --repeat {_quoted(source)}" for source in sources)
    pair = f"{_quoted(compared.control.source)} {_quoted(compared.test.source)}"
    return f"converge compare {pair}{repeats}"


def _next_of_seeds(
    compared: RunComparison, judgement: Judgement, checks: Sequence[Check], ask: Ask
) -> str:
    """The same comparison with placeholders for more seeds, where some number would settle it."""
    would_settle = any(check.further_seeds is not None for check in checks)
    if judgement is not Judgement.INCONCLUSIVE or not would_settle:
        return ""
    runs = compared.seeds or SeedRuns((compared.control,), (compared.test,))
    sides = (("--control", runs.control, "CONTROL"), ("--test", runs.test, "TEST"))
    options = " ".join(
        f"{option} {' '.join(_quoted(each.source) for each in side)} {name}_{len(side) + 1} …"
        for option, side, name in sides
    )
    asking = f' --ask "{ask.value}"' if ask is Ask.NO_WORSE else ""
    asking = asking if compared.target is None else f" --target loss={compared.target:g}"
    margin = f" --margin {compared.margin:g}" if compared.margin is not None else ""
    return f"converge compare --seeds {options}{asking}{margin}"


def _next_command(
    compared: RunComparison,
    judgement: Judgement,
    checks: Sequence[Check],
    ask: Ask,
    *,
    stepwise: bool,
) -> str:
    """What to type next; nothing after a PASS."""
    if judgement is Judgement.PASS:
        return ""
    if judgement is Judgement.ERROR:
        ended = _ended(compared)
        if ended.status is RunStatus.STOPPED:
            return ""  # by converge: its logs say nothing
        folder = _quoted(ended.source)
        file = ended.says_why
        return f"cat {folder}/{file}" if file else f"grep -rn Error {folder}/logs"
    if not stepwise:
        return _next_of_seeds(compared, judgement, checks, ask)
    if curves_alone(compared.test, compared.control):
        return _next_of_curves(compared, judgement, checks)
    return _same_comparison(compared)


def _quoted(path: str) -> str:
    """A path quoted for a POSIX shell, so that it cannot be taken for an option."""
    path = f"./{path}" if path.startswith("-") else path
    plain = path.isascii() and all(letter.isalnum() or letter in "/._-+=:,@" for letter in path)
    return path if path and plain else "'" + path.replace("'", "'\"'\"'") + "'"
