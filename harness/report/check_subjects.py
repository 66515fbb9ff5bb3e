"""What checks are about: a few subjects for many checks, to list those without evidence."""

from __future__ import annotations

from collections.abc import Iterable

_SUBJECTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("the loss of single steps", ("loss-first-step", "loss-envelope")),
    ("the steps of the curves", ("same-steps", "same-numbering", "same-means")),
    ("lengths above the RCP's", ("rcp-no-later",)),
    ("a loss that is too low", ("loss-equivalent",)),
    ("repeats of the control", ("repeats-sound",)),
    ("samples", ("same-data", "ranks-see-same-batch")),
    ("token counts", ("same-tokens", "same-token-budget")),
    ("learning rates", ("same-lr",)),
    (
        "configuration",
        ("config-", "control-in-force", "named-in-force", "nothing-unnamed", "probed-alike"),
    ),
    ("recomputed losses", ("loss-recomputed-", "reported-loss-")),
    ("recomputed grad norms", ("grad-norm-recomputed-", "reported-grad-norm-")),
    ("grad norm", ("grad-norm-",)),
    ("errors against float32", ("reference-sound", "gradient-errors", "gradient-scale", "frozen-")),
    ("gradients", ("gradients-",)),
    (
        "initial weights",
        ("samples-whole", "same-parameters", "starts-as-", "same-initial-", "renamed-"),
    ),
    ("updates", ("updates-",)),
    ("clipping", ("clipping-",)),
    ("optimizer state", ("optimizer-",)),
    ("buffers", ("buffers-",)),
    ("replicas", ("replicas-",)),
    ("random numbers", ("random-numbers-", "ranks-draw-")),
    ("dropout masks", ("dropout-masks-",)),
    (
        "resumes",
        (
            "passes-",
            "state-restored",
            "data-resumed",
            "replays-",
            "segments-",
            "faults-",
            "recovers-",
            "torn-",
        ),
    ),
)
"""Subject, and how the names of its checks begin; the first that fits counts."""


def subjects(checks: Iterable[str]) -> tuple[str, ...]:
    """What checks are about, each subject once, in a fixed order; names without a subject last."""
    names = tuple(checks)
    of_name = {name: _subject(name) for name in names}
    known = [subject for subject, _ in _SUBJECTS if subject in of_name.values()]
    return (*known, *(name for name in names if of_name[name] == name))


def _subject(name: str) -> str:
    return next((subject for subject, begins in _SUBJECTS if name.startswith(begins)), name)
