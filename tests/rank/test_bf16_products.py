"""bf16 products by the kernels of float32 are nearly the same, float32 products the same."""

import multiprocessing

import pytest
import torch
from torch import nn

SETTINGS = {
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
}


def computed(settings):
    """Results of products and their gradients, by dtype, after the settings were looked at.

    The first is of one product alone.
    """
    from converge_harness.rank.titan.common.cpu import multiply_bf16_by_float32_kernels

    torch.set_num_threads(1)
    multiply_bf16_by_float32_kernels(settings)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        x = torch.randn(2, 96, 64, dtype=dtype, requires_grad=True)
        with_bias, plain = nn.Linear(64, 160, dtype=dtype), nn.Linear(160, 32, bias=False)
        plain.to(dtype)
        hidden = with_bias(x)
        y = plain(hidden)
        scores = torch.bmm(y, x[..., :32].transpose(1, 2))
        scores.float().square().mean().backward()
        weights = [each.grad for each in (with_bias.weight, with_bias.bias, plain.weight)]
        results = (hidden, y, scores, x.grad, *weights)
        found[str(dtype)] = [each.detach().float().numpy() for each in results]
    return found


def in_a_new_process(settings):
    """The kernels stay in place for as long as a process lives."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(computed, (settings,))


@pytest.fixture(scope="module")
def plain():
    return in_a_new_process({"training.dtype": "float32"})


@pytest.fixture(scope="module")
def replaced():
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has instructions for bf16: its kernels stay")
    return in_a_new_process(SETTINGS)


def test_a_training_in_float32_keeps_torchs_kernels(plain):
    again = computed(SETTINGS | {"training.mixed_precision_param": "float32"})
    for dtype, results in plain.items():
        for ours, theirs in zip(again[dtype], results, strict=True):
            assert (ours == theirs).all()


def test_float32_matrices_are_multiplied_as_before(plain, replaced):
    for ours, theirs in zip(replaced["torch.float32"], plain["torch.float32"], strict=True):
        assert (ours == theirs).all()


def test_bf16_matrices_differ_by_the_order_of_additions(plain, replaced):
    pairs = list(zip(replaced["torch.bfloat16"], plain["torch.bfloat16"], strict=True))
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        typical = float((theirs**2).mean() ** 0.5)
        assert abs(ours - theirs).max() < 2**-6 * typical
    ours, theirs = pairs[0]
    assert 0 < (ours != theirs).mean() < 1e-3
