"""What a user may have changed when a run is resumed, for experiments/elastic_streaming.toml."""

from __future__ import annotations

from typing import Any


def another_shuffle(trainer: Any) -> None:
    """``shuffle_algo`` is another one from the first resume on."""
    _change_at_resume(trainer, shuffle_algo="py1s")


def another_seed(trainer: Any) -> None:
    """``shuffle_seed`` is another one from the first resume on."""
    _change_at_resume(trainer, shuffle_seed=1)


def _change_at_resume(trainer: Any, **changes: Any) -> None:
    """As if the dataset had been built with other arguments before its state was loaded."""
    loader = trainer.dataloader
    load = loader.load_state_dict

    def changed(state: dict[str, Any]) -> None:
        for name, value in changes.items():
            setattr(loader.dataset, name, value)
        load(state)

    loader.load_state_dict = changed
