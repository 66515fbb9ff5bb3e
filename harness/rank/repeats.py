"""A/A repeats of a control, perturbed by no more than rounding.

``repeat = "ulp"``: every initial weight is moved by one unit in the last place. A rerun of a
deterministic set-up is bit-identical and so shows nothing about rounding. Moving each weight to a
neighbouring floating-point number is a change no larger than rounding itself, so the drift of such
a run shows how much rounding alone can change a correct one. torchtitan's experts multiply in
bfloat16 whatever the training's precision is (``models/common/moe.py``, ``_grouped_mm``), which
hides an ulp of float32. So results of these products and of experts (those of GPT-OSS add a bias
in bfloat16), and their gradients, are moved as below.
EP, PP and CP leave most of these products as they are. TP adds up parts of the last one: its
correct set-ups are 0.4 to 1.9 times as far off as such a repeat (Qwen 3, GPT-OSS).

``repeat = "rounding"``: results in low precision are rounded differently. If weights are cast to
bfloat16, a weight that is moved by one unit in the last place of float32 is cast to the same
number, so ``ulp`` does not show the rounding by which correct runs differ. So here the results are
moved, after every module's forward pass and in its backward pass:

- Entries in bfloat16 or float16 are moved to a neighbouring number, up or down, one in six. Two
implementations of one operation round (nearly) the same real number, after sums in different
orders. If their errors are independent and each uniform within half a spacing h either way, their
difference has the variance h**2 / 6, that of a move by h with probability 1 / 6.
- Operands of Float8 layers are scaled by a different factor, up to 2, before they are cast.
Mathematically it cancels, but every entry is rounded differently. Other shardings have this effect,
too, because each shard has its own maximum.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from converge_harness.rank.recorder.bits import mixed
from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.placement import held, local_shard

_BLOCK_ELEMENTS = 1 << 20
_BLOCK_ELEMENTS_OF_GPUS = 1 << 24
"""Of activations, where the launch of an operator takes longer than a smaller block."""


@torch.no_grad()
def move_by_one_ulp(model_parts: Iterable[torch.nn.Module], seed: int) -> None:
    """Move each element up or down, by a hash of seed, parameter's name and global index.

    The direction depends on nothing else, so all shardings of the same model get the same weights
    and replicas stay equal. Raises PlacementError if a shard's global indices are unknown.
    """
    for part in model_parts:
        move_tensors(((canonical(name), each) for name, each in part.named_parameters()), seed)


@torch.no_grad()
def move_tensors(parameters: Iterable[tuple[str, Any]], seed: int) -> None:
    """The same for parameters, or fetched shards of them, by canonical name."""
    for name, parameter in parameters:
        local = local_shard(parameter)
        flat = local.reshape(-1)
        for block, index in held(parameter).blocks(_BLOCK_ELEMENTS, local.device):
            up = direction(name, index, seed)
            towards = torch.where(up, torch.inf, -torch.inf).to(flat.dtype)
            flat[block] = torch.nextafter(flat[block], towards)
        if not local.is_contiguous():  # then flattening would copy
            local.copy_(flat.view(local.shape))


def direction(name: str, index: torch.Tensor, seed: int) -> torch.Tensor:
    """Up or down for each element of a named tensor, by its global flat index (int64)."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return mixed(index, int.from_bytes(digest, "little")) < 0


LOW = (torch.bfloat16, torch.float16)
ONE_IN = 6
"""One entry in this many is moved (see above)."""


def round_in_repeat(
    repeat: str | None, model_parts: Sequence[torch.nn.Module], repeat_seed: int, dp_rank: int
) -> None:
    """Round low-precision results otherwise: of all modules, or (``ulp``) of experts alone.

    Float8 layers get other scales in a rounding repeat, by a patch of torchao.
    """
    seed = _seed_of(repeat_seed, dp_rank)
    if repeat == "rounding":
        round_otherwise(model_parts, repeat_seed, dp_rank)
        if importlib.util.find_spec("torchao") is not None:
            _scale_otherwise(_Factors(seed))
    elif repeat == "ulp":
        move = move_operator(seed)
        for name, module in _rounding(model_parts):
            if "expert" in name:  # it may cast what it computed in bfloat16 to float32
                _move_results(module, move, (*LOW, torch.float32))
        _round_grouped_products(move)


def round_otherwise(
    model_parts: Sequence[torch.nn.Module], repeat_seed: int, dp_rank: int
) -> list[Callable[[], None]]:
    """Move the results of all modules that are in low precision; returns what undoes it."""
    move = move_operator(_seed_of(repeat_seed, dp_rank))
    return [_move_results(module, move, LOW) for _, module in _rounding(model_parts)]


def _seed_of(repeat_seed: int, dp_rank: int) -> int:
    """Data-parallel ranks have different activations; all others hold copies, or parts.

    Copies have to be moved alike, so their ranks have the same seed.
    """
    return repeat_seed * 2**16 + dp_rank


