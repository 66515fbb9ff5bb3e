"""The tables of docs/operating-characteristics.md, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from characteristics.deviations import Deviation
from characteristics.long_runs import CORRELATIONS, LongRuns
from characteristics.rates import FalseAlarms, Power, Rate
from characteristics.real_runs import RealRuns
from characteristics.settled_early import BEYOND, LATE, SPREADS, SettledEarly, SettledReally
from characteristics.several_seeds import EFFECTS, SeveralSeeds, not_kept
from characteristics.short_runs import LEVELS, ShortRuns


def false_alarm_table(found: Sequence[FalseAlarms]) -> str:
    rows = [
        (
            one.situation.law.name,
            one.situation.steps,
            f"x{one.situation.factor:g}",
            f"{one.experiments.hits} of {one.experiments.trials}",
            one.experiments,
            f"{one.tests.value:.3%}",
            f"{one.inconclusive.value:.1%}",
            f"{one.invalid.value:.2%}",
            _counted(one.checks) or "none",
        )
        for one in found
    ]
    return _table(
        (
            "law",
            "steps",
            "test sets deviate",
            "experiments with a FAIL",
            "rate (95% interval)",
            "per test set",
            "INCONCLUSIVE",
            "INVALID",
            "checks that failed",
        ),
        rows,
    )


def power_table(found: Sequence[Power]) -> str:
    """Rows by law and bias; columns by length: power, tier, median delay in steps."""
    lengths = sorted({one.steps for one in found})
    cells = {(one.law.name, one.bias, one.steps): one for one in found}
    rows = [
        (
            law,
            f"{bias.size:.1%}",
            "middle" if bias.from_middle else "step 1",
            *(_power(cells[law, bias, steps]) for steps in lengths),
        )
        for law, bias in dict.fromkeys((one.law.name, one.bias) for one in found)
    ]
    return _table(("law", "bias", "from", *(f"{steps:,} steps" for steps in lengths)), rows)


def long_run_table(found: Sequence[LongRuns]) -> str:
    """Rows by window and quantity; columns by autocorrelation."""
    quantities = (
        ("interval holds the mean (90%)", "covered"),
        ("at the margin: equivalent (5%)", "wrongly_equivalent"),
        ("at the margin: different (5%)", "wrongly_different"),
        ("drift to the margin: equivalent (5%)", "drift_equivalent"),
        ("no difference: equivalent", "equivalent"),
        ("no difference, noise 3 margins: different", "noisy_different"),
        ("settled by the further steps (80%)", "settled"),
    )
    cells = {(one.window, one.correlation): one for one in found}
    rows = [
        (
            f"{window:,}",
            words,
            *(_percent(getattr(cells[window, rho], name)) for rho in CORRELATIONS),
        )
        for words, name in quantities
        for window in sorted({one.window for one in found})
    ]
    return _table(("window", "what", *(f"rho {rho:g}" for rho in CORRELATIONS)), rows)


def settled_early_table(found: Sequence[SettledEarly]) -> str:
    """Rows by size of the noise and quantity; columns by autocorrelation."""
    quantities = (
        ("at the margin: equivalent (5%)", lambda one: _percent(one.wrongly_equivalent)),
        ("at the margin: different (5%)", lambda one: _percent(one.wrongly_different)),
        ("the same if looks could answer so", lambda one: _percent(one.different_early)),
        ("no difference: equivalent", lambda one: _percent(one.equivalent)),
        ("the same without looks", lambda one: _percent(one.at_the_end)),
        ("no difference: share trained", lambda one: f"{one.trained:.0%}"),
        (f"{BEYOND:g} margins: different", lambda one: _percent(one.different)),
        ("growing to 2 margins: equivalent", lambda one: _percent(one.growing_missed)),
        (
            f"2 margins from {LATE:.0%} of the run on: equivalent",
            lambda one: _percent(one.late_missed),
        ),
    )
    cells = {(one.spread, one.correlation): one for one in found}
    rows = [
        (f"{spread:g} margins", words, *(shown(cells[spread, rho]) for rho in CORRELATIONS))
        for spread in SPREADS
        for words, shown in quantities
    ]
    trials = found[0].equivalent.trials
    bounds = ", ".join(
        f"around {share:.0%}: {low:.1%} to {high:.1%}"
        for share in (0.01, 0.05, 0.12)
        for low, high in [Rate(round(share * trials), trials).interval]
    )
    return (
        _table(("noise of a step", "what", *(f"rho {rho:g}" for rho in CORRELATIONS)), rows)
        + f"\n\n{trials:,} runs in each cell, so the 95% interval is, {bounds}."
    )


def settled_really_table(found: SettledReally) -> str:
    """One row."""
    columns = (
        *("runs", "steps", "noise of a step", "rho", "mean difference", "equivalent"),
        *("before the end", "share trained", "at the margin: equivalent (5%)"),
        f"{BEYOND:g} margins: different",
    )
    row = (
        found.runs,
        f"{found.steps:,}",
        f"{found.spread:.1f} margins",
        f"{found.correlation:.2f}",
        f"{found.apart:.2f} margins",
        _hits(found.equivalent),
        _hits(found.early),
        f"{found.trained:.0%}",
        _hits(found.wrongly_equivalent),
        _hits(found.different),
    )
    return _table(columns, [row])


def _hits(rate: Rate) -> str:
    low, high = rate.interval
    return f"{rate.hits} of {rate.trials} ({low:.0%} to {high:.0%})"


def short_run_table(found: Sequence[ShortRuns]) -> str:
    """Rows by law, length and bias; columns by how often the check applies to a correct run."""
    rows = [
        (
            one.law.name,
            one.steps,
            f"{one.bias:.1%}" if one.bias else "none",
            *(f"{rate.value:.1%}" for rate in one.asked),
        )
        for one in found
    ]
    levels = ("any outside" if level == 1.0 else f"1 in {1 / level:,.0f}" for level in LEVELS)
    return _table(("law", "steps", "bias", *levels), rows)


def several_seeds_table(found: Sequence[SeveralSeeds]) -> str:
    """Rows by question and setting; columns by true difference: FAIL, PASS."""
    cells = {(one.setting, one.effect): one for one in found}
    settings = list(dict.fromkeys(one.setting for one in found))
    rows = []
    for question, name in (("same", "same"), ("no worse", "no_worse")):
        for setting in settings:
            if setting.paired and name == "no_worse":
                continue  # applies to groups, whatever their seeds
            wider = f", test x{setting.wider:g}" if setting.wider != 1 else ""
            pairs = [getattr(cells[setting, effect], name) for effect in EFFECTS]
            settled = cells[setting, 0.0].settled
            rows.append(
                (
                    question,
                    f"{setting.noise:.1%}, rho {setting.correlation:g}",
                    f"{setting.tests} pairs"
                    if setting.paired
                    else f"{setting.tests} and {setting.controls}{wider}",
                    *(f"{fail.value:.1%}, {good.value:.1%}" for fail, good in pairs),
                    f"{settled.value:.0%} of {settled.trials}"
                    if settled.trials and name == "same"
                    else "",
                )
            )
    head = ("asked", "noise of a step", "seeds (test and control)")
    effects = (f"difference {effect:g} margins" for effect in EFFECTS)
    broken = list(not_kept(found))
    verdict = (
        "No rate of a wrong answer is surely above 5%."
        if not broken
        else f"**A rate of wrong answers surely above 5%: {len(broken)} of {len(found)} settings.**"
    )
    trials = found[0].same[0].trials
    return (
        _table((*head, *effects, "settled by the further seeds (80%)"), rows)
        + f"\n\nCells: FAIL, PASS; the rest is INCONCLUSIVE. {trials} pairs of groups in each. "
        + verdict
    )


def real_run_table(found: RealRuns) -> str:
    return (
        _table(
            (
                "runs",
                "steps",
                "pairs",
                "alarms (95% interval)",
                "controls with one",
                "rho",
                "excess kurtosis",
                "checks that failed",
            ),
            [
                (
                    found.runs,
                    found.steps,
                    found.pairs.trials,
                    f"{found.pairs.hits}: {found.pairs}",
                    f"{found.controls.hits} of {found.controls.trials}",
                    f"{found.correlation:.2f}",
                    f"{found.kurtosis:.2f}",
                    _counted(found.checks.elements()) or "none",
                )
            ],
        )
        + f"\n\nINCONCLUSIVE or INVALID: {found.undecided.hits} of {found.undecided.trials} pairs."
    )


def deviation_table(found: Sequence[Deviation]) -> str:
    return _table(
        ("test set", "loss", "grad norm", "gradients"),
        [
            (one.name, *(f"{rms:.2f}, {most:.1f}" for rms, most in one_of))
            for one in found
            for one_of in [(one.loss, one.grad_norm, one.gradients)]
        ],
    )


def _power(one: Power) -> str:
    found = "" if one.tier is None else f" ({one.tier.value}, +{one.delay:g})"
    also = "" if one.doubted == one.detected else f"; {one.doubted.value:.0%} not PASS"
    return f"{one.detected.value:.0%}{found}{also}"


def _percent(rate: object) -> str:
    value, trials = getattr(rate, "value", 0.0), getattr(rate, "trials", 0)
    return f"{value:.1%}" if trials else ""


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common(3))


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
