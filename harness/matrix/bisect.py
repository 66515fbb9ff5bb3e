"""Finds the first revision at which a test set fails, or no longer fails, by real, judged runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from packaging.version import InvalidVersion, Version

from converge_harness import bisect
from converge_harness.bisect import Suspects
from converge_harness.checkout import (
    SHORT,
    Commit,
    changes_of,
    commit_of,
    commits_between,
    common_ancestor,
)
from converge_harness.errors import (
    MAX_LISTED,
    CheckoutError,
    ConfigError,
    ConvergeError,
    Problem,
    ToolchainError,
)
from converge_harness.matrix.against import Fork, base_of, fork_of, of_other_code
from converge_harness.matrix.conclude import conclude
from converge_harness.matrix.failure import (
    Failure,
    PlanRunner,
    failure_of,
    how_often,
    is_failure,
    only_set,
    pairs_to_try,
    trial_of,
    verdict_alone,
)
from converge_harness.matrix.load import Finder, plan_experiment
from converge_harness.matrix.run import Ran, gpu_ids
from converge_harness.model import Experiment, Judgement, Launcher, Plan, SetSpec, Verdict
from converge_harness.report import write_reports
from converge_harness.shrink import FEWEST_STEPS, Effect, Trial, why_not, with_steps
from converge_harness.store import Store
from converge_harness.toolchains.recipes import (
    NameParts,
    Upstream,
    has_recipe,
    has_revisions,
    released_versions,
    require_checkout,
    upstream_of,
)

TELLING = (Effect.SAME, Effect.PASSES)
"""Effects that tell on which side of the change a revision is."""
_NO_SPACE = "No space left on device"


class NothingToBisectError(ConvergeError):
    """The set does not fail at the bad revision, or does not pass at the good one."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit, or a version of a package."""

    name: str
    """The full hash, or the version."""
    title: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A pair of sets, planned with the code of one revision."""

    plan: Plan
    other_code: Callable[[Ran], str] = field(default=lambda _: "")
    """A clause on a run that used other code than the revision's; empty if none did."""


class Subject(Protocol):
    """Whose revisions are searched."""

    what: str
    """``torchtitan in ~/torchtitan``."""
    noun: str
    """``commit`` or ``version``."""

    def revision(self, written: str) -> Revision:
        """What the user wrote; raises an error if there is no such revision."""

    def common(self, good: Revision, bad: Revision) -> Revision:
        """The older of the two; if neither is an ancestor of the other, their merge base."""

    def line(self, old: Revision, new: Revision) -> tuple[Revision, ...]:
        """All revisions from one to another, oldest first, with both."""

    def planned(self, experiment: Experiment, at: Revision) -> AbstractContextManager[Planned]:
        """The experiment with the code of a revision, which stays there until the block ends.

        Raises ConvergeError if it cannot be built or planned.
        """

    def changes(self, at: Revision) -> str:
        """The files that a commit changed, or where a version is described."""


@dataclass(frozen=True, slots=True)
class TriedRevision:
    """A revision that was built, run and judged."""

    revision: Revision
    trial: Trial


@dataclass(frozen=True, slots=True)
class TwoRevisions:
    """Two revisions, at one of which a set is said to pass and at the other to fail."""

    good: Revision
    bad: Revision
    common: Revision
    """The older of the two; on two branches, their merge base."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A line of revisions at whose ends a set is known to fail, and to pass."""

    pair: Experiment
    """What is run at every revision."""
    failure: Failure
    line: tuple[Revision, ...]
    mended: bool
    """Whether the newest revision is the good one."""


@dataclass(frozen=True, slots=True)
class Found:
    """How far a search has come."""

    ends: Ends
    suspects: Suspects
    tried: tuple[TriedRevision, ...] = ()

    @property
    def candidates(self) -> tuple[Revision, ...]:
        """One of them is the first from which on the set fails, or passes."""
        return tuple(self.ends.line[number] for number in self.suspects.suspects)

    @property
    def before(self) -> Revision:
        """The newest one of which it is known that it is older than the change."""
        return self.ends.line[self.suspects.before]

    @property
    def after(self) -> Revision:
        """The oldest one of which it is known that it has the change."""
        return self.ends.line[self.suspects.until]

    @property
    def done(self) -> bool:
        """Whether nothing is left to try."""
        return self.suspects.following() is None


def untried(ends: Ends) -> Found:
    """What is known before the first trial."""
    return Found(ends, Suspects(0, len(ends.line) - 1))


