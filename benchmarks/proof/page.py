"""``benchmark.md``: the result for people: one sentence and a picture, then all numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from converge_harness.report.renderers.palette import SYMBOLS
from converge_harness.report.text import ABSENT, digits
from converge_harness.wording import plural
from proof.goals import can_show_early, goals, share
from proof.grading import Answer, Graded
from proof.results import (
    EARLY,
    OURS,
    WORST,
    Ladder,
    Proof,
    ProvenBug,
    ProvenCorrect,
    Result,
    RuleScore,
)
from proof.rules import ONE_PERCENT

_SENTENCE = 180
"""Most characters of a cause's sentence in the table."""
MEANING = {
    "C1": "gradient scale wrong",
    "C2": "gradient direction wrong",
    "C3": "replicas drift apart",
    "C4": "forward or objective wrong",
    "C5": "only the metric is wrong",
    "C6": "state, data, resume",
    "C7": "precision, near the noise floor",
}


def page(
    results: Sequence[Result], *, part: bool, generated: str, command: str = "nox -s prove"
) -> str:
    """The Markdown page; its picture is ``benchmark.png`` next to it.

    ``command`` wrote it. First a table of the goals of all regimes, then each regime with all of
    its bugs.
    """
    several = len(results) > 1
    sections = [
        ["# Bugs caught and named", *_headlines(results, part=part), _picture(results)],
        ["## Goals", *(_goals(result, several=several, part=part) for result in results)],
        ["## The same runs, judged by the rules in use elsewhere", _rules(results)],
        *(section for result in results for section in _of(result, several=several)),
        ["## How to reproduce", _reproduce(results, generated, command)],
    ]
    return "\n\n".join(part for section in sections for part in section if part) + "\n"


def _of(result: Result, *, several: bool) -> list[list[str]]:
    """The sections of one regime, with a heading if there are several regimes."""
    proof, held_out = result.proof, result.held_out
    sub = "###" if several else "##"
    return [
        [f"## {result.regime.title}"] if several else [],
        [f"{sub} By class", _classes(proof), _early_note(proof)],
        [f"{sub} Misses", _misses(proof)],
        [f"{sub} Every bug", _bugs(proof.bugs)],
        [f"{sub} Detection limits", _limits(proof.ladders)],
        [f"{sub} Correct set-ups", _correct(proof)],
        [f"{sub} Not run in this regime", _left_out(result)] if result.left_out else [],
        [f"{sub} Held out", _held_out(held_out)] if held_out else [],
    ]


def _headlines(results: Sequence[Result], *, part: bool) -> list[str]:
    if len(results) == 1:
        return [headline(results[0].proof, part=part)]
    return [
        f"{result.regime.title}: {headline(result.proof, part=part, follows=True)}"
        for result in results
    ]


def headline(proof: Proof, *, part: bool, follows: bool = False) -> str:
    """The result in a sentence; ``follows``: as the continuation of a line."""
    caught = sum(each.graded.answer.caught for each in proof.bugs)
    right = sum(each.graded.cause_right is True for each in proof.bugs)
    wrong = sum(each.graded.cause_right is False for each in proof.bugs)
    alarms = sum(each.false_alarm for each in proof.correct)
    theirs = max(proof.scores[1:], key=lambda score: _informedness(score, proof))
    begin = "Of the part of the benchmark that was run, " if part else "Of the benchmark, "
    begin = "" if follows else begin
    return (
        f"**{begin}converge catches {caught} of {len(proof.bugs)} silent bugs, names the cause "
        f"of {right} correctly and of {wrong} wrongly, and raises {_alarms(alarms)} on "
        f"{len(proof.correct)} correct set-ups; the best rule in use elsewhere "
        f"({theirs.name}) catches {theirs.bugs_caught} with {_alarms(theirs.false_alarms)}.**"
    )


def _informedness(score: RuleScore, proof: Proof) -> float:
    """Share of bugs caught minus share of false alarms (Youden 1950); 0: as good as chance."""
    caught = score.bugs_caught / max(len(proof.bugs), 1)
    return caught - score.false_alarms / max(len(proof.correct), 1)


def _alarms(count: int) -> str:
    return f"{count or 'no'} {plural(count, 'false alarm')}"


def _picture(results: Sequence[Result]) -> str:
    alt = f"bugs caught and false alarms by {OURS} and by the rules in use elsewhere"
    return f"![{alt}](benchmark.png)" if any(result.proof.bugs for result in results) else ""


def _goals(result: Result, *, several: bool, part: bool) -> str:
    return _table(
        (f"goal in {result.regime.title}" if several else "goal", "measured", ""),
        (
            (each.text, each.measured, "met" if each.met else "**missed**")
            for each in goals(result.proof, part=part, regime=result.regime)
        ),
    )


