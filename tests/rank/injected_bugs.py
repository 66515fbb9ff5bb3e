"""Bugs for ``inject``: each breaks a built torchtitan trainer as a known bug did."""

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from converge_harness.rank.faults import die_before_metadata


def _before_clipping(change):
    """Call ``change(parameters)`` between backward and clipping."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def changed(parameters, *args, **kwargs):
        parameters = list(parameters)
        change(parameters)
        return clip(parameters, *args, **kwargs)

    utils.clip_grad_norm_ = changed


def double_gradients(trainer):
    """As torchtitan#2972: gradients are scaled, the loss curve hardly shows it."""

    def double(parameters):
        for parameter in parameters:
            parameter.grad.mul_(2)

    _before_clipping(double)


def dropout(trainer):
    """No bug: dropout of feed-forward outputs, whose numbers each rank draws by itself."""
    torch.manual_seed(1234 + dist.get_rank())
    for model in trainer.model_parts:
        for name, module in model.named_modules():
            if name.endswith("feed_forward"):
                module.register_forward_hook(
                    lambda _module, _inputs, output: torch.dropout(output, 0.1, train=True)
                )


def lose_embedding_gradient(trainer):
    """As pytorch#179849: one parameter gets no gradient."""

    def lose(_parameters):
        for part in trainer.model_parts:
            part.tok_embeddings.weight.grad = None

    _before_clipping(lose)


def leave_layer_out_of_optimizer(trainer):
    """The optimizer neither moves a layer nor clears its gradients."""
    unknown = {
        id(parameter)
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
        if name.startswith("layers.1.")
    }
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if id(each) not in unknown]


def decay_weights_without_the_optimizer(_trainer):
    """Right or wrong, it moves weights where no optimizer steps."""

    @torch.no_grad()
    def decay(parameters):
        for parameter in parameters:
            parameter.mul_(0.99)

    _before_clipping(decay)


def negate_one_gradient(trainer):
    """No norm shows it, and no loss of the same step."""

    def negate(_parameters):
        for part in trainer.model_parts:
            part.layers["1"].feed_forward.w2.weight.grad.neg_()

    _before_clipping(negate)


def double_reported_loss(trainer):
    """As torchtitan's full_dtensor back end: only the metric is wrong."""
    log = trainer.metrics_processor.log

    def doubled(step, loss, *args, **kwargs):
        log(step, 2 * loss, *args, **kwargs)

    trainer.metrics_processor.log = doubled


def become_nan_at_step_2(trainer):
    """Weights of the last layer turn into NaN before the second step."""
    train_step = trainer.train_step

    def with_nan(batches):
        if trainer.step == 2:
            with torch.no_grad():
                for name, parameter in trainer.model_parts[-1].named_parameters():
                    if "layers.1" in name:
                        parameter.fill_(torch.nan)
        train_step(batches)

    trainer.train_step = with_nan


def killed_in_the_first_pass(trainer):
    """SIGKILL of the last rank as step 4 begins, in the first pass only."""
    passes = Path(trainer.checkpointer.folder).parent / "passes"
    if len(list(passes.iterdir())) > 1:
        return
    train_step = trainer.train_step

    def dying(batches):
        if trainer.step == 4 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(batches)

    trainer.train_step = dying


def node_lost(trainer):
    """SIGKILL of all ranks, once, as ``node_lost.json`` says.

    ``{"step": 3}``: as step 3 begins; with ``"saving": true`` while its checkpoint is written. With
    ``"unseen": true`` the ranks only wait, until there is a file ``seen``.
    """
    run = Path(trainer.checkpointer.folder).parent
    plan = run / "node_lost.json"
    if not plan.exists():
        return
    told = json.loads(plan.read_text())
    dist.barrier()  # all have read it
    plan.unlink(missing_ok=True)
    if told.get("saving"):
        die_before_metadata(run / "checkpoint" / f"step-{told['step']}", lambda: None)
        return
    train_step = trainer.train_step

    def lost(batches):
        if trainer.step == told["step"]:
            if not told.get("unseen"):
                os.kill(os.getpid(), signal.SIGKILL)
            (run / "waits").touch()
            while not (run / "seen").exists():
                time.sleep(0.05)
        train_step(batches)

    trainer.train_step = lost