class Bisecting:
    """Runs and judges one test set at one revision after another."""

    def __init__(self, experiment: Experiment, subject: Subject, run: PlanRunner) -> None:
        """Take an experiment of one control and one test set; see ``alone``."""
        self._alone, self._subject, self._run = experiment, subject, run

    def ends(self, asked: TwoRevisions, tell: Callable[[TriedRevision], None]) -> Ends:
        """What is run, and the line that is searched.

        Raises NothingToBisectError if the set does not fail at the bad revision, or does not pass
        at the good one.
        """
        good, bad, common = asked.good, asked.bad, asked.common
        pair, failure = self._telling(asked, tell)
        pair = self._cheapest(pair, failure, asked)
        if common not in (good, bad):
            trial = self._trial(pair, common, failure)
            tell(TriedRevision(common, trial))
            if trial.effect not in TELLING:
                raise NothingToBisectError(
                    f"{good.title} and {bad.title} are on two branches, and at the "
                    f"{self._subject.noun} that both come from, {common.title}, the set "
                    f"{_outcome(trial)}: choose two of one branch"
                )
            good, bad = (good, common) if trial.effect is Effect.SAME else (common, bad)
        mended = common == bad
        line = self._subject.line(bad, good) if mended else self._subject.line(good, bad)
        return Ends(pair, failure, line, mended)

    def search(
        self,
        ends: Ends,
        may_go_on: Callable[[int], bool],
        tell: Callable[[Found, TriedRevision], None],
    ) -> Found:
        """The first revision that has the change; see ``converge_harness.bisect.search``."""
        tried: list[TriedRevision] = []

        def as_newest(number: int) -> bool | None:
            revision = ends.line[number]
            trial = self._trial(ends.pair, revision, ends.failure)
            tried.append(TriedRevision(revision, trial))
            if trial.effect not in TELLING:
                return None
            return (trial.effect is Effect.PASSES) == ends.mended

        def report(suspects: Suspects) -> None:
            tell(Found(ends, suspects, tuple(tried)), tried[-1])

        found = bisect.search(untried(ends).suspects, as_newest, may_go_on, report)
        return Found(ends, found, tuple(tried))

    def confirm(self, found: Found) -> tuple[TriedRevision, ...]:
        """Run both sides of the change again, from nothing; return what is not as before.

        A flaky set leads a search to a random revision.
        """
        ends = found.ends
        sides = ((found.before, ends.mended), (found.after, not ends.mended))
        again = (
            (TriedRevision(at, self._trial(ends.pair, at, ends.failure, fresh=True)), fails)
            for at, fails in sides
        )
        return tuple(
            tried
            for tried, fails in again
            if tried.trial.effect is not (Effect.SAME if fails else Effect.PASSES)
        )

    def report(self, ends: Ends, at: Revision, folder: Path, store: Store) -> None:
        """Write the report of the pair at a revision; its runs are reused."""
        with self._subject.planned(ends.pair, at) as planned:
            ran = self._run(planned.plan, fresh=False)
            judged = conclude(planned.plan, ran, folder, store=store, save=False)
            write_reports(judged.view, folder)

    def _telling(
        self, asked: TwoRevisions, tell: Callable[[TriedRevision], None]
    ) -> tuple[Experiment, Failure]:
        """The cheapest pair that fails at the bad revision and passes at the good one."""
        (test,) = self._alone.tests
        pairs = (self._alone,) if _as_it_is(test) else tuple(pairs_to_try(self._alone))
        why = ""
        for pair in pairs:
            verdict = self._judged(pair, asked.bad)
            if not is_failure(verdict):
                why = self._does_not_fail(pair, asked.bad, verdict) if pair is pairs[-1] else ""
                continue
            failure = failure_of(verdict)
            tell(TriedRevision(asked.bad, Trial(Effect.SAME, failure.cause)))
            trial = self._trial(pair, asked.good, failure)
            tell(TriedRevision(asked.good, trial))
            if trial.effect is Effect.PASSES:
                return pair, failure
            why = self._is_no_good_end(asked.good, trial)
        raise NothingToBisectError(why)

    def _does_not_fail(self, pair: Experiment, bad: Revision, verdict: Verdict) -> str:
        """Why this cannot be the bad revision; for a flaky set, how often it fails."""
        said = verdict.judgement.value + (f": {verdict.cause}" if verdict.cause else "")
        often = ""
        if verdict.judgement is Judgement.PASS:
            often = how_often(lambda: is_failure(self._judged(pair, bad, fresh=True)))
        name = pair.tests[0].name
        return f"{name!r} does not fail at the bad {self._subject.noun}, {bad.title}: {said}{often}"

    def _is_no_good_end(self, good: Revision, trial: Trial) -> str:
        end = f"the good {self._subject.noun}, {good.title}"
        if trial.effect is Effect.SAME:
            return f"{end}, is bad: the set {_outcome(trial)}; choose one at which it passes"
        return f"at {end}, the set {_outcome(trial)}"

    def _cheapest(self, pair: Experiment, failure: Failure, asked: TwoRevisions) -> Experiment:
        """The pair with as few steps as the failure needs, if that still tells good from bad."""
        if failure.onset is None or _as_it_is(pair.tests[0]):
            return pair
        short = with_steps(pair, max(failure.onset, FEWEST_STEPS))
        if short is None:
            return pair
        ends = ((asked.bad, Effect.SAME), (asked.good, Effect.PASSES))
        tells = all(self._trial(short, at, failure).effect is effect for at, effect in ends)
        return short if tells else pair

    def _judged(self, pair: Experiment, at: Revision, *, fresh: bool | None = None) -> Verdict:
        """The verdict at a revision; raises CheckoutError if ranks ran other code than its."""
        with self._subject.planned(pair, at) as planned:
            ran = self._run(planned.plan, fresh=fresh)
            if clause := planned.other_code(ran):
                raise CheckoutError(f"{at.title}: {clause}")
            return verdict_alone(planned.plan, ran)

    def _trial(
        self, pair: Experiment, at: Revision, failure: Failure, *, fresh: bool | None = None
    ) -> Trial:
        try:
            return trial_of(self._judged(pair, at, fresh=fresh), failure)
        except ConfigError as error:  # a rule, or the toolchain's own check
            return Trial(Effect.IMPOSSIBLE, error.problems[0].message)
        except (ToolchainError, CheckoutError) as error:
            if _NO_SPACE in str(error):  # the next ones will not fit either
                raise
            return Trial(Effect.IMPOSSIBLE, str(error))


