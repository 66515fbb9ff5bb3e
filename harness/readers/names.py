"""What other tools call our signals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from harness.errors import EvidenceError

STEP_NAMES = ("step", "global_step", "train/global_step", "_step", "iteration", "iter", "steps")

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
            "learning_rate",
            "learning-rate",
        ),
        "loss_recomputed": ("loss_recomputed",),
        "grad_norm_recomputed": ("grad_norm_recomputed",),
        "tokens": ("tokens",),
    }
)
"""Signal to the names that it is known by, the likeliest first. No other name is guessed at."""


def find_signals(where: str, names: Iterable[str]) -> dict[str, str]:
    """Signal to the name that it has here.

    Raises EvidenceError when there is no loss; ``where`` begins its message.
    """
    there = list(names)
    found = {
        signal: next(name for name in known if name in there)
        for signal, known in NAMES.items()
        if any(name in there for name in known)
    }
    if "loss" not in found:
        raise EvidenceError(
            f"{where}: no loss among {', '.join(map(repr, there[:20])) or 'nothing'}; "
            f"known names of it are {', '.join(NAMES['loss'])}"
        )
    return found


def find_step(where: str, names: Iterable[str]) -> str:
    """The name that the step number has here. Raises EvidenceError when there is none."""
    there = list(names)
    for name in STEP_NAMES:
        if name in there:
            return name
    raise EvidenceError(
        f"{where}: no step among {', '.join(map(repr, there[:20])) or 'nothing'}; "
        f"known names of it are {', '.join(STEP_NAMES)}"
    )
