"""The states of the random generators that a rank may draw from, before and after a step.

A generator whose state is another one after a step was drawn from. A digest of the states before
the step then stands for all the numbers that the step drew: two steps that begin with equal states
and draw alike get the same numbers (dropout masks, noise). Most training draws nothing, and then a
step costs two copies of a state and a comparison; no device is waited for, because torch keeps the
states of CUDA generators in the memory of the host.

It covers torch's default generators of the CPU and of the model's device, generators of the
program's own that the model, hooks of its modules or stateful parts of the checkpoint hold, and the
states that Megatron-Core or DeepSpeed keeps by name and gives the device's generator for a while
(``CudaRNGStatesTracker``). The
global generators of Python's ``random`` and of ``numpy.random``, from which augmentations and
shuffles draw, are looked at in the same way, each alone: a program that never seeds one of them
leaves it in another state in every run, and that must not hide what torch draws.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from converge_harness.rank.recorder.trainer_view import TrainerView

_HALF = 1 << 32
_TRACKERS = (
    "megatron.core.tensor_parallel.random",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
)
"""Modules with a tracker of named states; looked at only if the program has imported them."""


class RandomStates:
    """The generators of one rank, found when they are first looked at."""

    def __init__(self, view: TrainerView, read: Callable[[], bytes] | None = None) -> None:
        """``read`` gives the state of another library's global generator, instead of torch's."""
        self._view = view
        self._read = read
        self._found: tuple[torch.Generator, ...] | None = None
        self._before: dict[bytes, bytes] | None = None

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Torch's default ones, then those that the program holds, each once."""
        if self._found is None:
            held = held_generators(self._view.model_parts, self._view.stateful())
            self._found = tuple(
                {id(each): each for each in (*_defaults(self._view.device), *held)}.values()
            )
        return self._found

    def begin(self) -> None:
        """A step begins: its states are those of now, or those that the last step left."""
        if self._view.frames_steps or self._before is None:
            self.note()

    def note(self) -> None:
        """The next step begins with the states of now."""
        self._before = self._states()

    def end(self) -> int:
        """64 bits of the states before the step, of the generators it drew from; 0 if of none.

        A state that a tracker gets a name for in the step begins with the next one, and one whose
        name is gone after it does not count.
        """
        before, after = self._before or {}, self._states()
        self._before = after
        changed = [each for each in before if each in after and after[each] != before[each]]
        if not changed:
            return 0
        state = hashlib.blake2b(digest_size=8)
        for which in changed:
            state.update(which)
            state.update(before[which])
        return int.from_bytes(state.digest(), "little") or 1

    def now(self) -> str:
        """16 hex digits of the states of all generators as they are now."""
        return hashlib.blake2b(b"".join(self._states().values()), digest_size=8).hexdigest()

    def copies(self) -> list[torch.Tensor]:
        """The states of now, for ``put_back``; without those that a tracker keeps by name."""
        return [each.get_state() for each in self.generators]

    def put_back(self, states: Sequence[torch.Tensor]) -> None:
        """Give all generators the states that ``copies`` returned."""
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def _states(self) -> dict[bytes, bytes]:
        """By number of the generator, or by name."""
        if self._read is not None:
            return {_number(0): self._read()}
        numbered = enumerate(self.generators)
        return {
            _number(each): _bytes_of(generator) for each, generator in numbered
        } | named_states()