def _classes(proof: Proof) -> str:
    rows = [_counts(f"{kind}: {MEANING.get(kind, '')}", proof.of(kind)) for kind in proof.classes]
    header = ("class", "bugs", "caught", f"by step {EARLY}", "cause right", "cause wrong")
    return _table(header, [*rows, _counts("all", proof.bugs)])


def _counts(name: str, bugs: Sequence[ProvenBug]) -> tuple[str, ...]:
    graded = [each.graded for each in bugs]
    numbers = (
        len(graded),
        sum(each.answer.caught for each in graded),
        sum(each.caught_by(EARLY) for each in graded),
        sum(each.cause_right is True for each in graded),
        sum(each.cause_right is False for each in graded),
    )
    return (name, *map(str, numbers))


def _early_note(proof: Proof) -> str:
    early = can_show_early(proof)
    caught = sum(each.graded.caught_by(EARLY) for each in early)
    every = sum(each.graded.caught_by(EARLY) for each in proof.bugs)
    late = [
        each.graded for each in proof.bugs if each not in early and each.graded.delay is not None
    ]
    delays = ", ".join(f"{each.bug.id} {each.delay}" for each in late)
    more = f" Steps from first effect to first sign, of the others: {delays}." if delays else ""
    return (
        f"Caught by step {EARLY}: {share(every, len(proof.bugs))} of all bugs, and "
        f"{share(caught, len(early))} of those that have any effect by then.{more}"
    )


def _bugs(bugs: Iterable[ProvenBug]) -> str:
    header = (
        *("bug", "class", "hides under", "verdict", "tier", "first step", "delay", "cause", ""),
        *("wrong first", "loss off by", "passes a gate of 1%"),
    )
    return _table(header, map(_bug, bugs))


def _bug(proven: ProvenBug) -> tuple[str, ...]:
    graded = proven.graded
    bug, answer = graded.bug, graded.answer
    right = {True: "right", False: "**wrong**", None: "not named" if answer.caught else ""}
    place = f" Place: {bug.place}." if bug.place else ""
    return (
        f"`{bug.id}`: {bug.summary}{place} ({bug.reference})",
        bug.kind,
        f"{bug.technique}; {bug.needs}" if bug.needs else bug.technique,
        f"{SYMBOLS[answer.judgement]} {answer.judgement.value}",
        answer.tier.value if answer.tier else ABSENT,
        _or_absent(answer.first_step),
        _or_absent(graded.delay),
        _named(answer),
        right[graded.cause_right],
        f"`{answer.module}`" if answer.module else "",
        digits(proven.run.loss_off),
        "no" if ONE_PERCENT in proven.run.flagged_by else "yes",
    )


def _named(answer: Answer) -> str:
    """Class and the beginning of the sentence; ``benchmark.json`` has all of it."""
    kind = f"**{answer.cause_class.value}**: " if answer.cause_class else ""
    return kind + textwrap.shorten(answer.cause, _SENTENCE, placeholder=" …")


def _rules(results: Sequence[Result]) -> str:
    """A row per rule, with bugs caught and false alarms in each regime."""
    scores = [result.proof.scores for result in results]
    rows = []
    for same_rule in zip(*scores, strict=True):
        first = same_rule[0]
        row = [f"**{first.name}**" if first.name == OURS else first.name, first.source]
        for score, result in zip(same_rule, results, strict=True):
            row.append(share(score.bugs_caught, len(result.proof.bugs)))
            row.append(share(score.false_alarms, len(result.proof.correct)))
        rows.append(row)
    header = ["rule", "from"]
    for result in results:
        before = f"{result.regime.title}: " if len(results) > 1 else ""
        header += [f"{before}bugs caught", f"{before}false alarms"]
    how = (
        "Each rule was reimplemented from its published code (`benchmarks/proof/rules.py` says how "
        "it treats NaN and missing steps) and judges the losses, or grad norms, that the same "
        "runs reported. Correct set-ups are other parallelisms, techniques and seeds "
        "against their control. The rules are used for that, though most were made to compare "
        "a configuration with itself."
    )
    return _table(header, rows) + f"\n\n{how}"


def _limits(ladders: Sequence[Ladder]) -> str:
    if not ladders:
        return "No detection-limit ladder was run."
    rows = []
    for ladder in ladders:
        sizes = [rung.graded.bug.magnitude for rung in ladder.rungs]
        missed = [rung.graded for rung in ladder.rungs if not rung.graded.answer.caught]
        rows.append(
            (
                f"`{ladder.name}`: {ladder.rungs[0].graded.bug.summary}",
                ", ".join(map(digits, sizes)),
                ", ".join(map(_rung, missed)) or "none",
                digits(ladder.limit),
            )
        )
    return _table(("bug", "magnitudes tried", "not caught", "detection limit"), rows) + (
        "\n\nThe detection limit is the smallest magnitude that is caught, as are all larger ones. "
        "In brackets, for a rung that is not caught: its gradients' error against float32, as "
        "a multiple of the matched control's (1: rounding alone)."
    )


