"""The probe as a library: the same loop leaves the same evidence however its model is wrapped."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from probed_loop import STEPS, WRAP, Block, Model, fsdp1, lines_of, sample_of, train, write_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from converge_harness.probe import Probe, ProbeError

WRAPPED = [name for name in WRAP if name != "plain"]
NAMES = {"ddp": "DDP", "fsdp1_orig": "FSDP1", "fsdp1_flat": "FSDP1", "fsdp2": "FSDP2"}


def run(folder, wrap, arguments=None, **job):
    """A run of the loop on two ranks, or of the plain one in this process; its folder."""
    path = write_job(folder / wrap, **job)
    if wrap == "plain":
        train(path, wrap, **(arguments or {}))
    else:
        run_on_ranks(call_train, 2, path, wrap, arguments or {})
    return folder / wrap


def call_train(path, wrap, arguments):
    train(path, wrap, **arguments)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVERGE_JOB", "")
        folder = run(tmp_path_factory.mktemp("plain"), "plain")
    assert not dist.is_initialized()  # a plain script is left as it is
    return folder


def largest_difference(control, test, signal):
    pairs = zip(lines_of(control), lines_of(test), strict=True)
    return max(abs(a[signal] - b[signal]) / abs(a[signal]) for a, b in pairs)


@pytest.mark.parametrize("wrap", WRAPPED)
def test_every_wrapping_leaves_the_evidence_of_the_plain_loop(tmp_path, plain, wrap):
    folder = run(tmp_path, wrap)
    for signal in ("loss", "loss_recomputed", "grad_norm", "grad_norm_recomputed"):
        assert largest_difference(plain, folder, signal) < 1e-12, signal
    for expected, line in zip(lines_of(plain), lines_of(folder), strict=True):
        for key in ("step", "lr", "tokens", "batch_digest", "batch_agrees", "grads_missing"):
            assert line[key] == expected[key], key
        assert "problems" not in line
    for step in (0, 1, 2):
        expected, found = sample_of(plain, step), sample_of(folder, step)
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            if array.dtype == np.float64:
                assert np.allclose(found[key], array, rtol=1e-10, atol=1e-13), (step, key)
            else:
                assert np.array_equal(found[key], array), (step, key)
    assert [line["count"] for line in lines_of(folder, "replicas")] == [0, 0, 0]
    in_force = json.loads((folder / "in_force.json").read_text())
    degree = "dp_replicate" if wrap == "ddp" else "dp_shard"
    assert in_force["degrees"] == {**dict.fromkeys(in_force["degrees"], 1), degree: 2}
    assert in_force["probe"] == {
        "wrapping": NAMES[wrap],
        "gradients": "before clipping",
        "recomputes_loss": True,
    }
    sizes = ("seq_len", "local_batch_size", "global_batch_size", "gradient_accumulation_steps")
    assert [in_force[key] for key in sizes] == [5, 2, 8, 2]
    assert (in_force["param_dtype"], in_force["declared"]) == ("float64", ["zero.stage"])


def skip_averaging(model):
    """A bug: rank 1 does not divide the sum of the gradients by the number of ranks."""
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2


@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_rank_that_reduces_otherwise_is_seen(tmp_path, plain, wrap):
    folder = run(tmp_path, wrap, {"before_clip": skip_averaging})
    healthy, line = lines_of(plain)[0], lines_of(folder)[0]
    assert line["loss_recomputed"] == pytest.approx(healthy["loss_recomputed"], rel=1e-12)
    assert abs(line["grad_norm_recomputed"] / healthy["grad_norm_recomputed"] - 1) > 0.05
    expected, found = sample_of(plain, 1), sample_of(folder, 1)
    apart = np.linalg.norm(found["gradients_sketch"] - expected["gradients_sketch"], axis=1)
    assert (apart > 0.1 * expected["gradients_norm"]).sum() >= 5
    copies = lines_of(folder, "replicas")[1]
    kinds = {each["kind"] for each in copies["disagreements"]}
    assert kinds == ({"parameter", "gradient", "optimizer state"} if wrap == "ddp" else set())


def test_dealing_samples_out_otherwise_leaves_the_same_digest(tmp_path, plain):
    folder = run(tmp_path, "ddp", {"accumulate": 4})
    assert [line["batch_digest"] for line in lines_of(folder)] == [
        line["batch_digest"] for line in lines_of(plain)
    ]


def test_the_clipping_method_of_fsdp1_is_watched(tmp_path):
    for wrap in ("fsdp1_orig", "fsdp1_flat"):
        folder = run(tmp_path, wrap, {"dtype": torch.float32})
        for line in lines_of(folder):
            assert line["grad_norm_recomputed"] == pytest.approx(line["grad_norm"], rel=1e-5)
            assert line["grad_norm"] > 0.2
        clipped = np.linalg.norm(sample_of(folder, 1)["clipped_norm"])
        assert clipped == pytest.approx(0.1, rel=1e-4)
        in_force = json.loads((folder / "in_force.json").read_text())
        assert in_force["probe"]["gradients"] == "before clipping"


def test_an_ulp_repeat_starts_from_the_same_moved_weights_however_wrapped(tmp_path):
    arguments = {"dtype": torch.float32}
    kept = run(tmp_path / "kept", "plain", arguments)
    moved = run(tmp_path / "moved", "plain", arguments, repeat="ulp")
    at_start = sample_of(moved, 0)["parameters_sketch"]
    assert not np.allclose(at_start, sample_of(kept, 0)["parameters_sketch"], rtol=1e-9, atol=0)
    late = [(wrap, False) for wrap in WRAPPED]
    for wrap, early in [("ddp", True), ("fsdp1_flat", True), *late]:
        folder = run(tmp_path / f"{early}", wrap, {**arguments, "early": early}, repeat="ulp")
        found = sample_of(folder, 0)["parameters_sketch"]
        assert np.allclose(found, at_start, rtol=1e-12, atol=1e-14), (wrap, early)


@pytest.mark.parametrize("wrap", WRAP)
def test_a_rounding_repeat_moves_low_precision_alone(tmp_path, wrap):
    """As far as two roundings to bfloat16 are apart (2**-9), in every step."""
    for dtype, moves in ((torch.bfloat16, True), (torch.float32, False)):
        arguments = {"dtype": dtype}
        kept = run(tmp_path / f"kept{moves}", wrap, arguments)
        moved = run(tmp_path / f"moved{moves}", wrap, arguments, repeat="rounding")
        start, found = sample_of(kept, 0), sample_of(moved, 0)
        assert np.array_equal(found["parameters_sketch"], start["parameters_sketch"])
        apart = distance(sample_of(kept, 1), sample_of(moved, 1), "gradients")
        assert (1e-3 < apart < 5e-2) is moves, apart
        assert (apart == 0) is not moves
        later = largest_difference(kept, moved, "loss_recomputed")
        assert (later > 0) is moves
        again = run(tmp_path / f"again{moves}", wrap, arguments, repeat="rounding")
        assert largest_difference(moved, again, "grad_norm") == 0


def distance(control, test, kind):
    """Of all sketches of a kind, over their size."""
    one, other = (sample[f"{kind}_sketch"] for sample in (control, test))
    return float(np.linalg.norm(one - other) / np.linalg.norm(one))


def hybrid(model):
    """FSDP 1 within pairs of ranks, copies between the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return fsdp1(model, use_orig_params=False, sharding_strategy=strategy, device_mesh=mesh)