def asked_for(subject: Subject, good: str, bad: str) -> TwoRevisions:
    """What the user wrote; raises an error if there is no such revision, or nothing between."""
    two = subject.revision(good), subject.revision(bad)
    if two[0] == two[1]:
        raise NothingToBisectError(f"both are {two[0].title}: name two {subject.noun}s")
    return TwoRevisions(*two, subject.common(*two))


def alone(experiment: Experiment, name: str, slots: int | None = None) -> Experiment:
    """The experiment with one test set and its control, which is run at every revision, here.

    Raises ConfigError if it has no such set. ``slots``: how many ranks may run at once on the CPU;
    None: as the file says.
    """
    found = replace(
        only_set(experiment, name),
        anchor=None,
        calibration=None,
        baseline=None,
        baseline_across=(),
        launcher=Launcher.LOCAL,
    )
    return found if slots is None else replace(found, cpu_ranks=slots)


def trains_in(experiment: Experiment) -> str:
    """The toolchain of the only test set, if converge builds its revisions; else empty."""
    (test,) = experiment.tests
    return test.toolchain if has_revisions(test.toolchain) else ""


def _as_it_is(test: SetSpec) -> bool:
    """Whether a set is run as it is, with all repeats and steps.

    A program is: that shorter runs of it tell as much would cost trials of its own.
    """
    return bool(why_not(test)) or not test.trainer.can.techniques


def _outcome(trial: Trial) -> str:
    return f"{trial.effect.value} ({trial.said})" if trial.said else trial.effect.value


# ------------------------------------------------------------------ subjects


class _Commits:
    """Commits of a git checkout."""

    noun = "commit"

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout

    def revision(self, written: str) -> Revision:
        return self._of(commit_of(self._checkout, written))

    def common(self, good: Revision, bad: Revision) -> Revision:
        return self._of(common_ancestor(self._checkout, good.name, bad.name))

    def line(self, old: Revision, new: Revision) -> tuple[Revision, ...]:
        return tuple(map(_named, commits_between(self._checkout, old.name, new.name)))

    def changes(self, at: Revision) -> str:
        return changes_of(self._checkout, at.name)

    def _of(self, commit: str) -> Revision:
        return _named(commits_between(self._checkout, commit, commit)[0])


def _named(commit: Commit) -> Revision:
    return Revision(commit.name, str(commit))


class UpstreamCommits(_Commits):
    """Commits of a clone of torchtitan or Megatron-LM, each built as a toolchain of its own."""

    def __init__(self, experiment: Experiment, find: Finder) -> None:
        """Take an experiment of one test set; a control with another toolchain keeps its own.

        Args:
            experiment: with one test set.
            find: builds toolchains that are not there.

        Raises:
            ToolchainError: ``$CONVERGE_CHECKOUT`` is not set.
            ConfigError: the set's toolchain is none that converge builds at a revision.
        """
        base, upstream = _toolchain_of(experiment)
        super().__init__(require_checkout(upstream))
        self._base, self._find = base, find
        self.what = f"{upstream.repository} in {self._checkout}, on the packages of {base}"

    @contextmanager
    def planned(self, experiment: Experiment, at: Revision) -> Iterator[Planned]:
        others = self._base.partition("@")[0]
        yield _with_toolchain(experiment, self._base, f"{others}@{at.name[:SHORT]}", self._find)


