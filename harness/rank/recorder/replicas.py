"""Replica agreement: ranks that hold the same shard of the same tensor must hold the same bits.

Parameters, reduced gradients, optimizer state and buffers are compared by 64-bit digests
(``converge_harness.rank.recorder.bits``). Which tensors have copies, and where, is determined once
from names and placements. Shards on one rank only are skipped, so with FSDP alone all parameters
are.

The comparison is a single reduction for any world size: the smallest and the largest digest of
every shard with copies. Only if the two differ, a second exchange finds which ranks hold equal
bits, and along which mesh dimensions they differ. No tensor is gathered.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.bits import bit_digests, mix_
from converge_harness.rank.recorder.fetched_shard import FetchedShard
from converge_harness.rank.recorder.grad_norm import ShardKey, shard_key
from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.post_step_state import states_of
from converge_harness.run_folder.metrics import DisagreementDocument, ReplicasDocument

if TYPE_CHECKING:
    from converge_harness.rank.recorder.trainer_view import TrainerView


KINDS = ("parameter", "gradient", "optimizer state", "buffer")
LISTED = 20
"""At most so many disagreeing tensors of a kind are named; the others are only counted."""

CopyKey = tuple[ShardKey, tuple[int, ...]]
"""Shard key; local shape of a plain tensor, () for a DTensor."""

_ABSENT = 0
"""The digest of a missing gradient or optimizer state."""
_NOT_HELD = (1 << 63) - 1
"""A rank's value in the minimum for shards that it does not hold."""


class _Copy(NamedTuple):
    """A tensor on this rank of which another rank, or another model part, has a copy."""

    shard: int
    """Index of its shard in the table of its kind, the same on all ranks."""
    name: str
    tensor: torch.Tensor


class _Digests(NamedTuple):
    """Digests of tensors of one kind on this rank."""

    copies: Sequence[int]
    """The copy of each."""
    labels: Sequence[str]
    """Name of the optimizer state; empty for other kinds."""
    values: torch.Tensor
    """int64."""


_NOTHING = _Digests((), (), torch.zeros(0, dtype=torch.int64))


class _Table(NamedTuple):
    """All shards with copies, of parameters or of buffers."""

    names: tuple[str, ...]
    """Per shard, its tensor's canonical name; sorted, so that shards of a tensor are adjacent."""
    mine: tuple[_Copy, ...]


