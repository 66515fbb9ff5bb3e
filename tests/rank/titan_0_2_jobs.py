"""Jobs of the torchtitan 0.2 dialect, and real torchrun calls of them, for the tests."""

import functools
import importlib.metadata
import importlib.util
import json
import tomllib
import warnings
from pathlib import Path

import pytest
from run_folders import RunFolders, Start
from warm_ranks import lasting_folder, torchrun

from converge_harness.corpus import prepare
from converge_harness.model import SyntheticData
from converge_harness.run_folder.job import read_job

ROOT = Path(__file__).parents[2]
TRAIN_CONFIG = ROOT / "train_configs" / "llama3_debug_titan02.toml"
LAYERS = 2
"""Half of the shipped ones: most of what a run costs grows with them, and they are all alike."""
DEGREES = {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "pp": 1, "ep": 1}


def require_titan_0_2():
    """Skip the module unless this Python has torchtitan 0.2."""
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    # The main branch calls itself 0.2.2, too, and has no torchtitan/train.py.
    if not version.startswith("0.2.") or not _has_train():
        pytest.skip(f"needs torchtitan 0.2, found {version}", allow_module_level=True)


def _has_train():
    found = importlib.util.find_spec("torchtitan")
    return Path(found.submodule_search_locations[0], "train.py").is_file()


def preload():
    """Import the dialect; what third parties warn of while they are imported is theirs."""
    from converge_harness.rank.start import entry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry.preload("titan_0_2", "cpu")


def raw_job(run_folder, *, data=None, loader="converge", **changes):
    """The content of ``job.json`` for the shipped train config; keywords replace entries.

    Degrees may be given as keywords too.
    """
    settings = tomllib.loads(TRAIN_CONFIG.read_text())
    ours = settings.pop("converge")
    degrees = {name: changes.pop(name, default) for name, default in DEGREES.items()}
    return {
        "schema": 1,
        "name": Path(run_folder).name,
        "role": "test",
        "identity": "0" * 64,
        "dialect": "titan_0_2",
        "run_folder": str(run_folder),
        "seed": 42,
        "steps": 3,
        "parallelism": degrees,
        "techniques": [],
        "train_config": {
            "path": "train_configs/llama3_debug_titan02.toml",
            "module": None,
            "config": None,
            "model": {**ours["model"], "n_layers": LAYERS},
            "settings": settings,
            "loader": loader,
        },
        "overrides": {},
        "data": {"folder": str(data), "digest": "0"} if data else None,
        "seed_checkpoint": None,
        "sample_steps": [0, 1],
        "device": "cpu",
        **changes,
    }


def write_job(run_folder, **changes):
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / "job.json"
    path.write_text(json.dumps(raw_job(run_folder, **changes)))
    return path


def job(run_folder, **changes):
    return read_job(write_job(run_folder, **changes))


@functools.cache
def start():
    """Made once in a process, for all its modules."""
    folder = lasting_folder()
    data = prepare(SyntheticData(vocab_size=512, tokens=60_000), folder / "data").folder
    path = write_job(folder / "seed", data=data, role="seed checkpoint", dp_shard=1)
    done = torchrun("titan_0_2", 1, [path], folder=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return Start(data, str(folder / "seed" / "checkpoint" / "step-0"))


class Runs(RunFolders):
    """Real runs below one folder, all from one corpus and one seed checkpoint."""

    def __init__(self, folder):
        self.folder = folder
        self.data, self.seed_checkpoint = start()

    def torchrun(self, name, *, segment=None, **changes):
        """Run a job, or a segment of it; returns the finished process."""
        changes = {"seed_checkpoint": self.seed_checkpoint, **changes}
        path = write_job(self.folder / name, data=self.data, **changes)
        raw = json.loads(path.read_text())
        degrees = (raw if segment is None else raw["segments"][segment])["parallelism"]
        ranks = 1
        for degree in degrees.values():
            ranks *= degree
        place = [] if segment is None else ["--segment", segment]
        return torchrun("titan_0_2", ranks, [path, *place], folder=ROOT)

    def run(self, name, **changes):
        """Run a job to its end; returns its steps and its audit."""
        done = self.torchrun(name, **changes)
        assert done.returncode == 0, done.stderr[-4000:]
        folder = self.folder / name
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
        return steps, json.loads((folder / "in_force.json").read_text())
