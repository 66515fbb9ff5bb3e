"""torchtitan 0.3's own trainer through two steps, on fake tensors and a fake process group.

The device of all tensors is a fake CPU (a torch without CUDA refuses even fake tensors of a GPU in
its autograd), but the config is that of the job's device: FlexAttention, bf16 and real Float8
stay what they are on a GPU.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any

import torch
import torch._inductor.config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from harness.rank.dry_run import TRACED, Stepped
from harness.rank.dry_run_meter import Meter
from harness.rank.titan_0_3 import dry_run_stand_ins as stand_ins
from harness.rank.titan_0_3.config import build_config
from harness.rank.titan_0_3.dry_run_stages import Neighbours
from harness.run_folder.job import Job

_STEPS = 2
_CANNOT_TRACE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def take_steps(job: Job, meter: Meter) -> Stepped:
    """Build the rank of the job's world that ``RANK`` and ``NGPU`` say, and take two steps.

    Raises SettingError for a config that cannot be built, and whatever the trainer raises.
    """
    said = stand_ins.prepare(job, meter)
    config = build_config(job).trainer
    said += stand_ins.replace_assets(config)
    with ExitStack() as stack:
        config.dump_folder = stack.enter_context(tempfile.TemporaryDirectory())
        config.comm.mode = "fake_backend"
        whole = _model_parameters(config)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        trainer = config.build()
        neighbours = Neighbours(trainer)
        estimated = None
        how = TRACED
        try:
            _step(trainer, meter)
        except _CANNOT_TRACE as error:
            estimated, how = _by_formula(trainer, error)
        return Stepped(
            parts=tuple(trainer.model_parts),
            optimizers=tuple(trainer.optimizers),
            stages=neighbours.stages,
            model_parameters=whole,
            estimated=estimated,
            how=how,
            stand_ins=tuple(said),
            more={
                "compiled_blocks": sum(
                    hasattr(module, stand_ins.MARK)
                    for part in trainer.model_parts
                    for module in part.modules()
                ),
                "async_tp": bool(torch._inductor.config._micro_pipeline_tp),
                "mixed_precision_param": config.training.mixed_precision_param,
                "microbatches": trainer.num_pipeline_parallel_microbatches,
                "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
            },
        )


def _step(trainer: Any, meter: Meter) -> None:
    batches = trainer.batch_generator(trainer.dataloader)
    meter.peak = meter.now
    for _ in range(_STEPS):
        trainer.step += 1
        trainer.train_step(batches)


def _model_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in config.model_spec.model.build().parameters())


def _by_formula(trainer: Any, error: Exception) -> tuple[int, str]:
    """Bytes of activations that layers keep for the backward pass.

    34 bytes per entry of the hidden state and layer with 16-bit activations and an attention that
    keeps no scores, 2 with full recomputation; sequence parallelism divides by TP (Korthikanti et
    al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2). The
    microbatches of a pipeline that are in flight at once are at most all of them.
    """
    config, dims = trainer.config, trainer.parallel_dims
    full = type(config.activation_checkpoint).__qualname__.startswith("FullAC")
    layers = sum(len(part.layers) for part in trainer.model_parts)
    entries = (
        config.training.local_batch_size
        * config.training.seq_len
        * trainer.model_config.dim
        // (dims.tp * dims.cp)
    )
    wider = 2 if config.training.mixed_precision_param == "float32" else 1
    why = f"{type(error).__name__} of {getattr(error, 'func', error)}"
    return (
        (2 if full else 34) * wider * entries * layers,
        f"estimated by formula (Korthikanti et al. 2022, table 2): fake tensors cannot do {why}",
    )
