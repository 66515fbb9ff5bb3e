"""Memory of a dry run: counts live storages while operators run on fake tensors.

A fake tensor has a storage of the right size without memory. The meter sees every operator's
outputs; it adds a storage when it first sees it, and subtracts it when it is freed or resized (FSDP
frees gathered parameters by resizing their storages to zero).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_BLOCK = 512
"""CUDA's caching allocator allocates multiples of this many bytes."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Meter(TorchDispatchMode):
    """Counts bytes of live storages, and gives fake tensors a value.

    The value (``item()``) is 1, or False: the loop of a rejection sampler then ends, and a loss is
    finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._live: dict[int, int] = {}
        self._paused = 0

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._watched_resize()
        super().__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)
        torch.UntypedStorage.resize_ = self._resize

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is allocated in this block, because it would not be on a GPU."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, without counting what it allocates."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        return run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and type(args[0]) is not torch.Tensor:
            return _value_of(args[0].dtype)
        if any(each not in _PLAIN for each in types):
            return NotImplemented  # a DTensor or similar wraps the tensors that count
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            for each in tree_iter(out):
                if isinstance(each, FakeTensor) and each.device.type != "meta":
                    self._count(each.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = 0
        self._set(key, storage.nbytes())
        weakref.finalize(storage, self._forget, key)

    def _set(self, key: int, size: int) -> None:
        size = -(-size // _BLOCK) * _BLOCK
        self.now += size - self._live[key]
        self._live[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)

    def _watched_resize(self) -> Callable[[Any, int], Any]:
        resize = self._resize

        def resize_(storage: Any, size: int) -> Any:
            resized = resize(storage, size)
            if storage._cdata in self._live:
                self._set(storage._cdata, int(size))
            return resized

        return resize_


def _value_of(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1