def _move_results(
    module: torch.nn.Module, move: Any, dtypes: Collection[torch.dtype]
) -> Callable[[], None]:
    is_block = next(module.children(), None) is not None

    def hook(_module: torch.nn.Module, _given: Any, result: Any) -> Any:
        if is_block and type(result) is tuple:  # blocks may return more than the residual stream
            return (_moved(result[0], move, dtypes), *result[1:])
        return _moved(result, move, dtypes)

    return module.register_forward_hook(hook).remove


def _round_grouped_products(move: Any) -> None:
    """Patch ``torch._grouped_mm``: its results in low precision, and their gradients, are moved."""
    product = getattr(torch, "_grouped_mm", None)
    if product is None:  # torch below 2.8
        return

    @functools.wraps(product)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        return _moved(product(*args, **kwargs), move)

    torch._grouped_mm = rounded


def move_operator(seed: int) -> Any:
    """``moved`` and its gradient as a custom operator, which torch.compile does not look into."""
    digest = hashlib.blake2b(f"{seed} results".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")

    def of_values(values: torch.Tensor) -> torch.Tensor:
        return moved(values, key)

    move = torch.library.custom_op("converge::move", of_values, mutates_args=())
    move.register_fake(
        lambda values: torch.empty_like(values, memory_format=torch.contiguous_format)
    )
    move.register_autograd(lambda _, gradient: move(gradient))
    return move


def moved(values: torch.Tensor, key: int) -> torch.Tensor:
    """The entries, one in six of them at a neighbouring number; zeros stay zero.

    Which ones depends on nothing but the values, their places and the key. So activations that are
    computed again, for a checkpointed block or after a resume, are rounded as they were. A float32
    tensor is moved if all its numbers are of bfloat16.
    """
    values = values.contiguous()
    if values.dtype is torch.float32:
        rounded = values.bfloat16()
        # Stays on the device, for CUDA graphs.
        is_cast = ((rounded.float() == values) | values.isnan()).all()
        return torch.where(is_cast, moved(rounded, key).float(), values)
    result = values.clone()
    if values.dtype not in LOW:  # a gradient may have a higher precision
        return result
    flat = result.view(-1)
    size = _BLOCK_ELEMENTS if flat.device.type == "cpu" else _BLOCK_ELEMENTS_OF_GPUS
    for start in range(0, flat.numel(), size):
        block = flat[start : start + size]
        bits = block.view(torch.int16)
        place = torch.arange(start, start + len(block), device=block.device)
        drawn = mixed((place << 16) + bits, key).remainder_(2 * ONE_IN)
        # Away from zero, the neighbours of a number are those of its bits as an integer.
        step = (drawn == 0).to(torch.int16) - (drawn == 1).to(torch.int16)
        # No entry becomes infinite or NaN, and zeros stay zero.
        inner = (block != 0) & block.isfinite() & (block.abs() < torch.finfo(values.dtype).max)
        bits += step * inner
    return result


def _rounding(parts: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Names and modules that compute something themselves, and blocks, which add residuals.

    Blocks are torchtitan's, and the elements of lists of modules, as most models have them.
    """
    for part in parts:
        listed = {
            element
            for each in part.modules()
            if isinstance(each, torch.nn.ModuleList | torch.nn.Sequential)
            for element in each
            # It returns what its last module did.
            if not isinstance(element, torch.nn.Sequential)
        }
        for name, module in part.named_modules():
            leaf = next(module.children(), None) is None
            if leaf or module in listed or hasattr(module, "feed_forward"):
                yield name, module


def _moved(result: Any, move: Any, dtypes: Collection[torch.dtype] = LOW) -> Any:
    """A module's result, moved unless ranks could not move it in the same way."""
    if not isinstance(result, torch.Tensor) or result.dtype not in dtypes:
        return result
    if not isinstance(result, DTensor):
        return move(result)
    if not all(isinstance(placement, Shard) for placement in result.placements):
        return result
    local = move(result.to_local())
    return DTensor.from_local(
        local,
        result.device_mesh,
        result.placements,
        shape=result.shape,
        stride=result.stride(),
        run_check=False,
    )


class _Factors:
    """Of Float8 scales, by its own random numbers, so that the trainer's do not change."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def factor(self, amax: torch.Tensor) -> torch.Tensor:
        """The factor of a Float8 scale: above 1/2, at most 1."""
        drawn = torch.rand(
            (), dtype=torch.float32, device=amax.device, generator=self._generator(amax.device)
        )
        return 1 - drawn / 2


def _scale_otherwise(factors: _Factors) -> None:
    from torchao.float8 import float8_utils

    scale_of = float8_utils.amax_to_scale
    factor = torch.library.custom_op("converge::factor", factors.factor, mutates_args=())
    factor.register_fake(lambda amax: torch.empty((), dtype=torch.float32, device=amax.device))

    def scale_otherwise(amax: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = scale_of(amax, *args, **kwargs)
        return scale * factor(amax.detach()).to(scale.dtype)

    float8_utils.amax_to_scale = scale_otherwise
