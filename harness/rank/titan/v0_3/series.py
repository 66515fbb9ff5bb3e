"""The series of torchtitan that this dialect speaks, and the names that differ between them.

0.3 is the release; main is the branch on which the next one grows. What both have (``train_step``,
``metrics_processor.log``, ``clip_grad_norm_``, a loss's ``fn``, ``--module`` and its config
function) the dialect uses as it is. What main has renamed since is here: its dataloaders (pull
request 4088), sizes in tokens instead of samples, with no batch dimension (4121), the stop of a
step that is not finite (4226), and the way that loops over microbatches are called. A newer main
with other names gets a row of its own, here and in ``harness/trainers/torchtitan/dialect.py``.

Nothing of torchtitan's is imported here but the class whose fields tell the series.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torchtitan
from torchtitan.config.configs import TrainingConfig


@dataclass(frozen=True, slots=True)
class ReleaseSeries:
    """What a series of torchtitan calls its parts."""

    name: str
    mark: str
    """A field of its ``TrainingConfig`` that the other series lack."""
    loaders: str
    """The module that has ``BaseDataLoader``. The installed series is the one whose is there."""
    grain: bool
    """Whether its dataloaders are Grain's."""
    loader_length: str
    """Argument of a dataloader: tokens of a sequence."""
    loader_size: str
    """Argument of a dataloader: how much it gives at once, in samples, or in tokens if folded."""
    folded: bool
    """Whether a microbatch is one run of tokens, of shape (tokens,), without a batch dimension."""
    length: str
    """Key of ``training``: tokens of a sequence."""
    pipeline_microbatches: str
    """Attribute of the trainer: microbatches of one call of a pipeline's schedule."""
    cp_backends: tuple[str, ...]
    """SPMD backends that know context parallelism."""
    not_finite: re.Pattern[str]
    """The message with which a step ends whose loss is not finite; its group is the loss."""


_WITHOUT_A_NUMBER = re.compile(r"Loss or gradient norm is not finite()")
KNOWN = (
    ReleaseSeries(
        name="0.3",
        mark="local_batch_size",
        loaders="torchtitan.components.dataloader",
        grain=False,
        loader_length="seq_len",
        loader_size="local_batch_size",
        folded=False,
        length="seq_len",
        pipeline_microbatches="num_pipeline_parallel_microbatches",
        cp_backends=("spmd_types", "partial_dtensor", "full_dtensor"),
        not_finite=re.compile(r"Loss is not finite \(global_avg_loss=(\S+)\)"),
    ),
    # Two days of August 2026, between pull requests 4088 and 4121: one may have to search them.
    ReleaseSeries(
        name="main with sizes in samples",
        mark="local_batch_size",
        loaders="torchtitan.components.data.loader",
        grain=True,
        loader_length="seq_len",
        loader_size="local_batch_size",
        folded=False,
        length="seq_len",
        pipeline_microbatches="num_pipeline_parallel_microbatches",
        cp_backends=("spmd_types",),
        not_finite=_WITHOUT_A_NUMBER,
    ),
    # As of b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, of 21 August 2026.
    ReleaseSeries(
        name="main",
        mark="num_tokens_per_microbatch_per_dp_rank",
        loaders="torchtitan.components.data.loader",
        grain=True,
        loader_length="max_context_length",
        loader_size="num_tokens_per_batch",
        folded=True,
        length="max_context_length",
        pipeline_microbatches="num_pp_microbatches",
        cp_backends=("spmd_types",),
        not_finite=_WITHOUT_A_NUMBER,
    ),
)


def series_of(training_keys: set[str], has_module: Callable[[str], bool]) -> ReleaseSeries:
    """The series whose table ``training`` has these keys, and that has its module of loaders.

    Raises ImportError for a commit that is of no known series.
    """
    for series in KNOWN:
        if series.mark in training_keys and has_module(series.loaders):
            return series
    named: dict[str, str] = {}
    for series in KNOWN:
        named.setdefault(series.mark, series.name)
    marks = " nor ".join(f"training.{mark} (as {name} has)" for mark, name in named.items())
    raise ImportError(
        f"torchtitan {torchtitan.__version__} has neither {marks}: converge's rank code does not "
        "know what its commit calls them (harness/rank/titan/v0_3/series.py)"
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


_TRAINING = {field.name for field in fields(TrainingConfig)}
SERIES = series_of(_TRAINING, _is_there)
"""The installed one's."""
CUDA_GRAPHS = "disable_cuda_graphs" in _TRAINING
"""Whether the trainer knows CUDA graphs, as it does since pull request 3559 (13 August 2026)."""
BaseDataLoader: Any = importlib.import_module(SERIES.loaders).BaseDataLoader


@dataclass(frozen=True, slots=True)
class LoaderSizes:
    """What a dataloader is asked for, whatever its trainer counts in."""

    seq_len: int
    batch_size: int
    """Samples that it gives at once: a local batch, or a pipeline microbatch."""


def loader_sizes(arguments: dict[str, Any]) -> LoaderSizes:
    """Of the arguments that a trainer builds its dataloader with.

    Raises ValueError for tokens that are no whole number of sequences.
    """
    length, size = arguments[SERIES.loader_length], arguments[SERIES.loader_size]
    if not SERIES.folded:
        return LoaderSizes(length, size)
    batch_size, rest = divmod(size, length)
    if rest:
        raise ValueError(f"{size} tokens are no whole number of sequences of {length}")
    return LoaderSizes(length, batch_size)


def as_batch(*samples: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of shape (batch, sequence), as the trainer takes them.

    Folded, sequences follow each other; that attention stays within each shows in their positions,
    which begin again at 0.
    """
    return tuple(each.flatten() for each in samples) if SERIES.folded else samples


def as_samples(batch: torch.Tensor, training: Any) -> torch.Tensor:
    """A batch that the trainer took from its loader, of shape (batch, sequence)."""
    return batch.view(-1, getattr(training, SERIES.length)) if SERIES.folded else batch
