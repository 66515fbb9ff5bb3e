"""Jobs of the torchtitan 0.3 dialect, and real torchrun calls of them, for the tests."""

import functools
import importlib.metadata
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
TRAIN_CONFIG = ROOT / "train_configs" / "llama3_debug.toml"
TORCH = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
SPMD_BACKEND = "spmd_types" if TORCH >= (2, 15) else "partial_dtensor"
"""The default of a plan (``harness/plan/make.py``)."""
LAYERS = 2
"""Half of the shipped ones: most of what a run costs grows with them, and they are all alike."""
DEGREES = {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "pp": 1, "ep": 1}


def require_titan_0_3():
    """Skip the module unless this Python has torchtitan 0.3."""
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith("0.3."):
        pytest.skip(f"needs torchtitan 0.3, found {version}", allow_module_level=True)


def preload():
    """Import the dialect; what third parties warn of while they are imported is theirs."""
    from converge_harness.rank.start import entry

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entry.preload("titan_0_3", "cpu")


def write_job(
    folder, *, data=None, model=None, loader="converge", base=TRAIN_CONFIG.name, **changes
):
    """``folder/job.json`` for a shipped train config; keywords replace entries or degrees."""
    settings = tomllib.loads(TRAIN_CONFIG.with_name(base).read_text())
    ours = settings.pop("converge")
    degrees = {name: changes.pop(name, default) for name, default in DEGREES.items()}
    raw = {
        "schema": 1,
        "name": folder.name,
        "role": "test",
        "identity": "0" * 64,
        "dialect": "titan_0_3",
        "run_folder": str(folder),
        "seed": 42,
        "steps": 3,
        "parallelism": degrees,
        "spmd_backend": SPMD_BACKEND,
        "train_config": {
            "path": f"train_configs/{base}",
            "module": ours["module"],
            "config": ours["config"],
            "model": {**ours["model"], "n_layers": LAYERS} if model is None else model,
            "settings": settings,
            "loader": loader,
        },
        "data": {"folder": str(data), "digest": "0"} if data else None,
        "sample_steps": [0, 1],
        "device": "cpu",
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(raw))
    return path


def job(folder, **changes):
    return read_job(write_job(folder, **changes))


@functools.cache
def start():
    """Made once in a process, for all its modules."""
    folder = lasting_folder()
    data = prepare(SyntheticData(vocab_size=512, tokens=60_000), folder / "data").folder
    path = write_job(folder / "seed", data=data, role="seed checkpoint")
    done = torchrun("titan_0_3", 1, [path], folder=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return Start(data, str(folder / "seed" / "checkpoint" / "step-0"))


class Runs(RunFolders):
    """Real runs below one folder, all from one corpus and one seed checkpoint."""

    def __init__(self, folder):
        self.folder = folder
        self.data, self.seed_checkpoint = start()

    def torchrun(self, name, *, segment=None, max_restarts=0, **changes):
        """Run a job, or a segment of it; returns the finished process."""
        degrees = {**DEGREES, **{key: changes[key] for key in DEGREES if key in changes}}
        if segment is not None:
            degrees = changes["segments"][segment]["parallelism"]
        ranks = 1
        if changes.get("role") != "seed checkpoint":
            changes = {"seed_checkpoint": self.seed_checkpoint, **changes}
            for name_of_degree, degree in degrees.items():
                ranks *= 1 if name_of_degree == "ep" else degree  # made of the other ranks
        path = write_job(self.folder / name, data=self.data, **changes)
        place = [] if segment is None else ["--segment", segment]
        return torchrun("titan_0_3", ranks, [path, *place], folder=ROOT, max_restarts=max_restarts)

    def run(self, name, **changes):
        """Run a job to its end; returns its steps and its audit."""
        done = self.torchrun(name, **changes)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
        return steps, json.loads((self.folder / name / "in_force.json").read_text())
