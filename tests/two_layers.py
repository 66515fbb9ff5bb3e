"""Shipped train configs with half of their layers and less text, for tests of many short runs.

Most of what such a run costs grows with its layers, which are all alike; what its start costs, with
the text that is made for it.
"""

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "train_configs"
CUT_DOWN = (("n_layers = 4", "n_layers = 2"), ("tokens = 400_000", "tokens = 60_000"))


def with_two_layers(folder: Path, *names: str) -> Path:
    """Write ``train_configs/NAME.toml`` beside an experiment, which looks there first.

    Returns the folder, in which the experiment has to be.
    """
    place = folder / "train_configs"
    place.mkdir(parents=True, exist_ok=True)
    for name in names or ("llama3_debug",):
        text = (SHIPPED / f"{name}.toml").read_text()
        for whole, part in CUT_DOWN:
            assert text.count(f"\n{whole}\n") == 1, f"{name} has not {whole} any more"
            text = text.replace(f"\n{whole}\n", f"\n{part}\n")
        (place / f"{name}.toml").write_text(text)
    return folder