def _rung(graded: Graded) -> str:
    size = digits(graded.bug.magnitude)
    effect = graded.answer.effect
    return size if effect is None else f"{size} ({effect.error:.2f} x)"


def _correct(proof: Proof) -> str:
    if not proof.correct:
        return "No correct set-up was run."
    alarms: list[ProvenCorrect] = [
        each for each in proof.correct if each.answer.judgement.value != "PASS"
    ]
    said = [
        f"- `{each.answer.name}` ({each.run.what}): {each.answer.judgement.value}, "
        f"{each.answer.cause}"
        for each in alarms
    ]
    rows = (
        (
            f"`{each.answer.name}`",
            each.run.what,
            f"{SYMBOLS[each.answer.judgement]} {each.answer.judgement.value}",
            digits(each.run.loss_off),
            f"{each.run.rank_seconds:.0f}",
        )
        for each in proof.correct
    )
    table = _table(("configuration", "what", "verdict", "loss off by", "rank-seconds"), rows)
    first = f"{len(proof.correct) - len(alarms)} of {len(proof.correct)} pass."
    return "\n".join([first, *(["", *said] if said else []), "", table])


def _misses(proof: Proof) -> str:
    """The five worst in detail, then the others in one line each."""
    misses = proof.misses
    if not misses:
        return "Every bug was caught and its cause named correctly."
    worst = [f"{at}. {miss(each)}" for at, each in enumerate(misses[:WORST], 1)]
    rest = [f"- {miss(each, short=True)}" for each in misses[WORST:]]
    first = f"The worst {len(worst)} of {len(misses)}, one by one:" if rest else "One by one:"
    return "\n".join([first, "", *worst, *(["", "The others:", "", *rest] if rest else [])])


def miss(proven: ProvenBug, *, short: bool = False) -> str:
    """What was missed, how, and how large its effect is."""
    graded, answer = proven.graded, proven.graded.answer
    bug = graded.bug
    if not answer.caught:
        kind = "below rounding, not caught" if graded.below_rounding else "not caught"
        what = f"{kind} ({answer.judgement.value}{_because(answer.cause)})"
    else:
        named = answer.cause_class.value if answer.cause_class else "nothing"
        expected = " or ".join(cause.value for cause in bug.causes)
        what = f"caught, but named {named} where {expected} is right"
    effect = f" Effect: {answer.effect}." if answer.effect and not answer.caught else ""
    if short:
        return f"`{bug.id}` {what}.{effect} Expected: {bug.signature}."
    said = f" It said: {answer.cause}." if answer.caught and answer.cause else ""
    return (
        f"`{bug.id}` ({bug.kind}, {proven.run.what}) {what}. {bug.summary}{effect}{said} "
        f"Expected: {bug.signature}."
    )


def _left_out(result: Result) -> str:
    """Sets that were not run, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for each in result.left_out:
        reasons.setdefault(each.why, []).append(f"`{each.name}`")
    return "\n".join(f"- {why}: {', '.join(names)}" for why, names in reasons.items())


def _because(cause: str) -> str:
    return f": {cause}" if cause else ""


def _held_out(proof: Proof) -> str:
    words = "Bugs that converge was not developed with; they do not count towards goals."
    rows = [_counts(kind, proof.of(kind)) for kind in proof.classes]
    header = ("class", "bugs", "caught", f"by step {EARLY}", "cause right", "cause wrong")
    return "\n\n".join(
        [words, _table(header, [*rows, _counts("all", proof.bugs)]), _bugs(proof.bugs)]
    )


def _reproduce(results: Sequence[Result], generated: str, command: str) -> str:
    found = {
        (name, version) for result in results for name, version in result.proof.versions.items()
    }
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found))
    rows = [
        (
            result.regime.title,
            str(result.proof.cost.runs),
            f"{result.proof.cost.rank_seconds:,.0f}",
            f"{result.proof.cost.shared_rank_seconds:,.0f}",
            f"{result.seconds / 60:.1f}",
        )
        for result in results
    ]
    header = (
        *("regime", "runs", "rank-seconds"),
        *("of them controls and repeats", "minutes of this call"),
    )
    return (
        f"```console\n$ {command}\n```\n\n{_table(header, rows)}\n\n"
        f"Written {generated}. Bugs share controls and their repeats; references in float32 "
        "count in the minutes only. A repeated call runs only what is missing. Versions: "
        f"{versions}. What a class is, how it is graded, and how to add a bug: `docs/bugs.md`."
    )


def _or_absent(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in cells)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
