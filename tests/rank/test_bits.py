"""The digest of a tensor's bits: every change shows, and nothing but the bits counts."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torchao.float8.float8_linear import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from converge_harness.rank.recorder import bits
from converge_harness.rank.recorder.bits import bit_digests

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def digest(tensor):
    values = bit_digests([tensor], torch.device("cpu"))
    assert (values.dtype, values.shape) == (torch.int64, (1,))
    return int(values)


def some(dtype=torch.float32, size=13):
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).abs().add(1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 13])
def test_one_other_bit_shows_in_every_dtype_and_size(dtype, size):
    tensor = some(dtype, size)
    content = tensor.view(torch.uint8)
    before = digest(tensor)
    assert before == digest(tensor.clone())
    for byte in (0, len(content) - 1):
        content[byte] ^= 1
        assert digest(tensor) != before
        content[byte] ^= 1


def test_minus_zero_and_the_payload_of_a_nan_are_bits():
    zero = torch.zeros(5)
    assert digest(-zero) != digest(zero)
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(quiet) != digest(other)


def test_swapped_entries_show(monkeypatch):
    tensor = some(size=1000)
    whole = digest(tensor)
    swapped = tensor.clone()
    swapped[[10, 900]] = tensor[[900, 10]]
    assert digest(swapped) != whole
    monkeypatch.setitem(bits._BLOCK_WORDS, "cpu", 7)  # blocks change nothing
    assert digest(tensor) == whole


def test_trailing_zeros_count():
    assert len({digest(torch.zeros(size, dtype=torch.uint8)) for size in range(20)}) == 20


def test_strides_and_alignment_do_not_count():
    tensor = some(size=12).view(3, 4)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:]
    assert digest(shifted) == digest(tensor)


def test_a_scalar_and_no_entries_have_digests():
    assert digest(torch.tensor(3.0)) != digest(torch.tensor(4.0))
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 5))


def test_what_is_inside_a_wrapper_counts():
    weight = some(size=16).view(4, 4)
    wrapped = WeightWithDynamicFloat8CastTensor(weight, LinearMMConfig(), torch.float8_e4m3fn)
    assert digest(wrapped) == digest(weight)
    assert digest(AsyncCollectiveTensor(weight)) == digest(weight)


def test_tensors_digested_together_have_the_digests_they_have_alone(monkeypatch):
    tensors = [some(dtype, size) for dtype in DTYPES for size in (0, 1, 4, 100, 1000)]
    alone = [digest(tensor) for tensor in tensors]
    assert bit_digests(tensors, torch.device("cpu")).tolist() == alone
    monkeypatch.setitem(bits._BLOCK_WORDS, "cpu", 50)
    assert bit_digests(tensors, torch.device("cpu")).tolist() == alone
    assert bit_digests([], torch.device("cpu")).shape == (0,)