def train_hybrid(path):
    WRAP["hybrid"] = hybrid
    train(path, "hybrid")


def test_copies_of_hybrid_sharding_are_compared_and_counted_once(tmp_path, plain):
    run_on_ranks(train_hybrid, 4, write_job(tmp_path / "hybrid"))
    expected, found = sample_of(plain, 1), sample_of(tmp_path / "hybrid", 1)
    assert np.allclose(found["gradients_sketch"], expected["gradients_sketch"], atol=1e-14)
    line = lines_of(tmp_path / "hybrid", "replicas")[1]
    assert line["compared"]["gradient"] >= len(expected["names"])
    assert line["count"] == 0
    in_force = json.loads((tmp_path / "hybrid" / "in_force.json").read_text())
    assert (in_force["degrees"]["dp_replicate"], in_force["degrees"]["dp_shard"]) == (2, 2)


# ------------------------------------------------------------------ who trains on what


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return 1.0 * self.down(self.up(x).relu())


def train_on_mesh(path):
    """FSDP 2 over tensor parallelism on four ranks; two of them share samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVERGE_JOB", str(path))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        model = Pair()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["fsdp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = Probe.from_env(model, optimizer)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        mine = inputs.chunk(2)[mesh.get_local_rank("fsdp")]
        probe.batch(mine, torch.zeros(2, dtype=torch.int64))
        loss = model(mine).square().mean()
        loss.backward()
        optimizer.step()
        probe.step(loss=loss)


def test_ranks_that_share_samples_are_known_by_the_names_of_mesh_dimensions(tmp_path):
    path = write_job(tmp_path / "mesh", steps=1, sample_steps=[1])
    run_on_ranks(train_on_mesh, 4, path)
    (line,) = lines_of(tmp_path / "mesh")
    assert (line["batch_agrees"], line["tokens"]) == (True, 4)
    in_force = json.loads((tmp_path / "mesh" / "in_force.json").read_text())
    degrees = in_force["degrees"]
    assert (degrees["dp_shard"], degrees["tp"], degrees["dp_replicate"]) == (2, 2, 1)
    assert in_force["global_batch_size"] == 4
    assert in_force["probe"]["gradients"] == "at the optimizer's step"
    assert in_force["probe"]["recomputes_loss"] is False


def unnamed_mesh(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVERGE_JOB", str(path))
        mesh = init_device_mesh("cpu", (2,))
        model = Block()
        model.linear.weight = nn.Parameter(distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ProbeError, match=r"dimension 0, which has no name.*dp_rank=…"):
            Probe.from_env(model, optimizer)
        with pytest.raises(ProbeError, match="each number from 0 to"):
            Probe.from_env(model, optimizer, dp_rank=0, dp_degree=2)
        Probe.from_env(model, optimizer, dp_rank=0, dp_degree=1).close()


def test_a_mesh_whose_names_say_nothing_asks_the_user(tmp_path):
    run_on_ranks(unnamed_mesh, 2, write_job(tmp_path / "unnamed"))


def fewer_steps(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVERGE_JOB", str(path))
        model = WRAP["ddp"](Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = Probe.from_env(model, optimizer)
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        probe.batch(tokens)
        model(tokens).sum().backward()
        optimizer.step()
        probe.step(loss=1.0 + dist.get_rank())
        probe.close()


def test_a_loop_that_ends_early_is_not_complete_and_local_losses_are_averaged(tmp_path):
    run_on_ranks(fewer_steps, 2, write_job(tmp_path / "few"))
    assert not (tmp_path / "few" / "metrics.jsonl").exists()
    (line,) = lines_of(tmp_path / "few", name="metrics.jsonl.part")
    assert line["loss"] == 1.5
    assert line["tokens"] == 20
    assert STEPS > 1