def _number(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _bytes_of(state: torch.Tensor | torch.Generator) -> bytes:
    state = state.get_state() if isinstance(state, torch.Generator) else state
    return state.cpu().numpy().tobytes()


def named_states() -> dict[bytes, bytes]:
    """The states that trackers keep now, by their names and in the order of these.

    A tracker's order is that in which a program adds them, which may be another one after a resume.
    A graph-safe state is a generator.
    """
    trackers = (
        getattr(sys.modules.get(module), "_CUDA_RNG_STATE_TRACKER", None) for module in _TRACKERS
    )
    states = {
        str(name).encode(): _bytes_of(state)
        for tracker in trackers
        if tracker is not None
        for name, state in tracker.get_states().items()
    }
    return dict(sorted(states.items()))


def python_state() -> bytes:
    """The state of the generator behind the functions of ``random``."""
    version, numbers, gauss = random.getstate()
    return array("I", numbers).tobytes() + repr((version, gauss)).encode()


def numpy_state() -> bytes:
    """The state of the generator behind the functions of ``numpy.random``."""
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 (programs use it)
    if state["bit_generator"] != "MT19937":  # put in by ``numpy.random.set_bit_generator``
        return repr(_plain(state)).encode()
    inner = state["state"]
    rest = (int(inner["pos"]), state.get("has_gauss"), state.get("gauss"))
    return inner["key"].tobytes() + repr(rest).encode()


def _plain(value: Any) -> Any:
    """The value with lists for its arrays, of which numpy prints only the ends if they are long."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def watched(view: TrainerView) -> dict[str, RandomStates]:
    """The states of "torch", and of the global generators of "python" and "numpy"."""
    return {
        "torch": RandomStates(view),
        "python": RandomStates(view, python_state),
        "numpy": RandomStates(view, numpy_state),
    }


def halves(digest: int) -> tuple[int, int]:
    """High and low 32 bits: each fits a float64."""
    return divmod(digest, _HALF)


def combined(digests: Iterable[tuple[int, int]]) -> str:
    """16 hex digits for the states of all ranks, from the halves of each; empty: no rank drew.

    Ranks with equal states count once, so copies of one state are the same on any number of ranks.
    """
    drawn = sorted({high * _HALF + low for high, low in digests if high or low})
    if not drawn:
        return ""
    together = b"".join(each.to_bytes(8, "little") for each in drawn)
    return hashlib.blake2b(together, digest_size=8).hexdigest()


def shared(ranks: Sequence[tuple[int, tuple[int, int]]]) -> bool | None:
    """Whether ranks that train on other samples drew the same numbers; None: fewer than two drew.

    Args:
        ranks: of every rank in rank order, its data-parallel coordinate and the halves of its
            digest. Ranks of one coordinate (TP, CP, PP) may share states or not: coordinates are
            compared as wholes.
    """
    of_coordinate: dict[int, list[tuple[int, int]]] = {}
    for coordinate, digest in ranks:
        of_coordinate.setdefault(coordinate, []).append(digest)
    drawn = [tuple(each) for each in of_coordinate.values() if any(map(any, each))]
    return len(set(drawn)) < len(drawn) if len(drawn) > 1 else None


def held_generators(
    modules: Iterable[torch.nn.Module], stateful: Iterable[object]
) -> Iterator[torch.Generator]:
    """Generators that modules, their hooks and other objects hold, in the order of both."""
    for each in _modules(modules):
        for value in (*vars(each).values(), type(each).forward):
            yield from _held_by(value)
        for hooks in (each._forward_pre_hooks, each._forward_hooks):
            for hook in hooks.values():
                yield from _held_by(hook)
    for part in stateful:
        for value in getattr(part, "__dict__", {}).values():
            yield from _held_by(value)


def _modules(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for module in modules:
        yield from module.modules()


def _held_by(value: Any) -> Iterator[torch.Generator]:
    """A generator itself, or those of a function: in its closure, arguments, object or globals."""
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, functools.partial):
        yield from _held_by(value.func)
        yield from (each for each in value.args if isinstance(each, torch.Generator))
        yield from (each for each in value.keywords.values() if isinstance(each, torch.Generator))
    elif isinstance(value, types.MethodType):
        kept = getattr(value.__self__, "__dict__", {}).values()
        yield from (each for each in kept if isinstance(each, torch.Generator))
    elif isinstance(value, types.FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        used = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (each for each in (*cells, *used) if isinstance(each, torch.Generator))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty one raises)
    except ValueError:
        return False
    return True


def _defaults(device: torch.device) -> Iterator[torch.Generator]:
    yield torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        yield torch.cuda.default_generators[index]
