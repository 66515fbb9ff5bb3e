"""Stands where torchvision would: ``import composer`` takes some names of it and calls none.

PyPI's torchvision registers its operators with a CUDA build of torch, so beside a CPU torch its
import fails. Here every name is an empty class. The toolchain of Composer has this folder on its
path (noxfile.py).
"""

from __future__ import annotations

import sys
import types

_MODULES = (
    *("datasets", "models", "models.resnet", "ops"),
    *("transforms", "transforms.functional", "utils"),
)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        # Python itself asks for names such as __path__, and takes what it gets.
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


__path__: list[str] = []  # Makes a package of this module, so that `torchvision.ops` is looked for.
for _name in _MODULES:
    sys.modules[f"{__name__}.{_name}"] = _StandIn(f"{__name__}.{_name}")
    if "." not in _name:
        globals()[_name] = sys.modules[f"{__name__}.{_name}"]
