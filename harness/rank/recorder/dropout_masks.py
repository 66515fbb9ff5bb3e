"""Which units dropout keeps in a sampled step, by sums over its masks.

Two ranks, or two steps, with the same masks drop the same units, whatever the states of their
random generators look like: a generator that a program seeds anew for every mask leaves no trace in
them. So in a sampled step every call of ``torch.nn.functional.dropout`` (that of ``nn.Dropout``,
too) or ``torch.dropout`` is made a second time, of ones and from the same state of the generator:
its result is the mask, which the first one does not show where its input is zero. The first call
and the generator are left as they are, so training is not changed in any bit.

Of a mask there are the number of units, of those kept, and the sum of a hash of the place of each
one kept, among the first ``_LOOKED_AT``. A rank mixes these sums in the order of its calls. Calls
that activation checkpointing makes again in the backward pass count again: there may be twice as
many units with it.

Nothing is recorded if a part of the model is compiled or in a CUDA graph, or if a mask is drawn in
a function transform (``torch.vmap``, ``torch.func.grad``), on another device than the model's, or
for a DTensor, whose random numbers torch spreads over ranks by states of its own. Neither are masks
that are drawn elsewhere: in attention kernels, by ``torch.rand``, or by a function that a program
has imported under a name of its own.

The second call is hidden from the program's dispatch and function modes. But in a sampled step
``torch.nn.functional.dropout`` is another function, so a ``TorchFunctionMode`` that compares
``func`` with the one it knows does not find it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from converge_harness.rank.recorder.activations import is_compiled
from converge_harness.rank.recorder.bits import mixed

_LOOKED_AT = 1 << 20
"""Units whose places are summed, in 16 MiB. Besides, for a moment, every unit of a mask takes two
values of its own type and two booleans: 6 bytes in bf16."""
_KEY = 0xD509
_FACTOR = 0x5DEECE66D
"""Any odd number: sums are mixed in the order of the calls."""
_WORD = 1 << 64
_DEVICES = ("cpu", "cuda")
"""Those whose default generators are known here."""

Call = Callable[..., torch.Tensor]


class Kept(NamedTuple):
    """What a rank's dropout kept in a step."""

    units: int
    """Over all calls, recomputed ones too; 0 if nothing was dropped."""
    kept: int
    sums: int
    """64 bits of the masks; 0 without any."""


class MaskWatch:
    """Looks at the masks of one rank."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._modules = tuple(modules)
        self._device = device
        self._undo: list[Callable[[], None]] = []
        self._unseen = False
        self._is_inside = False
        """A call is being looked at: those that it, or a function mode, makes are the same mask."""
        self._units = 0
        self._totals = torch.zeros(2, dtype=torch.int64)
        """Units kept and sums so far, on the device: nothing waits for it."""

    def begin(self) -> None:
        """Look at every call from now on, and forget what was seen."""
        self.leave()
        self._units = 0
        self._totals = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._unseen = any(is_compiled(each) for part in self._modules for each in part.modules())
        if not self._unseen:
            for place in (nn.functional, torch):
                self._watch(place)

    def end(self) -> Kept | None:
        """What was kept since ``begin``; None if that is not known."""
        looked = bool(self._undo)
        self.leave()
        if not looked or self._unseen:
            return None
        if not self._units:
            return Kept(0, 0, 0)
        kept, sums = self._totals.tolist()
        return Kept(self._units, kept, sums % _WORD or 1)

    def leave(self) -> None:
        """Look no longer."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _watch(self, place: Any) -> None:
        call: Call = place.dropout
        is_live = True

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
            # A program may hold this function for good: it has imported or wrapped it meanwhile.
            if not is_live or self._is_inside:
                return call(*args, **kwargs)
            asked = _asked(*args, **kwargs)
            if not asked.draws or torch.compiler.is_compiling():
                return call(*args, **kwargs)
            tensor = asked.input
            if not _is_plain(tensor, self._totals.device):
                self._unseen = True
                return call(*args, **kwargs)
            generator = _generator(tensor.device)
            before = generator.get_state()
            with self._inside():
                result = call(*args, **kwargs)
                after = generator.get_state()
                generator.set_state(before)
                try:
                    # Selective checkpointing, a dispatch mode, would store these results, and
                    # return them when the model computes again.
                    with _disable_current_modes(), torch._C.DisableTorchFunction():
                        self._add(call(torch.ones_like(tensor), asked.rate, True))  # noqa: FBT003 (theirs)
                except Exception:  # noqa: BLE001 (looking must never end training)
                    self._unseen = True
                finally:
                    generator.set_state(after)
            return result

        def undo() -> None:
            nonlocal is_live
            is_live = False
            if place.dropout is watched:
                place.dropout = call

        place.dropout = watched
        self._undo.append(undo)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @torch.no_grad()
    def _add(self, mask: torch.Tensor) -> None:
        is_kept = (mask != 0).reshape(-1)
        first = is_kept[:_LOOKED_AT]
        places = torch.arange(first.numel(), dtype=torch.int64, device=mask.device)
        kept, sums = self._totals
        kept += is_kept.sum()
        sums *= _FACTOR
        sums += (mixed(places, _KEY) * first).sum() + is_kept.numel()
        self._units += is_kept.numel()


class _Asked(NamedTuple):
    """What a call of dropout is asked for."""

    input: Any
    rate: float
    draws: bool
    """Whether it draws a mask in training; validation has no gradients."""


def _asked(
    input: Any,  # noqa: A002 (theirs)
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002
    inplace: bool = False,  # noqa: FBT001, FBT002
    *,
    train: bool = True,
) -> _Asked:
    """The arguments of ``torch.nn.functional.dropout``, or of ``torch.dropout``."""
    del inplace
    return _Asked(input, p, 0 < p < 1 and training and train and torch.is_grad_enabled())


def _is_plain(tensor: Any, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Whether a mask of a tensor can be drawn a second time from the state of a generator.

    ``device``: the one that sums are kept on.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type not in _DEVICES:
        return False
    # In a transform even the mask of a tensor from outside of it may have one more dimension.
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if tensor.device != device or transformed:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _generator(device: torch.device) -> torch.Generator:
    """The one that dropout of a tensor on a device draws from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
