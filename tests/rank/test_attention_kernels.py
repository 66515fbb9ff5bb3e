"""Attention on the CPU: the fused kernel of float32 computes what the plain one does."""

import pytest
import titan_0_3_jobs as jobs
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

jobs.require_titan_0_3()

QUERY_HEADS, KEY_HEADS, LENGTH, WIDTH = 4, 2, 64, 16


@pytest.fixture(scope="module")
def attention():
    from converge_harness.rank.titan.v0_3 import attention

    torch.set_num_threads(1)
    return attention


def results(attention, dtype, width_of_values=WIDTH):
    """The result and the gradients, of documents of 40 and 24 tokens with causal masks."""
    torch.manual_seed(1)
    heads = ((QUERY_HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, width_of_values))
    given = [torch.randn(2, LENGTH, *shape, dtype=dtype, requires_grad=True) for shape in heads]
    document = (torch.arange(LENGTH) >= 40).long()
    mask = (document[:, None] == document[None]).tril()[None, None].expand(2, 1, -1, -1)
    out, _ = attention._attend(*given, mask, with_logsumexp=False, enable_gqa=True)
    out.float().square().sum().backward()
    return [each.detach().float() for each in (out, *(one.grad for one in given))]


def test_the_fused_kernel_is_the_plain_one_up_to_rounding(attention, monkeypatch):
    fused = results(attention, torch.float32)
    monkeypatch.setattr(attention, "_kernels", lambda _: [SDPBackend.MATH])
    plain = results(attention, torch.float32)
    for one, other in zip(fused, plain, strict=True):
        assert 0 < (one - other).norm() / other.norm() < 1e-6


def test_values_of_another_width_are_left_to_the_plain_kernel(attention):
    """As DeepSeek V3 has them; the fused kernel alone refuses them."""
    assert results(attention, torch.float32, width_of_values=8)[0].shape[-1] == 8
    q, v = torch.ones(1, 2, 8, 16), torch.ones(1, 2, 8, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="kernel"):
        attend(q, q, v)


def test_bfloat16_stays_with_the_plain_kernel(attention):
    assert attention._kernels(torch.bfloat16) == [SDPBackend.MATH]
    assert attention._kernels(torch.float32)[0] == SDPBackend.FLASH_ATTENTION
