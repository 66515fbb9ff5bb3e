"""Evidence of tensors on a device, on the host, and on both; nothing waits before a step's end.

There is no GPU here. Fake tensors of a CUDA device, and those of the device "meta", have shapes and
places and no values, so what would read a value in the middle of a step raises.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from converge_harness.rank.recorder import sketch
from converge_harness.rank.recorder.cross_entropy import CrossEntropySum
from converge_harness.rank.recorder.digest import BatchDigest
from converge_harness.rank.recorder.grad_norm import SquareSums, assign_shards
from converge_harness.rank.recorder.placement import Held
from converge_harness.rank.recorder.sketch import WIDTH, Sketcher, shard_hash

CUDA = torch.device("cuda:0")
META = torch.device("meta")
"""In place of a GPU where torch would start its driver even for fake tensors of it."""
READS = (DataDependentOutputException, RuntimeError, NotImplementedError)


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


def test_squares_of_gradients_are_taken_without_reading_them(fake):
    shards = [
        (0, torch.ones(3, 4, device=CUDA)),
        (1, torch.ones(5)),
        (0, torch.ones(2, device=CUDA)),
    ]
    taken = SquareSums(shards, 2)
    with pytest.raises(READS):
        taken.numbers()


def test_squares_of_a_row_add_up_over_its_shards():
    shards = [(0, torch.full((3,), 2.0)), (2, torch.ones(5)), (0, torch.ones(2))]
    assert SquareSums(shards, 4).numbers() == pytest.approx([14, 0, 5, 0])
    assert SquareSums([], 2).numbers() == [0, 0]


def test_a_batch_on_a_device_is_hashed_at_the_steps_end_only(fake):
    digest = BatchDigest()
    tokens = torch.ones(2, 8, dtype=torch.int64, device=CUDA)
    digest.add(tokens, tokens, tokens)
    assert (digest.samples, digest.total) == (2, 0)


def test_what_is_hashed_later_is_what_came_from_the_loader(monkeypatch):
    """A loop may fill the tensor of a batch again while its copy waits to be hashed."""

    class OfCuda(torch.Tensor):
        is_cuda = True

    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    tokens = torch.arange(16).view(2, 8)
    now, later = BatchDigest(), BatchDigest()
    now.add(tokens, tokens + 1)
    given = tokens.clone()
    later.add(given.as_subclass(OfCuda), tokens + 1)
    given.zero_()
    assert later.total == 0
    later.finish()
    assert (later.total, later.samples, later.tokens) == (now.total, 2, 16)
    assert waited
    later.finish()
    assert later.total == now.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_on_a_device_are_counted_without_reading_them(dtype):
    total = CrossEntropySum(7)
    labels = torch.ones(2, 3, device=META, dtype=torch.int64)
    total.add(torch.ones(2, 3, 7, device=META, dtype=dtype), labels)
    with pytest.raises(READS):
        total.take()


def test_gradients_are_taken_without_reading_any_value():
    """On the CPU too: what reads a value is the operator behind ``item`` and ``tolist``."""

    class Forbidding(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            assert operation is not torch.ops.aten._local_scalar_dense.default
            return operation(*args, **(kwargs or {}))

    model = torch.nn.Linear(4, 3)
    norm = assign_shards(list(model.named_parameters()))
    model(torch.ones(2, 4)).sum().backward()
    with Forbidding():
        taken = norm.take()
    assert taken.numbers() == pytest.approx([12, 48])


def test_a_shard_on_the_host_is_sketched_on_the_device():
    """CPU offload: parameters and gradients lie on the host, buffers and the rest on the device."""
    hashed = shard_hash_of((4, 6), META)
    into = torch.zeros(2, WIDTH, dtype=torch.float64, device=META)
    shards = [(0, hashed, torch.ones(4, 6)), (1, hashed, torch.ones(4, 6, device=META))]
    Sketcher(16, META).add(shards, into)
    assert into.device == META


def shard_hash_of(shape, device):
    """As ``shard_hash`` makes it of a whole tensor, whose first and last rows it would read."""
    rows, columns = shape
    return sketch.ShardHash(
        shape,
        torch.zeros(rows, 1, dtype=torch.int16, device=device),
        torch.zeros(columns, dtype=torch.int16, device=device),
        torch.zeros(rows, columns, dtype=torch.int16, device=device),
        None,
        None,
    )


def test_sums_in_a_fixed_order_are_those_of_the_cpu():
    """The branch for devices, computed on the CPU: equal but for the order of additions."""
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(256, (1000,), generator=random, dtype=torch.int16)
    values = torch.randn(1000, generator=random, dtype=torch.float64)
    expected = sketch._by_code(codes, values, 256)
    found = values.new_zeros(256).index_put_((codes.long(),), values, accumulate=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sketches_do_not_depend_on_deterministic_algorithms():
    values = torch.randn(40, 30, generator=torch.Generator().manual_seed(4))
    held = Held((40, 30), ((range(40),), (range(30),)))
    found = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            into = torch.zeros(1, WIDTH, dtype=torch.float64)
            hashed = shard_hash("w", held, torch.device("cpu"))
            Sketcher(256, torch.device("cpu")).add([(0, hashed, values)], into)
        finally:
            torch.use_deterministic_algorithms(mode=False)
        found.append(into)
    assert torch.equal(*found)
