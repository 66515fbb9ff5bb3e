"""A finished control that never ran, to be blessed: files with the shape of real ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from converge_harness.baselines import Change, write_baseline
from converge_harness.calibrations import StoredCalibration
from converge_harness.matrix.load import load_plan
from converge_harness.model import Blessing, Calibration, Job, Role, RunRecord, RunStatus
from converge_harness.plan import identity_facts
from converge_harness.store import write_json
from converge_harness.trainers import assume_toolchain, job_payload

TRAIN_CONFIG = """
[training]
steps = 4
local_batch_size = 4
global_batch_size = 8
seq_len = 256
dtype = "float32"
mixed_precision_param = "float32"
[converge]
module = "llama3"
config = "llama3_debugmodel"
[converge.data]
"""
EXPERIMENT = """
schema = 1
[trainer]
train_config = "t.toml"
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
"""
ROUNDING = Change(
    kind="same within rounding", sentence="loss differs", onset=None, growth={"loss": "x"}
)


def experiment(folder: Path, text: str = EXPERIMENT) -> Path:
    """An experiment file with its train config."""
    (folder / "t.toml").write_text(TRAIN_CONFIG)
    path = folder / "e.toml"
    path.write_text(text)
    return path


def plan_of(path: Path):
    return load_plan(path, (), on_gpu=False, find=assume_toolchain)


def control_of(path: Path) -> Job:
    (control,) = (job for job in plan_of(path).jobs if job.role is Role.CONTROL)
    return control


def bless(baseline: Path, path: Path, author: str = "ada", change: Change | None = None) -> None:
    """Store the control of an experiment as a baseline, as if it and its reference had run."""
    control = control_of(path)
    references = [job for job in plan_of(path).jobs if job.role is Role.REFERENCE]
    record, *reference = [run_of(job, path) for job in (control, *references)]
    surroundings = plan_of(path).surroundings
    calibration = Calibration(control.name, control.identity, control.precision, (), 0)
    learnt = StoredCalibration(calibration, {}, identity_facts(control, surroundings), "2026-11-22")
    toolchain = replace(control.toolchain, versions={"torchtitan": "0.3.0", "torch": "2.12.0"})
    blessing = Blessing(author, "why", "2026-11-22")
    write_baseline(baseline, record, learnt, toolchain, blessing, change, *reference)


def run_of(control: Job, path: Path) -> RunRecord:
    """The files of a job that never ran."""
    run = path.parent / "runs" / control.identity[:8]
    payload = job_payload(control, run, data=run, seed_checkpoint=run, device="cpu")
    write_json(run / "job.json", {"schema": 1, **payload})
    write_json(run / "in_force.json", {"param_dtype": "float32"})
    (run / "metrics.jsonl").write_text('{"schema": 1, "kind": "header"}\n')
    (run / "tensors").mkdir(exist_ok=True)
    np.savez(run / "tensors" / "step-00000000.npz", schema=1)
    if control.frozen:
        np.savez(run / "frozen.npz", schema=1)
    record = RunRecord(control.name, control.identity, run, RunStatus.FINISHED, 1.0, ("python",))
    write_json(
        run / "record.json",
        {"name": control.name, "identity": control.identity, "status": "finished", "wall_s": 1.0}
        | {"argv": ["/home/ada/python"], "error": None, "host": "adas-laptop"},
    )
    return record
