"""All checks of one test set to one verdict. Fails closed: what was not compared never passes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from harness.judge import (
    comparability,
    equivalence,
    fault_checks,
    first_step,
    integrity,
    leftover_checks,
    reference_checks,
    replay_checks,
    resume_checks,
    stepwise,
    tensor_checks,
    tensor_integrity,
    trained,
)
from harness.judge.alone import REPEATS, curves_alone
from harness.judge.case import Case, make_case
from harness.judge.causes import Cause, likely_cause
from harness.judge.check import Question
from harness.judge.open_curves import what_settles
from harness.judge.passes import at_resume
from harness.judge.rounding import Measure
from harness.judge.soundness import non_finite
from harness.model import (
    Calibration,
    Check,
    Evidence,
    Judgement,
    Outcome,
    RunStatus,
    SetSpec,
    Tier,
    Verdict,
)

CHECKS: tuple[Question, ...] = (
    *integrity.CHECKS,
    trained.something_trained,
    *comparability.CHECKS,
    *first_step.CHECKS,
    *tensor_integrity.CHECKS,
    *reference_checks.CHECKS,
    *tensor_checks.CHECKS,
    *leftover_checks.CHECKS,
    *stepwise.CHECKS,
    *equivalence.CHECKS,
    *resume_checks.CHECKS,
    *replay_checks.CHECKS,
    *fault_checks.CHECKS,
)
"""Every check. The tensors' belong to several tiers; those of the resume tier are asked only of
runs that were made in several passes, or should have been."""

FIRST = (
    integrity.control_sound,
    trained.something_trained,
    comparability.control_in_force,
    tensor_integrity.starts_as_the_control,
)
"""Asked first: when the control is broken or learns nothing, or another start was made, no other
answer means anything."""

PROBED = 'both runs with the probe, [trainer] kind = "command": docs/any-trainer.md'
CUT = re.compile(r"--from \d+")
"""How a check says from which step on two curves have the same steps."""

_TOLD_BY = {
    RunStatus.REFUSED: "job.sh",
    RunStatus.TIMED_OUT: "slurm.log",
    RunStatus.CANCELLED: "slurm.log",
}
"""The file of a run folder that says most of how a scheduler ended the run."""

NEEDED = ("loss-first-step", "loss-envelope")
"""Without these two answered PASS there is no PASS, whatever the others say; skipped, nothing was
compared."""


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
    measure: Measure | None = None,
    one_path: bool = False,
) -> Verdict:
    """Judge one test set against its control.

    ``calibration`` is what A/A repeats of the control taught
    (:func:`harness.judge.calibrate.calibrate`). ``spec`` and ``control_spec`` say what the runs
    are meant to be; without them (curves from anywhere) techniques in force are not audited.
    ``tolerances`` map signals to relative differences that replace the learnt envelope, and
    ``margin`` is the largest relative difference of the mean loss that is equivalent; by default
    the spec's. ``own_start`` says that each run was given a seed checkpoint of its own: other
    initial weights are then no fault of the run, and nothing can be told of it. ``measure`` are the
    runs by which errors of low precision are judged. ``one_path`` says that test and control were
    read from one file or folder.

    FAIL if any check fails; else ERROR if the run did not end by itself; else INVALID if any
    check is invalid; else INCONCLUSIVE if any is; PASS only if loss was compared from the first
    step to the last. Raises ValueError for a tolerance that is negative or not finite.
    """
    if tolerances is None:
        tolerances = spec.tolerances if spec else {}
    if margin is None and spec is not None:
        margin = spec.margin
    case = make_case(
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
    )
    asked = (*FIRST, integrity.repeats_sound) if _by_limits_alone(case) else FIRST
    first = tuple(question(case) for question in asked)
    broken = [check for check in first if check.outcome is Outcome.INVALID]
    if broken:
        cause = Cause(broken[0].detail)
        return _verdict(case, Judgement.INVALID, first, cause)
    resumes = bool(test.passes) or (spec is not None and spec.resumes)
    rest = tuple(
        question(case)
        for question in CHECKS
        if question not in asked and (resumes or question.tier is not Tier.RESUME)
    )
    checks = first + rest
    judgement = _judgement(test.status, checks)
    return _verdict(case, judgement, checks, _cause(case, judgement, checks))


def _by_limits_alone(case: Case) -> bool:
    """Whether only learnt limits can show that the test set is wrong; unsound repeats teach none.

    That is so for curves alone, unless the test set's has a NaN or an infinity.
    """
    return curves_alone(case.test, case.control) and non_finite(case.test) is None


def _judgement(status: RunStatus, checks: Sequence[Check]) -> Judgement:
    outcomes = {check.outcome for check in checks}
    if Outcome.FAIL in outcomes:
        return Judgement.FAIL
    if status is not RunStatus.FINISHED:
        return Judgement.ERROR
    settled = (Outcome.PASS, Outcome.INCONCLUSIVE)
    answered = {check.name for check in checks if check.outcome in settled}
    if Outcome.INVALID in outcomes or not answered.issuperset(NEEDED):
        return Judgement.INVALID
    return Judgement.INCONCLUSIVE if Outcome.INCONCLUSIVE in outcomes else Judgement.PASS


def _cause(case: Case, judgement: Judgement, checks: Sequence[Check]) -> Cause:
    """Of a FAIL, with its class; else only the sentence."""
    ended = case.test.status is RunStatus.FINISHED
    if judgement is Judgement.FAIL:
        cause = likely_cause(case, checks)
        how = "" if ended else f"; the run then {_how_it_ended(case)}"
        return cause._replace(sentence=cause.sentence + how)
    if judgement is Judgement.ERROR:
        return Cause(f"the run {_how_it_ended(case)}")
    if judgement is Judgement.INVALID:
        found = [check.detail for check in checks if check.outcome is Outcome.INVALID]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return Cause(found[0] + more if found else "nothing was compared")
    if judgement is Judgement.INCONCLUSIVE:
        equivalent = next((each for each in checks if each.name == "loss-equivalent"), None)
        mean = equivalent.measured if equivalent else None
        if settles := what_settles(case.envelopes, mean):
            return Cause(settles)
        return Cause(next(c.detail for c in checks if c.outcome is Outcome.INCONCLUSIVE))
    return Cause()


def _how_it_ended(case: Case) -> str:
    test = case.test
    words = {
        RunStatus.CRASHED: "crashed",
        RunStatus.HUNG: "hung: no step finished within the timeout",
        RunStatus.TIMED_OUT: "ran into the time limit of its job",
        RunStatus.CANCELLED: "was cancelled",
        RunStatus.REFUSED: "was refused by the scheduler",
        RunStatus.INTERRUPTED: "was interrupted",
        RunStatus.SKIPPED: "was not started, because something it needs did not finish",
    }[test.status]
    if test.status in (RunStatus.CRASHED, RunStatus.HUNG):
        words += at_resume(test, case.spec)
    return f"{words}: {test.error.words}" if test.error else words


def _verdict(case: Case, judgement: Judgement, checks: Sequence[Check], cause: Cause) -> Verdict:
    return Verdict(
        name=case.test.name,
        control=case.control.name,
        judgement=judgement,
        cause=cause.sentence,
        cause_class=cause.kind,
        look_at=cause.look_at,
        onset_step=_onset(checks),
        checks=tuple(checks),
        next_command=_next_command(case, judgement, checks),
    )


def _onset(checks: Sequence[Check]) -> int | None:
    """The first step at which a check failed; without failures, at which one was invalid."""
    for outcome in (Outcome.FAIL, Outcome.INVALID):
        onsets = [check.onset for check in checks if check.outcome is outcome]
        known = [onset for onset in onsets if onset is not None]
        if known:
            return min(known)
    return None


def _next_of_curves(case: Case, judgement: Judgement, checks: Sequence[Check]) -> str:
    """What would tell more than these curves do; empty where it is other curves."""
    pair = f"converge compare {_quoted(case.control.source)} {_quoted(case.test.source)}"
    if judgement is Judgement.FAIL:
        return f"converge run EXPERIMENT.toml  # {PROBED}"
    if judgement is Judgement.INCONCLUSIVE and what_settles(case.envelopes, None):
        return pair + "".join(f" --repeat RUN_{number}" for number in range(1, REPEATS + 1))
    cut = next((found for check in checks if (found := CUT.search(check.detail))), None)
    return f"{pair} {cut[0]}" if cut and judgement is Judgement.INVALID else ""


def _next_command(case: Case, judgement: Judgement, checks: Sequence[Check]) -> str:
    """What to type next; nothing after a PASS. With the repeats, or the limits would be others."""
    if judgement is Judgement.PASS:
        return ""
    if judgement is Judgement.ERROR:
        folder = _quoted(case.test.source)
        told = _TOLD_BY.get(case.test.status)
        return f"cat {folder}/{told}" if told else f"grep -rn Error {folder}/logs"
    if curves_alone(case.test, case.control):
        return _next_of_curves(case, judgement, checks)
    sources = case.calibration.sources if case.calibration else ()
    repeats = "".join(f" --repeat {_quoted(source)}" for source in sources)
    return f"converge compare {_quoted(case.control.source)} {_quoted(case.test.source)}{repeats}"


def _quoted(path: str) -> str:
    """A path as one word of a POSIX shell."""
    plain = path.isascii() and all(letter.isalnum() or letter in "/._-+=:,@" for letter in path)
    return path if path and plain else "'" + path.replace("'", "'\"'\"'") + "'"
