"""FlexAttention on the CPU: the same mask, written out, and torch's own attention kernels.

torchtitan's language models know FlexAttention only, whose backward refuses the CPU
(``flex_attention`` supports training on CUDA and XPU). A subclass keeps everything around it:
masks are built, context-parallel sharding and tensor-parallel sharding see a FlexAttention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention

from converge_harness.rank.titan.v0_3.series import SERIES


def _forward_of_samples(
    self: FlexAttention,  # noqa: ARG001 - a method
    q_BLNH: torch.Tensor,  # noqa: N803 - sharding is declared by these names
    k_BLNH: torch.Tensor,  # noqa: N803
    v_BLNH: torch.Tensor,  # noqa: N803
    *,
    attention_masks: torch.Tensor | BlockMask,
    out_transform: Any = None,
    **more: Any,
) -> torch.Tensor:
    """Queries, keys, values and the result have shape (batch, sequence, heads, dimension)."""
    transform = out_transform is not None
    out, logsumexp = _attend(
        q_BLNH, k_BLNH, v_BLNH, attention_masks, with_logsumexp=transform, **more
    )
    return out_transform(out, logsumexp) if transform else out


def _forward_of_tokens(
    self: FlexAttention,  # noqa: ARG001
    q_TNH: torch.Tensor,  # noqa: N803
    k_TNH: torch.Tensor,  # noqa: N803
    v_TNH: torch.Tensor,  # noqa: N803
    *,
    attention_masks: torch.Tensor | BlockMask,
    out_transform: Any = None,
    **more: Any,
) -> torch.Tensor:
    """The same without a batch dimension: (tokens, heads, dimension). The mask has one of 1."""
    transform = out_transform is not None
    q, k, v = (each.unsqueeze(0) for each in (q_TNH, k_TNH, v_TNH))
    out, logsumexp = _attend(q, k, v, attention_masks, with_logsumexp=transform, **more)
    if logsumexp is not None:
        return out_transform(out.squeeze(0), logsumexp.squeeze(0))
    return out.squeeze(0)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | BlockMask,
    *,
    with_logsumexp: bool,
    score_mod: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if score_mod is not None:
        raise NotImplementedError("score_mod needs FlexAttention on a GPU")
    if isinstance(mask, BlockMask):
        mask = dense_mask(mask)
    if with_logsumexp:
        return _with_logsumexp(q, k, v, mask, scale)
    with sdpa_kernel(_kernels(q.dtype)):
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return out.transpose(1, 2), None


def _kernels(dtype: torch.dtype) -> list[SDPBackend]:
    """In float32 the fused kernel, which takes half the time; the plain one where it cannot.

    It needs queries and values of one dimension. In bfloat16 its backward pass takes twice the
    time of the plain one.
    """
    fused = [SDPBackend.FLASH_ATTENTION] if dtype is torch.float32 else []
    return [*fused, SDPBackend.MATH]


class DenseFlexAttention(FlexAttention):
    """Attention over a boolean mask of shape (batch, 1, queries, keys)."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """The keys of FlexAttention; only the class that is built differs."""

    # Arguments are found by the names that the series declares its sharding by.
    forward = _forward_of_tokens if SERIES.folded else _forward_of_samples


def _with_logsumexp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithm of the scores' sum of exponentials: (batch, sequence, heads).

    torch's kernels for the CPU give none. It is in float32, as FlexAttention's is.
    """
    groups = q.shape[2] // k.shape[2]
    # As the kernel does it: low precision is multiplied and added up in float32.
    queries = q.transpose(1, 2).float()
    keys = k.transpose(1, 2).float().repeat_interleave(groups, dim=1)
    values = v.transpose(1, 2).float().repeat_interleave(groups, dim=1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = queries @ keys.transpose(-2, -1) * factor
    scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    return (weights @ values).to(q.dtype).transpose(1, 2), logsumexp.transpose(1, 2)


def dense_mask(mask: BlockMask) -> torch.Tensor:
    """The mask written out: boolean, (batch, 1, queries, keys).

    With context parallelism ``mask_mod`` already speaks of this rank's queries.
    """
    batch, _, queries, keys = mask.shape
    device = mask.kv_indices.device
    if not _takes_whole_tensors(mask.mask_mod):
        return create_mask(mask.mask_mod, batch, None, queries, keys, device=device)
    sizes = (batch, 1, queries, keys)
    indices = (
        torch.arange(size, device=device).view([-1 if place == each else 1 for each in range(4)])
        for place, size in enumerate(sizes)
    )
    return mask.mask_mod(*indices).expand(sizes).contiguous()


_OWN_MASKS = (flex_attention.__name__, attention.__name__)


def _takes_whole_tensors(mask_mod: Callable[..., torch.Tensor]) -> bool:
    """Whether a mask function may be called with tensors of indices that broadcast.

    It is written for one index each, and ``create_mask`` calls it under four ``vmap``s, which
    takes a hundred times as long. Functions of torch and torchtitan compare and look up entry by
    entry; of a person's own, which may do anything, nothing is assumed.
    """
    if getattr(mask_mod, "__module__", None) not in _OWN_MASKS:
        return False
    used = (cell.cell_contents for cell in getattr(mask_mod, "__closure__", None) or ())
    return all(_takes_whole_tensors(each) for each in _callables(used))


def _callables(values: Iterable[Any]) -> Iterator[Callable[..., Any]]:
    for value in values:
        if callable(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from _callables(value)


def _mask_of_one_block(
    mask_mod: Callable[..., torch.Tensor],
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    device: torch.device,
    **_: Any,
) -> BlockMask:
    """What ``create_block_mask`` makes, without finding out which blocks are empty or full."""
    blocks = torch.ones(batch or 1, heads or 1, 1, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        blocks,
        torch.zeros_like(blocks).unsqueeze(-1),
        BLOCK_SIZE=(queries, keys),
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


_TRANSFORMERS_BACKEND = "torchtitan.experiments.transformers_modeling_backend.model"


def replace_transformers_attention() -> None:
    """Do the same for models of Transformers, which call its function where torchtitan looks it up.

    That experiment's module is imported by its config function, or never.
    """
    backend: Any = sys.modules.get(_TRANSFORMERS_BACKEND)
    if backend is not None:
        backend.flex_attention_forward = _transformers_attention


def _transformers_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes as ``flex_attention_forward`` of Transformers has: (batch, heads, …) in."""
    asked = [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if asked:
        raise NotImplementedError(f"{', '.join(asked)} of attention need FlexAttention on a GPU")
    mask = attention_mask
    if isinstance(mask, BlockMask):
        mask = dense_mask(mask)
    with sdpa_kernel(_kernels(query.dtype)):
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def write_out_masks(trainer: Any) -> None:
    """Write every batch's mask out once, before the model, instead of once per layer.

    FSDP rebuilds a BlockMask at each layer, so nothing kept on it lasts; and inside a compiled
    block there should be no mask building. Only context parallelism, which may balance ranks by
    it, needs to know which blocks are empty.
    """
    if not trainer.parallel_dims.cp_enabled:
        attention._compiled_create_block_mask = _mask_of_one_block
    process = trainer.post_dataloading_process

    def post_dataloading_process(*args: Any, **kwargs: Any) -> Any:
        inputs, labels, extra = process(*args, **kwargs)
        masks = extra.get("attention_masks")
        if isinstance(masks, BlockMask):
            extra["attention_masks"] = dense_mask(masks)
        elif isinstance(masks, dict):  # layers that look at windows and those that do not
            extra["attention_masks"] = {
                name: dense_mask(mask) if isinstance(mask, BlockMask) else mask
                for name, mask in masks.items()
            }
        return inputs, labels, extra

    trainer.post_dataloading_process = post_dataloading_process
