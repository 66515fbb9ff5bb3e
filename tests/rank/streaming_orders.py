"""The order in which MosaicML Streaming's loader gives samples to forked ranks, without a model."""

import json
import tempfile
from itertools import chain
from pathlib import Path

import torch.distributed as dist
from gloo_ranks import run_on_ranks

GLOBAL_BATCH = 8
SEQ_LEN = 128


class Orders:
    """Global batches of a corpus, each a sorted list of its samples' hashes."""

    def __init__(self, folder, data):
        self.folder = folder
        self.data = data

    def steps(self, degree, steps, *, state=None, local_batch_size=None, **settings):
        """Read steps on so many ranks, from a state; returns them and the state afterwards."""
        local = local_batch_size or GLOBAL_BATCH // degree
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            settings = {"folder": str(self.data), "locks": f"{folder}/locks", **settings}
            result = Path(folder) / "result.json"
            run_on_ranks(_read, degree, settings, local, steps, state, result)
            read = json.loads(result.read_text())
        return read["batches"], read["state"]

    def elastic(self, segments, **settings):
        """Segments of (degree, steps), each resumed from the state of the one before."""
        batches, state = [], None
        for degree, steps in segments:
            more, state = self.steps(degree, steps, state=state, **settings)
            batches += more
        return batches


def _read(settings, local_batch_size, steps, state, result):
    from converge_harness.rank.titan.v0_3.streaming_data import StreamingLoader

    degree = dist.get_world_size()
    loader = StreamingLoader(
        StreamingLoader.Config(**settings),
        dp_world_size=degree,
        dp_rank=dist.get_rank(),
        seq_len=SEQ_LEN,
        local_batch_size=local_batch_size,
    )
    loader.state_dict()  # as a checkpoint's load asks for it before it gives one
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    mine = []
    for _ in range(steps):
        step = []
        for _ in range(GLOBAL_BATCH // (local_batch_size * degree)):
            inputs, _labels = next(batches)
            step += [hash(tuple(sample)) for sample in inputs["input"].tolist()]
        mine.append(step)
    everyone = [None] * degree
    dist.all_gather_object(everyone, mine)
    state = loader.state_dict()
    if dist.get_rank() == 0:
        whole = [sorted(chain.from_iterable(parts)) for parts in zip(*everyone, strict=True)]
        result.write_text(json.dumps({"batches": whole, "state": state}))
