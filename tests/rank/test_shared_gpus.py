"""Ranks that share a GPU, and triton kernels as torchao declares them, without a GPU."""

from contextlib import nullcontext

import pytest

from converge_harness.rank.start.entry import take_own_gpu


@pytest.mark.parametrize(("rank", "gpu"), [("0", "2"), ("1", "3"), ("2", "2")])
def test_a_rank_sees_its_own_gpu_only(rank, gpu):
    environment = {
        "LOCAL_RANK": rank,
        "CUDA_VISIBLE_DEVICES": "2,3",
        "CONVERGE_GPU_OF_RANK": "2,3,2",
    }
    take_own_gpu(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == gpu
    assert environment["LOCAL_RANK"] == rank


def test_a_rank_with_a_gpu_of_its_own_keeps_what_it_was_given():
    environment = {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}
    take_own_gpu(environment)
    assert environment == {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}


def test_a_kernel_may_be_tuned_by_a_key_that_is_no_argument():
    import triton

    from converge_harness.rank.titan.v0_3 import patches

    def kernel(x_ptr, block):
        pass

    kernel = triton.jit(kernel)
    configs = [triton.Config({"block": 1})]
    newest = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    with pytest.raises(ValueError, match="num_elements") if newest else nullcontext():
        triton.autotune(configs, key=["num_elements"])(kernel)
    before = triton.autotune
    with patches.unknown_autotune_keys_ignored():
        assert triton.autotune(configs, key=["x_ptr", "num_elements"])(kernel).keys == ["x_ptr"]
    assert triton.autotune is before
