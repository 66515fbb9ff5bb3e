"""Shipped train configs with half of their layers, for tests of many short runs.

Most of what such a run costs grows with its layers, which are all alike.
"""

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "train_configs"


def with_two_layers(folder: Path, *names: str) -> Path:
    """Write ``train_configs/NAME.toml`` beside an experiment, which looks there first.

    Returns the folder, in which the experiment has to be.
    """
    place = folder / "train_configs"
    place.mkdir(parents=True, exist_ok=True)
    for name in names or ("llama3_debug",):
        text = (SHIPPED / f"{name}.toml").read_text()
        assert text.count("\nn_layers = 4\n") == 1, f"{name} has not 4 layers any more"
        (place / f"{name}.toml").write_text(text.replace("\nn_layers = 4\n", "\nn_layers = 2\n"))
    return folder
