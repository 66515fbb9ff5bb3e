"""The passes of a run that was resumed, each by itself: ``passes/NNN`` of its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.model import Pass, Struck, TensorSample
from harness.readers.documents import read_fault, read_in_force
from harness.readers.lines import fail
from harness.readers.metrics import Metrics, read_metrics
from harness.readers.state import read_loaded, read_saved, read_whole
from harness.readers.tensors import read_samples
from harness.run_folder.faults import REQUIRED, struck_files
from harness.run_folder.layout import METRICS_FILES, PASSES
from harness.run_folder.passes import passes_with_metrics


@dataclass(frozen=True, slots=True, eq=False)
class Life:
    """A pass, with what else its ranks left."""

    itself: Pass
    metrics: Metrics
    samples: tuple[TensorSample, ...]


def read_passes(folder: Path) -> tuple[Life, ...]:
    """The passes of a run folder in the order of their starts; empty for other runs.

    One that died before it wrote a header left nothing, and is left out. Raises EvidenceError for
    a folder that also holds metrics of its own, for files of a pass that contradict each other, and
    as ``read_metrics`` and ``read_state``; StoreError for newer files.
    """
    folders = passes_with_metrics(folder)
    own = next((name for name in METRICS_FILES if (folder / name).is_file()), None)
    if folders and own:
        fail(
            str(folder),
            f"holds {own} and {PASSES}/, so two runs; delete the folder and run the job again",
        )
    lives = [life for entry in folders if (life := _life(entry)) is not None]
    return tuple(sorted(lives, key=lambda life: life.itself.number))


def _life(folder: Path) -> Life | None:
    metrics = read_metrics(folder)
    where = str(folder)
    if metrics.identity is None and not metrics.settled.steps.size:
        return None
    if not folder.name.isdecimal() or metrics.number != int(folder.name):
        fail(where, f"its metrics are of pass {metrics.number}, which is not the folder's name")
    if metrics.world_size is None:
        fail(where, "the header of its metrics has no world_size; run the job again")
    loaded = read_loaded(folder)
    said = metrics.loaded
    if loaded is not None and said is not None and loaded.step != said.step:
        fail(where, f"state was loaded at step {loaded.step}, by its metrics at step {said.step}")
    return Life(
        Pass(
            number=metrics.number,
            segment=metrics.segment,
            world_size=metrics.world_size,
            loaded_step=said.step if said else None,
            started=said.at if said else None,
            steps=metrics.settled.steps,
            signals=metrics.settled.signals,
            batch_digests=metrics.batch_digests,
            ended=metrics.end is not None,
            in_force=read_in_force(folder),
            loaded=loaded,
            saved=read_saved(folder),
            whole=read_whole(folder),
        ),
        metrics,
        read_samples(folder),
    )


def read_struck(folder: Path) -> tuple[Struck, ...]:
    """Faults that happened, in the order of the script.

    Raises EvidenceError for a file that does not say what struck when, StoreError for a newer one.
    """
    return tuple(_struck(index, path) for index, path in struck_files(folder).items())


def _struck(index: int, path: Path) -> Struck:
    value = read_fault(path)
    missing = [key for key in REQUIRED if value.get(key) is None]
    if missing:
        fail(str(path), f"says nothing of {', '.join(missing)}; run the job again")
    if value["index"] != index:
        fail(str(path), f"index is {value['index']}, which is not the file's name")
    return Struck(
        index=value["index"],
        kind=value["kind"],
        step=value["step"],
        at=float(value["at"]),
        number=value.get("pass"),
        torn=bool(value.get("torn")),
        rank=value.get("rank"),
        node=value.get("node"),
    )
