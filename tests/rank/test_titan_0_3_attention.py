"""Attention on a CPU: masks written out, and what FlexAttention would compute."""

import pytest
import titan_0_3_jobs as jobs

jobs.require_titan_0_3()


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    jobs.preload()


def masks():
    """A mask of each function of torchtitan, of some together, and of one's own functions."""
    import torch
    from torch.nn.attention.flex_attention import and_masks, or_masks
    from torchtitan.models.common import attention

    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5]])
    causal = attention.get_causal_mask_mod()
    own_table = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))
    own = {
        "entrywise": lambda b, h, i, j: (i >= j) & (i - j < 3),
        "rows": lambda b, h, i, j: (own_table[i] * own_table[j]).sum() > 0,
    }
    packed = attention.get_efficient_causal_mask_mod_for_packed_document(positions)
    window = attention.get_sliding_window_mask_mod(3)
    of_torchtitan = {
        "causal": causal,
        "document": attention.get_document_mask_mod(positions),
        "packed": and_masks(causal, packed),
        "fixed": attention.get_fixed_block_mask_mod(4),
        "window": and_masks(causal, packed, window),
        "either": or_masks(window, and_masks(causal, packed)),
    }
    mixed = {"packed and own": and_masks(causal, own["rows"])}
    return of_torchtitan, own | mixed


def test_masks_are_those_of_create_mask():
    import torch
    from torch.nn.attention.flex_attention import create_mask

    from converge_harness.rank.titan.v0_3.attention import _mask_of_one_block, dense_mask

    of_torchtitan, own = masks()
    for name, function in (of_torchtitan | own).items():
        block_mask = _mask_of_one_block(function, 2, None, 8, 8, "cpu", BLOCK_SIZE=128)
        written = dense_mask(block_mask)
        assert written.shape == (2, 1, 8, 8), name
        assert torch.equal(written, create_mask(function, 2, None, 8, 8, "cpu")), name


def test_only_functions_of_torch_and_torchtitan_are_called_with_whole_tensors():
    from converge_harness.rank.titan.v0_3.attention import _takes_whole_tensors

    of_torchtitan, own = masks()
    assert all(_takes_whole_tensors(each) for each in of_torchtitan.values())
    assert not any(_takes_whole_tensors(each) for each in own.values())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_with_sinks_is_what_flex_attention_computes():
    import torch
    from torch.nn.attention.flex_attention import (
        AuxRequest,
        create_block_mask,
        flex_attention,
    )

    from converge_harness.rank.titan.v0_3.attention import DenseFlexAttention

    torch.manual_seed(1)
    q, k, v = torch.randn(2, 256, 4, 16), torch.randn(2, 256, 2, 16), torch.randn(2, 256, 2, 16)
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 100), 2, None, 256, 256, "cpu")
    right, aux = flex_attention(
        *(each.transpose(1, 2) for each in (q, k, v)),
        block_mask=mask,
        scale=0.3,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    ours = DenseFlexAttention(DenseFlexAttention.Config())(
        q, k, v, attention_masks=mask, scale=0.3, enable_gqa=True, out_transform=lambda *each: each
    )
    torch.testing.assert_close(ours[0], right.transpose(1, 2))
    torch.testing.assert_close(ours[1], aux.lse.transpose(1, 2))
