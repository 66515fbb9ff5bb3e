"""The probe's pieces of a model under real DeepSpeed engines, against plain torch.

In a toolchain with DeepSpeed: ``nox -s e2e`` runs it there.
"""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs toolchain deepspeed-0.19.8", allow_module_level=True)
import deepspeed

from converge_harness.probe.deepspeed import wrapped_engine

# The parents of forked ranks count what those leave to the resource tracker.
pytestmark = pytest.mark.filterwarnings("ignore")
RANKS, MICROBATCHES, ROWS, LR, CLIP = 2, 2, 3, 0.01, 0.05


def small_model():
    """Of sizes that two ranks cannot halve, with a frozen parameter."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 1)
    )
    model[2].bias.requires_grad_(False)
    return model


def engine_of(model, stage, **more):
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # On CPUs it would compile an all-reduce through shared memory, for inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def batches(steps):
    """Shape (steps, microbatches, ranks, rows, 5)."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(steps, MICROBATCHES, RANKS, ROWS, 5, generator=generator)


def joined(pieces):
    """Everyone's pieces as whole tensors, by name; every entry has to be there once."""
    mine = [
        (name, piece.shape, piece.start, piece.stop, piece.local().clone())
        for name, piece in pieces
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {}
    for name, shape, start, stop, value in (piece for some in everyone for piece in some):
        tensor, seen = whole.setdefault(name, (torch.zeros(shape), torch.zeros(shape.numel())))
        tensor.view(-1)[start:stop] = value.float()
        seen[start:stop] += 1
    assert all((seen == 1).all() for _, seen in whole.values())
    return {name: tensor for name, (tensor, _) in whole.items()}


def states_of(pieces, kept):
    """Everyone's optimizer states, by their names."""
    names = sorted({name for shard in kept.state.values() for name in shard})
    assert names == ["exp_avg", "exp_avg_sq", "step"]
    assert {float(kept.state[piece]["step"]) for _, piece in pieces} <= {1.0, 2.0}
    return {
        key: joined([(name, kept.state[piece][key]) for name, piece in pieces])
        for key in ("exp_avg", "exp_avg_sq")
    }


def same(found, wanted, **tolerances):
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name, **tolerances)


def pieces_are_those_of_plain_torch(stage):
    reference = small_model()
    trained = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR)
    engine = engine_of(small_model(), stage)
    wrapped = wrapped_engine(engine)
    assert (wrapped.wrapping, wrapped.problems) == (f"ZeRO-{stage}", ())
    assert wrapped.degrees == {"dp_shard": RANKS}
    same(joined(wrapped.parameters), {name: p.detach() for name, p in trained.items()})
    gradients = []
    undo = wrapped.watch_clipping(
        lambda: gradients.append(joined([(name, p.grad) for name, p in wrapped.parameters]))
    )
    for step in batches(2):
        for microbatch in step:
            engine.backward(engine(microbatch[dist.get_rank()]).square().mean())
            engine.step()
        optimizer.zero_grad()
        reference(step.reshape(-1, 5)).square().mean().backward()
        wanted = {name: p.grad.clone() for name, p in trained.items()}
        assert torch.nn.utils.clip_grad_norm_(trained.values(), CLIP) > 2 * CLIP
        optimizer.step()
        same(gradients[-1], wanted)
        assert {piece.grad for _, piece in wrapped.parameters} == {None}  # of clipped ones is none
        # A last bit in a small gradient is a share of the learning rate in Adam's first update.
        same(
            joined(wrapped.parameters),
            {n: p.detach() for n, p in trained.items()},
            atol=1e-4,
            rtol=0,
        )
        states = states_of(wrapped.parameters, *wrapped.kept_by)
        for key, found in states.items():
            same(found, {name: optimizer.state[p][key] for name, p in trained.items()})
    undo()
    assert len(gradients) == 2
    frozen = dict(reference.named_parameters())["2.bias"]
    if stage == 3:
        assert joined(wrapped.copies)["2.bias"].equal(frozen)
    else:
        assert dict(wrapped.copies)["2.bias"].local().equal(frozen)
        assert {piece.is_whole for _, piece in wrapped.copies} == {True}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pieces_of_all_ranks_are_the_gradients_values_and_states_of_plain_torch(stage):
    run_on_ranks(pieces_are_those_of_plain_torch, RANKS, stage)


def bfloat16_pieces():
    engine = engine_of(
        small_model().bfloat16(),
        1,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
    )
    wrapped = wrapped_engine(engine)
    assert type(engine.optimizer).__name__ == "BF16_Optimizer"
    gradients = []
    wrapped.watch_clipping(
        lambda: gradients.append(joined([(name, p.grad) for name, p in wrapped.parameters]))
    )
    reference = small_model()
    (step,) = batches(1)
    for microbatch in step:
        engine.backward(engine(microbatch[dist.get_rank()].bfloat16()).square().mean())
        engine.step()
    reference(step.reshape(-1, 5)).square().mean().backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    same(gradients[0], wanted, rtol=0.05, atol=0.02)
    assert {piece.local().dtype for _, piece in wrapped.parameters} == {torch.float32}


def test_bfloat16_pieces_are_the_float32_ones_that_the_optimizer_keeps():
    run_on_ranks(bfloat16_pieces, RANKS)


def whole_tensors_of_stage_0():
    engine = engine_of(small_model(), 0)
    wrapped = wrapped_engine(engine)
    assert (wrapped.wrapping, wrapped.degrees) == ("ZeRO-0", {"dp_replicate": RANKS})
    norms = []
    wrapped.watch_clipping(
        lambda: norms.append(torch.cat([p.grad.view(-1) for _, p in wrapped.parameters]).norm())
    )
    (step,) = batches(1)
    for microbatch in step:
        engine.backward(engine(microbatch[dist.get_rank()]).square().mean())
        engine.step()
    assert norms[0] > 2 * CLIP
    assert wrapped.kept_by[0].state.keys() == {p for _, p in wrapped.parameters}
    assert len(wrapped.copies) == len(wrapped.parameters) + 1


def test_stage_0_keeps_whole_tensors_and_is_read_before_clipping():
    run_on_ranks(whole_tensors_of_stage_0, RANKS)


def problems_of_another_optimizer():
    engine = engine_of(small_model().bfloat16(), 0, bf16={"enabled": True})
    (problem,) = wrapped_engine(engine).problems
    assert "FP16" in problem
    assert "stage 0 is not supported by the probe" in problem


def test_an_optimizer_whose_pieces_are_unknown_is_refused_in_words():
    run_on_ranks(problems_of_another_optimizer, 1)
