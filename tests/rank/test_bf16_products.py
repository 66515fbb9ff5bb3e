"""bf16 products by the kernels of float32 are nearly the same, float32 products the same."""

import multiprocessing
from collections import Counter

import pytest
import torch
from torch import nn

from converge_harness.rank import cpu

MIXED = {"training.dtype": "float32", "training.mixed_precision_param": "bfloat16"}


def computed(*, replaced):
    """Results of products and their gradients by dtype, and how often an operator was replaced.

    The first is of one product alone.
    """
    torch.set_num_threads(1)
    called = Counter()
    if replaced:
        for name in ("mm", "bmm", "addmm"):
            setattr(torch, name, counting(called, name, getattr(torch, name)))
        cpu.replace_products()
        called.clear()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        x = torch.randn(2, 96, 64, dtype=dtype, requires_grad=True)
        with_bias, plain = nn.Linear(64, 160, dtype=dtype), nn.Linear(160, 32, bias=False)
        plain.to(dtype)
        hidden = with_bias(x)
        y = plain(hidden)
        scores = torch.ops.aten.bmm(y, x[..., :32].transpose(1, 2))
        scores.float().square().mean().backward()
        weights = [each.grad for each in (with_bias.weight, with_bias.bias, plain.weight)]
        results = (hidden, y, scores, x.grad, *weights)
        found[str(dtype)] = [each.detach().float().numpy() for each in results]
    return found, called, refused()


def counting(called, name, product):
    def call(*arguments, **options):
        called[name] += 1
        return product(*arguments, **options)

    return call


def refused():
    """What is said of a product of two dtypes."""
    try:
        nn.functional.linear(
            torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3), torch.ones(4)
        )
    except RuntimeError as error:
        return str(error)
    return None


def in_a_new_process(*, replaced):
    """The kernels stay in place for as long as a process lives."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(computed, kwds={"replaced": replaced})


@pytest.fixture(scope="module")
def plain():
    return in_a_new_process(replaced=False)


@pytest.fixture(scope="module")
def replaced():
    return in_a_new_process(replaced=True)


def test_every_product_is_replaced(replaced):
    _, called, _ = replaced
    assert set(called) == {"mm", "bmm", "addmm"}


def test_float32_matrices_are_multiplied_as_before(plain, replaced):
    for ours, theirs in zip(replaced[0]["torch.float32"], plain[0]["torch.float32"], strict=True):
        assert (ours == theirs).all()


def test_bf16_matrices_differ_by_the_order_of_additions(plain, replaced):
    pairs = list(zip(replaced[0]["torch.bfloat16"], plain[0]["torch.bfloat16"], strict=True))
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        typical = float((theirs**2).mean() ** 0.5)
        assert abs(ours - theirs).max() < 2**-6 * typical
    ours, theirs = pairs[0]
    assert (ours != theirs).mean() < 1e-3


def test_two_dtypes_are_refused_as_before(plain, replaced):
    assert plain[2] is not None
    assert replaced[2] is not None


@pytest.mark.parametrize(
    ("settings", "fast", "replaces"),
    [
        (MIXED, False, True),
        ({"training.dtype": "bfloat16"}, False, True),
        (MIXED, True, False),
        (MIXED | {"training.mixed_precision_param": "float32"}, False, False),
    ],
)
def test_only_bf16_on_a_cpu_without_kernels_for_it(monkeypatch, settings, fast, replaces):
    asked = []
    monkeypatch.setattr(cpu, "replace_products", lambda: asked.append(True))
    monkeypatch.setattr(cpu, "multiplies_bf16_fast", lambda: fast)
    cpu.multiply_bf16_by_float32_kernels(settings)
    assert bool(asked) is replaces