class ReplicaCheck:
    """Compares this rank's copies with those of all ranks.

    The constructor and every ``finish`` are collective over the world.
    """

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        parameters = view.copies
        if parameters is None:
            parameters = [
                (canonical(name), parameter)
                for part in view.model_parts
                for name, parameter in part.named_parameters()
            ]
        buffers = [
            (canonical(name), buffer)
            for part in view.model_parts
            for name, buffer in part.named_buffers()
        ]
        tensors = [tensor for _, tensor in (*parameters, *buffers)]
        self._coordinates = rank_coordinates(view, tensors)
        self._parameters, self._buffers = _tables(parameters, buffers)
        count = len(self._parameters.names)
        # One slot per shard and kind, in the order of KINDS; the same on all ranks.
        self._first = (0, count, 2 * count, 3 * count, 3 * count + len(self._buffers.names))
        of_kind = (*[self._parameters.mine] * 3, self._buffers.mine)
        self._copies = [
            (first + copy.shard, copy)
            for first, copies in zip(self._first[:-1], of_kind, strict=True)
            for copy in copies
        ]
        """Slot and tensor of every copy on this rank, once per kind, in the order of KINDS."""
        self._gradients = _NOTHING

    def gradients(self) -> None:
        """Digest the gradients of shards that have copies. No collective happens here."""
        self._gradients = self._digests(
            "gradient",
            [
                (place, "", copy.tensor.grad)
                for place, copy in enumerate(self._parameters.mine)
                if copy.tensor.grad is not None
            ],
        )

    def finish(self, step: int) -> ReplicasDocument:
        """Compare all copies; return the ``replicas`` line of ``metrics.jsonl``, on every rank.

        Gradients are those of the latest call of ``gradients`` since the last ``finish``.
        """
        seen = [
            self._digests("parameter", _tensors(self._parameters)),
            self._gradients,
            self._digests("optimizer state", list(self._states())) if step > 0 else _NOTHING,
            self._digests("buffer", _tensors(self._buffers)),
        ]
        self._gradients = _NOTHING
        compared, differing = self._compare(seen)
        tensors: dict[tuple[int, str], list[int]] = defaultdict(list)
        for slot in differing:
            tensors[self._tensor_of(slot)].append(slot)
        ranked = sorted(tensors.items())
        listed = {
            tensor: slots
            for kind in range(len(KINDS))
            for tensor, slots in [each for each in ranked if each[0][0] == kind][:LISTED]
        }
        return {
            "step": step,
            "compared": dict(zip(KINDS, compared, strict=True)),
            "count": len(tensors),
            "disagreements": self._explain(listed, seen) if listed else [],
        }

    def _states(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Index of the parameter with copies, name and tensor of its optimizer states."""
        state_of = states_of(self._view.optimizers)
        for place, copy in enumerate(self._parameters.mine):
            for name, value in state_of.get(id(copy.tensor), {}).items():
                if isinstance(value, torch.Tensor | FetchedShard):
                    yield place, str(name), value
                elif isinstance(value, int | float):
                    yield place, str(name), torch.tensor(value, dtype=torch.float64)

    def _digests(self, kind: str, tensors: Sequence[tuple[int, str, torch.Tensor]]) -> _Digests:
        """Tensors of one kind: (index in the kind's table, state's name or empty, tensor)."""
        places, labels, values = zip(*tensors, strict=True) if tensors else ((), (), ())
        first = KINDS.index(kind) * len(self._parameters.mine)
        return _Digests(
            [first + place for place in places], labels, bit_digests(values, self._view.device)
        )

    def _compare(self, seen: Sequence[_Digests]) -> tuple[list[int], list[int]]:
        """Compared shards per kind, and the slots whose digests are not all the same."""
        slots = self._first[-1]
        if slots == 0:
            return [0] * len(KINDS), []
        # ~ reverses the order, so one minimum over the ranks also finds the largest digest.
        extremes = self._extremes(seen)
        world.minimum_(extremes)
        smallest, largest = extremes[:slots], ~extremes[slots:]
        differs = smallest != largest
        there = differs | (smallest != _ABSENT)
        compared = [
            int(there[begin:end].sum())
            for begin, end in zip(self._first[:-1], self._first[1:], strict=True)
        ]
        return compared, differs.nonzero().flatten().tolist()

    def _extremes(self, seen: Sequence[_Digests]) -> torch.Tensor:
        """int64: per slot the smallest digest, then per slot the smallest bitwise inverse."""
        slots, device = self._first[-1], self._view.device
        result = torch.full((2 * slots,), _NOT_HELD, dtype=torch.int64, device=device)
        digests = torch.full((len(self._copies),), _ABSENT, dtype=torch.int64, device=device)
        for copies, labels, values in seen:
            if copies:
                salt = torch.tensor([_salt(label) for label in labels], device=device)
                digests.index_add_(0, torch.tensor(copies, device=device), mix_(values + salt))
        where = torch.tensor([slot for slot, _ in self._copies], dtype=torch.int64, device=device)
        result[:slots].scatter_reduce_(0, where, digests, "amin")
        result[slots:].scatter_reduce_(0, where, ~digests, "amin")
        return result

    def _tensor_of(self, slot: int) -> tuple[int, str]:
        """Number of the kind, and name, of the tensor whose shard a slot is."""
        kind = max(number for number in range(len(KINDS)) if self._first[number] <= slot)
        table = self._buffers if KINDS[kind] == "buffer" else self._parameters
        return kind, table.names[slot - self._first[kind]]

    def _explain(
        self, listed: Mapping[tuple[int, str], Sequence[int]], seen: Sequence[_Digests]
    ) -> list[DisagreementDocument]:
        """The disagreements, in detail. Collective over the world."""
        wanted = {slot for slots in listed.values() for slot in slots}
        there: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for copies, labels, values in seen:
            for copy, label, digest in zip(copies, labels, values.tolist(), strict=True):
                there[self._copies[copy][0]].add((label, digest))
        mine = Holder(
            self._coordinates,
            {
                slot: HeldShard(mesh_coordinates(copy.tensor), frozenset(there[slot]))
                for slot, copy in self._copies
                if slot in wanted
            },
        )
        everyone = world.everyones(mine)
        return [
            disagreement(KINDS[kind], name, slots, everyone)
            for (kind, name), slots in listed.items()
        ]


def _tensors(table: _Table) -> list[tuple[int, str, torch.Tensor]]:
    """Index, empty name, and tensor of this rank's copies."""
    return [(place, "", copy.tensor) for place, copy in enumerate(table.mine)]


def _tables(
    parameters: Sequence[tuple[str, torch.Tensor]], buffers: Sequence[tuple[str, torch.Tensor]]
) -> tuple[_Table, _Table]:
    """Which shards have copies. Collective over the world."""
    mine = ([_copy_key(*item) for item in parameters], [_copy_key(*item) for item in buffers])
    everyone = world.everyones(mine)
    return (
        _table(parameters, mine[0], (keys for keys, _ in everyone)),
        _table(buffers, mine[1], (keys for _, keys in everyone)),
    )


def _table(
    tensors: Sequence[tuple[str, torch.Tensor]],
    mine: Sequence[CopyKey],
    everyone: Iterable[Sequence[CopyKey]],
) -> _Table:
    holders = Counter(key for keys in everyone for key in keys)
    shared = sorted(key for key, count in holders.items() if count > 1)
    index = {key: position for position, key in enumerate(shared)}
    return _Table(
        tuple(name for (name, _), _ in shared),
        tuple(
            _Copy(index[key], name, tensor)
            for key, (name, tensor) in zip(mine, tensors, strict=True)
            if key in index
        ),
    )


def _copy_key(name: str, tensor: torch.Tensor) -> CopyKey:
    """A key that is equal wherever the same shard of the same tensor is held.

    A parameter has the same kind of mesh on every rank, so names of mesh dimensions have one
    meaning within a parameter's keys, even if they have another for other parameters (experts are
    on another mesh). Plain tensors with different local shapes are manual shards, not copies.
    """
    shape = () if isinstance(tensor, DTensor | FetchedShard) else tuple(tensor.shape)
    return shard_key(name, tensor), shape


def _salt(label: str) -> int:
    """64 bits of a name, so that swapped optimizer states do not look equal."""
    digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """One rank's copy of a disagreeing shard."""

    own: Mapping[str, int]
    """The rank's coordinates on the tensor's own mesh."""
    digests: frozenset[tuple[str, int]]
    """(name of the optimizer state or empty, digest); empty if there is nothing."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One rank's copies of the disagreeing shards."""

    coordinates: Mapping[str, int]
    """The rank's coordinates on every known mesh dimension."""
    shards: Mapping[int, HeldShard] = field(default_factory=dict)
    """By slot (the same on all ranks), the shards that the rank holds."""


def disagreement(
    kind: str, name: str, slots: Sequence[int], everyone: Sequence[Holder]
) -> DisagreementDocument:
    """A tensor's entry in the ``replicas`` line, from all ranks in order.

    ``slots`` are the tensor's disagreeing shards. Ranks of a group hold the same bits of the same
    shard.
    """
    groups: list[list[int]] = []
    group_of: dict[tuple[int, int], int] = {}
    states: set[str] = set()
    for slot in slots:
        ranks_with: dict[frozenset[tuple[str, int]], list[int]] = defaultdict(list)
        for rank, holder in enumerate(everyone):
            if slot in holder.shards:
                ranks_with[holder.shards[slot].digests].append(rank)
        agreed = frozenset.intersection(*ranks_with)
        for digests, ranks in ranks_with.items():
            group_of |= {(slot, rank): len(groups) for rank in ranks}
            groups.append(ranks)
            states |= {state for state, _ in digests - agreed if state}
    places = {(slot, rank): _place(everyone[rank], slot) for slot, rank in group_of}
    entry: DisagreementDocument = {
        "kind": kind,
        "tensor": name,
        "mesh_dims": list(_dims_that_tell(group_of, places)),
        "groups": sorted(groups),
    }
    if states:
        entry["states"] = sorted(states)
    return entry


def rank_coordinates(view: TrainerView, tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """This rank's coordinates on every mesh dimension known from its tensors and its trainer."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found |= mesh_coordinates(tensor)
    if view.tp_group is not None:
        found.setdefault("tp", view.tp_rank)
    # DDP's parameters are on no mesh; then the data-parallel ranks are the replicas.
    found.setdefault("dp_replicate", view.dp_rank)
    return found


def mesh_coordinates(tensor: torch.Tensor) -> dict[str, int]:
    """A rank's coordinates on the dimensions of a DTensor's mesh that have more than one rank."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    places = zip(names, mesh.get_coordinate() or (), strict=False)
    return {name: place for dim, (name, place) in enumerate(places) if mesh.size(dim) > 1}


def _place(holder: Holder, slot: int) -> dict[str, int]:
    """A copy's coordinates, those on the tensor's own mesh first."""
    own = holder.shards[slot].own
    return {**own, **{dim: at for dim, at in holder.coordinates.items() if dim not in own}}


def _dims_that_tell(
    group_of: Mapping[tuple[int, int], int], places: Mapping[tuple[int, int], Mapping[str, int]]
) -> tuple[str, ...]:
    """The fewest mesh dimensions whose coordinates determine the group of a (slot, rank).

    Empty if the known ones do not, for example if pipeline stages hold different copies of a
    buffer.
    """
    dims = tuple(dict.fromkeys(dim for place in places.values() for dim in place))
    for size in range(1, len(dims) + 1):
        for chosen in combinations(dims, size):
            groups_seen: dict[tuple[int, ...], int] = {}
            if all(
                groups_seen.setdefault(
                    (copy[0], *(places[copy].get(dim, -1) for dim in chosen)), group
                )
                == group
                for copy, group in group_of.items()
            ):
                return chosen
    return ()
