"""The names of our signals in other tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from converge_harness.errors import MAX_LISTED, EvidenceError, suggest

STEP = "step"
"""The step number in a column mapping."""
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
            "learning rate",
            "learning-rate/learning-rate",
        ),
        "loss_recomputed": ("loss_recomputed",),
        "grad_norm_recomputed": ("grad_norm_recomputed",),
        "tokens": ("tokens",),
    }
)
"""By signal, its known names, the most likely first. Other names are never guessed."""

Columns = Mapping[str, str]
"""The user's names of signals, and of ``step``, in a file."""


class NoColumnError(EvidenceError):
    """The name that a signal is mapped to is not in a file."""

    def __init__(self, message: str, signal: str) -> None:
        """``signal``: the one that is mapped."""
        super().__init__(message)
        self.signal = signal


def check_columns(columns: Columns) -> None:
    """Raise EvidenceError for a mapping of an unknown signal, or of two signals to one name."""
    for signal in columns:
        if signal not in NAMES and signal != STEP:
            valid = (STEP, *NAMES)
            raise EvidenceError(
                f"column {signal}={columns[signal]}: {signal!r} is not a signal; "
                f"{suggest(signal, valid)}"
            )
    first: dict[str, str] = {}
    for signal, name in columns.items():
        if first.setdefault(name, signal) != signal:
            raise EvidenceError(
                f"column {signal}={name}: {first[name]} is mapped to {name!r}, too; a column "
                "can be only one signal, else it would be compared with itself"
            )


def candidates(columns: Columns) -> frozenset[str]:
    """All names in a file that may be a step or a signal."""
    known = [name for names in NAMES.values() for name in names]
    return frozenset({*STEP_NAMES, *known, *columns.values()})


def find_signals(where: str, names: Iterable[str], columns: Columns) -> dict[str, str]:
    """By signal, its name in the file: as the user maps it, else a known one.

    A name that the user maps is not used for another signal. Raises EvidenceError when there is no
    loss or a mapped name is missing; ``where`` begins its message.
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
    """The name of the step number in the file. Raises EvidenceError when there is none.

    A name that the user maps to a signal does not count: steps taken as a loss would agree with
    those of any other run.
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
    """Names for a message, at most 20 of them."""
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return (", ".join(listed[:MAX_LISTED]) or "nothing") + more


def _mapped(where: str, there: Iterable[str], signal: str, name: str) -> str:
    if name not in there:
        raise NoColumnError(
            f"{where}: has no {name!r} for {signal}; it has {listing(there)}", signal
        )
    return name


_GRADIENT_NORM = re.compile(r"g(rad(ient)?s?)?(l2|total|global)?norm|norm(of)?grad")
"""Of a name without its punctuation: ``gnorm``, ``gradNorm``, ``l2_norm/grad``."""
_LOSS = re.compile(r"\w*loss")
_NO_TRAINING_LOSS = frozenset(
    {"best", "dev", "eval", "evaluation", "test", "val", "valid", "validation"}
    | {"max", "min", "std", "scale", "scaler", "vs"}
)
"""Words beside ``loss`` in names of evaluations, of scales, and of statistics over ranks."""


def overlooked(names: Iterable[str], found: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """By signal, names that may mean it by their words, and that are not among those ``found``.

    Where a gradient norm is found, others (of layers, after clipping) are no news; but of two
    losses the user has to know which one is judged.
    """
    others = [name for name in names if name not in found.values()]
    kinds = {
        "loss": [name for name in others if _may_be_loss(name)],
        "grad_norm": [
            name for name in others if "grad_norm" not in found and _may_be_gradient_norm(name)
        ],
    }
    return {signal: tuple(each) for signal, each in kinds.items() if each}


def _may_be_loss(name: str) -> bool:
    words = _words(name)
    return any(map(_LOSS.fullmatch, words)) and _NO_TRAINING_LOSS.isdisjoint(words)


def _may_be_gradient_norm(name: str) -> bool:
    words = _words(name)
    starts = ("".join(words[at:]) for at in range(len(words)))
    return any(map(_GRADIENT_NORM.match, starts)) or words in (["norm"], ["total", "norm"])


def _words(name: str) -> list[str]:
    """``train/lm_loss`` and ``gradNorm`` as words in lower case."""
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