class Releases:
    """Versions of a package, each in a toolchain of its own."""

    noun = "version"

    def __init__(self, package: str, experiment: Experiment, find: Finder) -> None:
        """Take a package, and the rest as ``UpstreamCommits``.

        Raises ConfigError where converge does not build the set's toolchain.
        """
        (test,) = experiment.tests
        if not has_recipe(test.toolchain) or NameParts.of(test.toolchain).package:
            raise ConfigError(
                Problem(
                    str(experiment.path),
                    f"{test.name!r} trains in {test.toolchain}, and --package needs a toolchain "
                    "that converge builds, without +PACKAGE-VERSION in its name",
                    "list them with: converge toolchain list",
                )
            )
        self._package, self._find, self._base = package, find, test.toolchain
        self._known: tuple[str, ...] = ()
        self.what = f"{package}, with the other packages of {self._base}"

    def revision(self, written: str) -> Revision:
        try:
            Version(written)
        except InvalidVersion:
            raise ToolchainError(f"{written!r} is not a version, such as 2.15.0") from None
        self._known = self._known or released_versions(self._package)
        if written not in self._known:
            shown = ", ".join(self._known[-MAX_LISTED:])
            raise ToolchainError(f"{self._package} has no version {written}; the last: {shown}")
        return self._of(written)

    def common(self, good: Revision, bad: Revision) -> Revision:
        return min(good, bad, key=lambda each: Version(each.name))

    def line(self, old: Revision, new: Revision) -> tuple[Revision, ...]:
        between = (
            each
            for each in self._known
            if Version(old.name) < Version(each) < Version(new.name)
            and not Version(each).is_prerelease
        )
        return old, *map(self._of, between), new

    def changes(self, at: Revision) -> str:
        return f"https://pypi.org/project/{self._package}/{at.name}"

    @contextmanager
    def planned(self, experiment: Experiment, at: Revision) -> Iterator[Planned]:
        release, at_sign, revision = self._base.partition("@")
        made = f"{release}+{self._package}-{at.name}{at_sign}{revision}"
        yield _with_toolchain(experiment, self._base, made, self._find)

    def _of(self, version: str) -> Revision:
        return Revision(version, f"{self._package} {version}")


class OwnCommits(_Commits):
    """Commits of the checkout with the experiment's own code, or of a fork of torchtitan."""

    def __init__(self, experiment: Experiment) -> None:
        """Raises CheckoutError where the experiment's code is in no checkout, or in several."""
        plan = plan_experiment(experiment, on_gpu=bool(gpu_ids()))
        super().__init__(fork_of(plan, "HEAD", "commits of your own code").checkout)
        self.what = str(self._checkout)

    @contextmanager
    def planned(self, experiment: Experiment, at: Revision) -> Iterator[Planned]:
        plan = plan_experiment(experiment, on_gpu=bool(gpu_ids()))
        fork = Fork(self._checkout, at.name[:SHORT], at.name)
        with base_of(plan, fork) as base:
            if base.missing:
                (lost,) = base.missing.values()
                raise ConfigError(Problem(str(experiment.path), f"{at.title} has no {lost}"))
            yield Planned(
                base.plan,
                lambda ran: next(
                    filter(None, (of_other_code(fork, base.folder, each) for each in ran.records)),
                    "",
                ),
            )


def _toolchain_of(experiment: Experiment) -> tuple[str, Upstream]:
    (test,) = experiment.tests
    name = trains_in(experiment)
    if name and (upstream := upstream_of(name)) is not None:
        return name, upstream
    raise ConfigError(
        Problem(
            str(experiment.path),
            f"{test.name!r} trains in {test.toolchain}, which converge cannot build at a revision",
            "for commits of your own code or of a fork: --of code",
        )
    )


def _with_toolchain(experiment: Experiment, before: str, name: str, find: Finder) -> Planned:
    def at(spec: SetSpec) -> SetSpec:
        return replace(spec, toolchain=name) if spec.toolchain == before else spec

    made = replace(
        experiment,
        name=f"{experiment.name} with {name}",
        controls=tuple(map(at, experiment.controls)),
        tests=tuple(map(at, experiment.tests)),
    )
    return Planned(plan_experiment(made, on_gpu=bool(gpu_ids()), find=find))
