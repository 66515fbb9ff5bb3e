"""A program that is stopped and resumed and trains nothing: it leaves what a probe in it would."""

import os
import signal
import sys
import time
from pathlib import Path

from converge_harness.run_folder.checkpoints import write_manifest
from converge_harness.run_folder.faults import hold_until, over_file, record_struck, struck_file
from converge_harness.run_folder.job import read_job
from converge_harness.run_folder.layout import STATE, arrays_name
from converge_harness.run_folder.metrics import MetricsWriter
from converge_harness.run_folder.passes import claim_pass, pass_folder


def main(checkpoints, resume_from, stop_at, every, mode):
    segment = os.environ.get("CONVERGE_SEGMENT")
    job = read_job(os.environ["CONVERGE_JOB"], None if segment is None else int(segment))
    first = int(Path(resume_from).read_text()) if resume_from else 0
    number = claim_pass(job.run_folder)
    folder = pass_folder(job.run_folder, number)
    header = {"world_size": 1, "steps": job.steps, "pass": number, "segment": job.segment}
    writer = MetricsWriter(folder, header)
    writer.loaded(first)
    told = listening(mode)
    for step in range(first + 1, stop_at + 1):
        for index, fault in enumerate(job.faults):
            if fault.kind == "kill" and fault.step == step:
                die_once(job, index, fault, number, mode)
        writer.step({"step": step, "loss": 1.0 / step, "at": time.time()}, {})
        if (step % every == 0 or step == stop_at) and not mode.startswith("forget"):
            save(job, step, folder, checkpoints, whole=not (mode.startswith("torn") and step == 4))
        for index, fault in enumerate(job.faults):
            if fault.kind == "preempt" and fault.step == step:
                wait_for(over_file(job.run_folder, index), told)
        if "stops" in told:
            save(job, step, folder, checkpoints)
            return
        if mode.endswith("then dies") and (number, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
    writer.finish(stop_at)


def wait_for(over, told):
    hold_until(over, lambda: bool(told))
    while "deaf" in told:
        time.sleep(0.1)


def listening(mode):
    """Filled by SIGTERM, if the program has a handler."""
    told = []
    if mode in ("stops", "deaf"):
        signal.signal(signal.SIGTERM, lambda *_: told.append(mode))
    return told


def save(job, step, folder, checkpoints, *, whole=True):
    checkpoint = job.checkpoints.path(job.run_folder, step)
    assert checkpoint.parent == Path(checkpoints)
    checkpoint.write_text(str(step))
    (folder / STATE).mkdir(exist_ok=True)
    (folder / STATE / arrays_name("saved-step", step)).touch()
    if whole:
        write_manifest(checkpoint, step, folder, job.checkpoints)


def die_once(job, index, fault, number, mode):
    if not struck_file(job.run_folder, index).exists():
        record_struck(job.run_folder, index, fault, number)
        if mode == "ends with 0":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
