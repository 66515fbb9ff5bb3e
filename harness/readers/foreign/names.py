"""What other tools call our signals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from converge_harness.errors import MAX_LISTED, EvidenceError, suggest

STEP = "step"
"""What a column mapping calls the step number."""
STEP_NAMES = (
    STEP,
    "Step",
    "global_step",
    "train/global_step",
    "_step",
    "iteration",
    "iter",
    "steps",
)

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # torchtitan's TensorBoard tags, then Hugging Face, Composer, Megatron-LM.
        "loss": (
            "loss",
            "loss_metrics/global_avg_loss",
            "train/loss",
            "train_loss",
            "loss/train/total",
            "lm loss",
            "lm-loss-training/lm loss",
        ),
        "grad_norm": (
            "grad_norm",
            "train/grad_norm",
            "grad-norm",
            "grad-norm/grad-norm",
            "grad norm",
            "gradient_norm",
        ),
        "lr": (
            "lr",
            "lr/AdamW",
            "lr/Adam",
            "train/learning_rate",
            "train/lr",
            "optim/learning_rate",
            "lr/group0",
            "learning_rate",
            "learning-rate",
        ),
        "loss_recomputed": ("loss_recomputed",),
        "grad_norm_recomputed": ("grad_norm_recomputed",),
        "tokens": ("tokens",),
    }
)
"""Signal to the names that it is known by, the likeliest first. No other name is guessed at."""

Columns = Mapping[str, str]
"""Signals, and ``step``, to the names that the user says they have in a file."""


def check_columns(columns: Columns) -> None:
    """Raise EvidenceError for a mapping of what is no signal, and of two to one name."""
    for signal in columns:
        if signal not in NAMES and signal != STEP:
            valid = (STEP, *NAMES)
            raise EvidenceError(
                f"column {signal}={columns[signal]}: {signal!r} is no signal; "
                f"{suggest(signal, valid)}"
            )
    first: dict[str, str] = {}
    for signal, name in columns.items():
        if first.setdefault(name, signal) != signal:
            raise EvidenceError(
                f"column {signal}={name}: {first[name]} is mapped to {name!r}, too; a column is "
                "one thing, and nothing would be compared by taking it twice"
            )


def candidates(columns: Columns) -> frozenset[str]:
    """All names in a file that may matter."""
    known = [name for names in NAMES.values() for name in names]
    return frozenset({*STEP_NAMES, *known, *columns.values()})


def find_signals(where: str, names: Iterable[str], columns: Columns) -> dict[str, str]:
    """Signal to the name that it has here: as the user maps it, else a known one.

    A name that the user maps is not taken for another signal. Raises EvidenceError when there is no
    loss or a mapped name is not here; ``where`` begins its message.
    """
    there = dict.fromkeys(names)
    taken = set(columns.values())
    found: dict[str, str] = {}
    for signal, known in NAMES.items():
        if signal in columns:
            found[signal] = _mapped(where, there, signal, columns[signal])
        elif name := next((name for name in known if name in there and name not in taken), None):
            found[signal] = name
    if "loss" not in found:
        raise EvidenceError(
            f"{where}: no loss among {listing(there)}; known names of it are "
            f"{', '.join(NAMES['loss'])}; or map it: --columns loss=NAME "
            "(trainer.columns in an experiment file)"
        )
    return found


def find_step(where: str, names: Iterable[str], columns: Columns) -> str:
    """The name that the step number has here. Raises EvidenceError when there is none.

    One that the user maps to a signal is none: a loss that counts steps agrees with any other.
    """
    there = dict.fromkeys(names)
    if STEP in columns:
        return _mapped(where, there, STEP, columns[STEP])
    taken = set(columns.values())
    for name in STEP_NAMES:
        if name in there and name not in taken:
            return name
    raise EvidenceError(
        f"{where}: no step among {listing(there)}; known names of it are "
        f"{', '.join(STEP_NAMES)}; or map it: --columns step=NAME "
        "(trainer.columns in an experiment file)"
    )


def listing(names: Iterable[str]) -> str:
    """Names for a message, the first 20 of them."""
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return (", ".join(listed[:MAX_LISTED]) or "nothing") + more


def _mapped(where: str, there: Iterable[str], signal: str, name: str) -> str:
    if name not in there:
        raise EvidenceError(f"{where}: no {name!r} to take as {signal}; there is {listing(there)}")
    return name
