"""What verdicts on a user's programs do not cover, because the programs did not show it; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from converge_harness.judge import RunComparison, probing
from converge_harness.model import JUDGED_SIGNALS, Evidence, Job, Verdict
from converge_harness.wording import counted


def program_notes(
    verdicts: Sequence[Verdict],
    evidences: Mapping[str, Evidence],
    jobs: Mapping[str, Job],
    comparisons: Mapping[str, RunComparison],
) -> Iterator[str]:
    """Sentences on what was not compared, because the programs did not show it.

    ``evidences`` and ``jobs`` are by name of the run, ``comparisons`` by that of the test set.
    """
    names = dict.fromkeys(name for each in verdicts for name in (each.control, each.name))
    known = {name: evidences[name] for name in names if name in evidences}
    curves = [name for name in known if name in jobs and not jobs[name].spec.trainer.can.probed]
    if curves:
        compared = [
            comparisons[each.name]
            for each in verdicts
            if each.name in comparisons and (each.control in curves or each.name in curves)
        ]
        yield _of_curves(len(curves), compared)
    probed = {
        name: evidence
        for name, evidence in known.items()
        if name not in curves and probing(evidence).wrapping
    }
    silent = [name for name, each in probed.items() if not probing(each).recomputes_loss]
    if silent:
        yield (
            f"The probe got no logits in {', '.join(silent)}: their loss is what the program "
            "reports, and was not recomputed (probe.logits)."
        )
    late = [name for name, each in probed.items() if probing(each).late]
    if late:
        yield (
            f"The gradients of {', '.join(late)} were taken {probing(probed[late[0]]).late}, "
            "where they may have been clipped: a wrong scale may not show (probe.gradients)."
        )


def _of_curves(runs: int, compared: Sequence[RunComparison]) -> str:
    """The note on ``runs`` curves, and on which of their signals were compared."""
    seen = [
        name for name in JUDGED_SIGNALS if any(name in each.shared_signals for each in compared)
    ]
    if not seen:
        return (
            "Curves only: the program is not probed, and no test set has a signal in common with "
            "its control: nothing was compared, and the causes say why."
        )
    signals = " and ".join(name.replace("_", " ") for name in seen)
    rarest = max(each.test.logged_every for each in compared)
    between = f" They have one step in {rarest}: nobody saw the others." if rarest > 1 else ""
    if rarest > 1 and all(each.test.mean_over in (0, rarest) for each in compared):
        between = (
            f" They have one step in {rarest}, and each loss is the mean of the steps since the "
            f"one before: a difference at a single step is divided by {rarest}."
        )
    return (
        f"Curves only: the program is not probed, so only the {signals} of {counted(runs, 'run')} "
        f"{'were' if len(seen) > 1 else 'was'} compared: at the first step, at every step, and in "
        "the mean of the second half. Gradients, weights, optimizer state, replicas, samples and "
        "what was in force were not: that both trained on the same data is assumed (trainer.probe)."
        f"{between}"
    )
