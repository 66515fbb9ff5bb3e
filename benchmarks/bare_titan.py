"""One rank of a torchtitan 0.3 job without converge: no probe, no evidence.

``torchrun … benchmarks/bare_titan.py JOB.json`` trains (or writes the seed checkpoint) with the
config that the job has under converge, on the same data and with the same CPU shim.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from converge_harness.rank.start.parent import die_with_parent
from converge_harness.rank.titan import v0_3
from converge_harness.run_folder.job import read_job


def main(job_path: str) -> None:
    die_with_parent()  # so that an interrupted benchmark leaves no rank behind
    job = read_job(job_path)
    v0_3.preload(job.device)
    # Imported only now: preload patches torch before torchtitan is imported.
    from torchtitan.tools.logging import init_logger  # noqa: PLC0415

    from converge_harness.rank.titan.v0_3.attention import write_out_masks  # noqa: PLC0415
    from converge_harness.rank.titan.v0_3.config import build_config  # noqa: PLC0415

    init_logger()
    trainer = build_config(job).trainer.build()
    if job.makes_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        if job.device == "cpu":
            write_out_masks(trainer)
        trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
