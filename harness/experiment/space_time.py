"""``kind = "space_time"``: sets with the same product of data-parallel degree and accumulation.

From ``product = 4`` and ``pp = [1, 2]``, named after the table: FSDP with every divisor and the
remaining accumulation (``st_fsdp4_acc1 st_fsdp2_acc2 st_fsdp1_acc4``); the same in pipelines whose
ranks do not exceed the product (``st_fsdp2_pp2_acc2 st_fsdp1_pp2_acc4``); and without accumulation
all ways of distributing the parameters: replicated (``st_ddp4``), in replicated groups
(``st_hsdp2x2``), and sharded with and without gathering the parameters again in the backward pass
(``st_fsdp4_zero3``, ``st_fsdp4_zero2``: what ZeRO-3 and ZeRO-2 keep in memory).

Of a trainer that accumulates under DDP as well, DDP comes first (``st_ddp4_acc1 st_ddp2_acc2
st_ddp1_acc4``), and FSDP has no set of one rank of its own. Sets that a trainer cannot be told to
run are left out (``Trainer.why_left_out``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from converge_harness.errors import Problem
from converge_harness.experiment.tables import FixedTable, GeneratedTable, SpaceTimeTable
from converge_harness.model import (
    GLOBAL_BATCH,
    LOCAL_BATCH,
    RESHARD,
    ZERO_2,
    ZERO_3,
    Loader,
    SetSpec,
    Setting,
)
from converge_harness.toml import flatten, validate

GROUPS = 2
"""Replicas of the sharded model in the HSDP set."""


_SHORT = {"dp_shard": "fsdp", "dp_replicate": "ddp"}
"""By data-parallel degree, its name in the names of sets."""


def expand(
    table: SpaceTimeTable,
    accumulated: Sequence[str],
    where: Callable[[str], str],
    problems: list[Problem],
) -> Iterator[GeneratedTable]:
    """The sets of a table; contradictions are added to ``problems``.

    ``accumulated`` are the data-parallel degrees that are traded for accumulation.
    """
    asked = {key for key, _ in flatten(table.overrides)}
    if table.local_batch_size is not None and LOCAL_BATCH in asked:
        problems.append(Problem(where("local_batch_size"), f"is also set.{LOCAL_BATCH}"))
    if RESHARD in asked:
        problems.append(Problem(where(f"set.{RESHARD}"), "is what the generated sets vary"))
    if table.pipeline_schedule is not None and max(table.pp) == 1:
        problems.append(Problem(where("pipeline_schedule"), "needs a pp above 1"))
    for index, pp in enumerate(table.pp):
        if pp > table.product or pp in table.pp[:index]:
            wrong = "is named twice" if pp in table.pp[:index] else "leaves no data parallelism"
            problems.append(
                Problem(
                    where(f"pp[{index}]"),
                    f"{pp} {wrong}",
                    f"degrees from 1 to the product, {table.product}, each once",
                )
            )
    for name, degrees, reshard in _layouts(table, accumulated):
        written = _generated(table, f"{table.name}_{name}", degrees, reshard)
        generated = validate(GeneratedTable, written, where, problems)
        if generated is not None:
            yield generated


def hold_global_batch(
    table: GeneratedTable,
    spec: SetSpec,
    control: SetSpec,
    where: Callable[[str], str],
    problems: list[Problem],
) -> dict[str, Setting]:
    """The overrides of a generated set, with the global batch that follows from its product.

    Reasons why its samples are not the control's are added to ``problems``.
    """
    config = spec.train_config
    # A program of one's own reads its own data; with the probe, their order is judged.
    ours = spec.trainer.can.guided
    if ours and (config.data is None or config.loader is Loader.TORCHTITAN):
        problems.append(
            Problem(
                where("kind"),
                f"space_time needs [converge.data] in {config.path}, read by a loader whose order "
                "does not depend on the data-parallel degree: with other samples per step, or "
                "equally many valid tokens on every rank, it would test nothing",
                'loader = "converge" in [converge.data]',
            )
        )
    local = spec.setting(LOCAL_BATCH)
    if not isinstance(local, int):  # refused with the sizes of the set (harness/plan)
        return dict(spec.overrides)
    total = table.product * local
    made = f"{table.product} x local batch {local} = {total} samples per step"
    own = spec.setting(GLOBAL_BATCH, -1)
    wanted = _global_batch(control)
    if own not in (-1, total):
        problems.append(Problem(where("product"), f"{made}; {GLOBAL_BATCH} is {own}"))
    elif wanted not in (None, total):
        problems.append(
            Problem(where("product"), f"{made}; its control {control.name!r} has {wanted}")
        )
    return {**spec.overrides, GLOBAL_BATCH: total}


def _global_batch(control: SetSpec) -> int | None:
    """Samples per step; None if the sizes are wrong, which is reported elsewhere."""
    stated = control.setting(GLOBAL_BATCH, -1)
    local = control.setting(LOCAL_BATCH)
    if stated == -1 and isinstance(local, int):
        return local * control.parallelism.dp
    return stated if isinstance(stated, int) and stated > 0 else None


def _layouts(
    table: SpaceTimeTable, accumulated: Sequence[str]
) -> Iterator[tuple[str, dict[str, int], str | None]]:
    """Rest of the name, degrees, and when FSDP reshards."""
    product = table.product
    for degree in accumulated:
        fewest = 1 if degree == accumulated[0] else 2  # one rank is the same for all
        for pp in dict.fromkeys(table.pp):
            for dp in range(product, fewest - 1, -1):
                if product % dp == 0 and dp * pp <= product:
                    pipeline = f"_pp{pp}" if pp > 1 else ""
                    name = f"{_SHORT[degree]}{dp}{pipeline}_acc{product // dp}"
                    yield name, {degree: dp, "pp": pp}, None
    if "dp_replicate" not in accumulated:
        yield f"ddp{product}", {"dp_replicate": product}, None
    shards, rest = divmod(product, GROUPS)
    if shards > 1 and not rest:
        yield f"hsdp{GROUPS}x{shards}", {"dp_replicate": GROUPS, "dp_shard": shards}, None
    yield f"fsdp{product}_zero3", {"dp_shard": product}, ZERO_3
    yield f"fsdp{product}_zero2", {"dp_shard": product}, ZERO_2


def _generated(
    table: SpaceTimeTable, name: str, degrees: dict[str, int], reshard: str | None
) -> dict[str, Any]:
    """One set as a ``[[test]]`` table."""
    overrides: dict[str, Any] = dict(flatten(table.overrides))
    if table.local_batch_size is not None:
        overrides[LOCAL_BATCH] = table.local_batch_size
    if reshard is not None:
        overrides[RESHARD] = reshard
    return {
        **table.model_dump(include=set(FixedTable.model_fields), by_alias=True),
        "name": name,
        "control": table.control,
        "techniques": table.techniques,
        "parallelism": degrees,
        "pipeline_schedule": table.pipeline_schedule if degrees.get("pp", 1) > 1 else None,
        "spmd_backend": table.spmd_backend,
        "set": overrides,
        "product": table.product,
    }
