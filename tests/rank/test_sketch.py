"""Sketches: the same for every sharding, and an unbiased estimate of differences."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from placements import DISTRIBUTED, SHAPES, distributed, fully_sharded, numbered

from converge_harness.rank.recorder.grad_norm import assign_shards, trainable
from converge_harness.rank.recorder.placement import held, local_shard
from converge_harness.rank.recorder.sketch import (
    NOT_ZERO,
    SQUARES,
    WIDTH,
    Sketcher,
    folded,
    shard_hash,
)
from converge_harness.run_folder.arrays import PROJECTIONS

CPU = torch.device("cpu")
LIMIT = math.sqrt(2 / PROJECTIONS)
"""Relative standard deviation of an estimate, at most (Thorup and Zhang 2004)."""


def added(name, tensor, block=11):
    """What a rank adds up for its shard; small blocks, so that there are many."""
    row = torch.zeros(1, WIDTH, dtype=torch.float64)
    shard = 0, shard_hash(name, held(tensor), CPU), local_shard(tensor)
    Sketcher(block, CPU).add([shard], row)
    return row[0]


def sketch(name, tensor):
    return folded(added(name, tensor, block=1 << 16))


def values(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def summed(named):
    """Rows of whole tensors by name: each distinct shard added by the rank that counts it."""
    norm = assign_shards(named)
    rows = torch.zeros(len(norm.names), WIDTH, dtype=torch.float64)
    for index, parameter in norm.owned:
        rows[index] += added(norm.names[index], parameter)
    dist.all_reduce(rows)
    return dict(zip(norm.names, rows, strict=True))


def assert_same(row, whole, case):
    assert (row - whole).abs().max() <= 1e-13 * whole[SQUARES].sqrt(), case
    assert row[NOT_ZERO] == whole[NOT_ZERO], case


def check_distributed():
    for name, shape, dtype in itertools.product(
        DISTRIBUTED, SHAPES, (torch.float32, torch.bfloat16)
    ):
        whole = values(shape, dtype)
        rows = summed([("w", torch.nn.Parameter(distributed(whole, name)))])
        assert_same(rows["w"], added("w", whole), (name, shape, dtype))


def test_the_sketches_of_shards_add_up_to_that_of_the_whole():
    run_on_ranks(check_distributed, 4)


@pytest.mark.parametrize("block", [5, 64, 1 << 16])
def test_shards_added_together_do_not_mix(block):
    """More shards than are counted at once, some cut into blocks, two of them in one row."""
    tensors = {f"w{number}": values((number % 7 + 1, 3)) for number in range(300)}
    table = torch.zeros(len(tensors), WIDTH, dtype=torch.float64)
    hashes = {name: shard_hash(name, held(tensor), CPU) for name, tensor in tensors.items()}
    shards = [(row, hashes[name], tensors[name]) for row, name in enumerate(tensors)]
    Sketcher(block, CPU).add([*shards, shards[7]], table)
    for row, (name, tensor) in enumerate(tensors.items()):
        assert_same(table[row], added(name, tensor) * (2 if row == 7 else 1), name)


def check_fully_sharded(rows, columns, fsdp, tp, replicate):
    whole = {name: added(name, value) for name, value in trainable([numbered(rows, columns)])}
    sharded = summed(trainable([fully_sharded(numbered(rows, columns), fsdp, tp, replicate)]))
    assert sharded.keys() == whole.keys()
    for name, row in sharded.items():
        assert_same(row, whole[name], name)


@pytest.mark.parametrize(
    ("rows", "columns", "fsdp", "tp", "replicate"),
    [(8, 8, 2, 2, 1), (7, 5, 3, 2, 1), (3, 5, 4, 1, 1), (8, 6, 2, 2, 2)],
)
def test_fsdp_over_tensor_parallelism(rows, columns, fsdp, tp, replicate):
    ranks = fsdp * tp * replicate
    run_on_ranks(check_fully_sharded, ranks, rows, columns, fsdp, tp, replicate)


def test_blocks_and_layout_do_not_matter():
    whole = values((13, 29))
    for block in (1, 7, 29, 100, 1 << 16):
        assert_same(added("w", whole, block), added("w", whole), block)
    assert_same(added("w", whole.t().contiguous().t()), added("w", whole), "transposed strides")


def test_zeros_and_what_is_not_finite_are_counted():
    tensor = values((5, 7))
    tensor[0, :3] = 0
    tensor[2, 2] = -0.0
    tensor[4, 4] = torch.nan
    tensor[4, 5] = -torch.inf
    row = added("w", tensor)
    assert 5 * 7 - int(row[NOT_ZERO]) == 4
    assert not row[SQUARES].isfinite()
    assert Sketcher(8, CPU).not_finite(shard_hash("w", held(tensor), CPU), tensor) == 2


def test_float8_weights_are_read_through_their_wrapper():
    fsdp_utils = pytest.importorskip("torchao.float8.fsdp_utils")
    weight = values((8, 16))
    wrapped = fsdp_utils.WeightWithDynamicFloat8CastTensor(weight, None, torch.float8_e4m3fn)
    assert type(local_shard(wrapped)) is torch.Tensor
    assert torch.equal(added("w", wrapped), added("w", weight))


def named_differences():
    shape = (24, 40)
    zero = torch.zeros(shape)
    one_column, one_row, one_entry, corners = (zero.clone() for _ in range(4))
    one_column[:, 7] = 1
    one_row[5] = 1
    one_entry[3, 4] = 1
    corners[2:4, 5:7] = 1  # four entries that row and column hashes alone do not tell apart
    gaussian = values(shape)
    return {
        "gaussian": gaussian,
        "constant": torch.ones(shape),
        "one column": one_column,
        "one row": one_row,
        "one entry": one_entry,
        "square": corners,
        "outer product": torch.outer(gaussian[:, 0], gaussian[0]),
        "heavy tail": gaussian**5,
        "vector": values((960,)),
    }


@pytest.mark.parametrize("kind", named_differences())
def test_the_estimate_is_unbiased_and_spreads_as_known(kind):
    """2,000 names are 2,000 independent hashes.

    The mean of that many estimates has a standard deviation of at most LIMIT / sqrt(2000) = 0.4%,
    and is allowed five of them. By Chebyshev's inequality that fails a right hash with probability
    0.04 at worst and, the mean being nearly normal, 6e-7 really; the hashes never change, so a test
    that has passed once passes always. The spread itself is allowed 20% more than its bound.
    """
    tensor = named_differences()[kind]
    norm = float(tensor.double().square().sum())
    names = [f"layers.{number}.weight" for number in range(2000)]
    estimates = torch.stack([sketch(name, tensor).square().sum() for name in names]) / norm
    assert abs(float(estimates.mean()) - 1) < 5 * LIMIT / math.sqrt(len(names))
    assert float((estimates - 1).square().mean().sqrt()) < 1.2 * LIMIT
    if kind == "one entry":
        assert estimates.eq(1).all()


def test_hashes_of_different_names_are_not_correlated():
    """The product of two names' sketches has mean zero and, by entries, 64 times variance 1/64."""
    tensor = values((24, 40))
    sketches = torch.stack([sketch(f"layers.{number}.weight", tensor) for number in range(400)])
    products = sketches @ sketches.T / float(tensor.double().square().sum())
    off_diagonal = products[~torch.eye(400, dtype=torch.bool)]
    assert abs(float(off_diagonal.mean())) < 5e-3
    assert float(off_diagonal.square().mean().sqrt()) == pytest.approx(
        1 / math.sqrt(PROJECTIONS), rel=0.1
    )


def test_sketches_are_linear():
    a, b = values((24, 40)).double(), values((24, 40)).double().flip(0)
    assert torch.allclose(sketch("w", a) - sketch("w", b), sketch("w", a - b), atol=1e-12)


def test_signs_and_sums_are_taken_evenly():
    hits = added("w", torch.ones(256, 256))[: 2 * PROJECTIONS]
    expected = 256 * 256 / (2 * PROJECTIONS)
    chi_squared = float(((hits - expected) ** 2 / expected).sum())
    assert chi_squared < 2 * PROJECTIONS + 6 * math.sqrt(
        4 * PROJECTIONS
    )  # mean 127, standard deviation 16
