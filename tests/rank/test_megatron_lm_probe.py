"""The probe of Megatron-LM's loop, as far as no checkout is needed: its batches, and refusals."""

from types import SimpleNamespace

import pytest
from megatron_models import NEEDED, prepared_megatron

if not prepared_megatron():
    pytest.skip(NEEDED, allow_module_level=True)
import numpy as np
import torch
from probed_loop import write_job

from converge_harness.probe import ProbeError, megatron_lm
from converge_harness.probe.megatron_loop import (
    _Batches,
    _device_of,
    _require_readable,
    switched_off,
)
from converge_harness.rank.recorder.step_recorder import RankRow, measured


def batch(number):
    tokens = torch.full((1, 4), number)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(1, 4)}


def test_watch_does_nothing_unless_converge_started_the_program(monkeypatch):
    monkeypatch.delenv("CONVERGE_JOB", raising=False)
    megatron_lm.watch()


def test_a_program_without_megatron_lm_is_told_where_to_call_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_JOB", str(write_job(tmp_path / "run")))
    with pytest.raises(ProbeError, match=r"megatron\.training\.training cannot be imported"):
        megatron_lm.watch()


def test_a_rounding_repeat_is_refused(tmp_path, monkeypatch):
    path = write_job(tmp_path / "run", repeat="rounding", repeat_seed=1)
    monkeypatch.setenv("CONVERGE_JOB", str(path))
    with pytest.raises(ProbeError, match="rounds what modules compute otherwise"):
        megatron_lm.watch()


def test_a_switch_that_megatron_lm_turned_off_is_told():
    given = ["--tensor-model-parallel-size", "1", "--sequence-parallel", "--swiglu"]
    used = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "swiglu": True}
    assert switched_off(given, used) == ["--sequence-parallel"]
    assert switched_off([*given, "--no-rope-fusion"], {**used, "sequence_parallel": True}) == []
    # An argument with a value is no switch.
    assert switched_off(["--bf16", "false"], {"bf16": False}) == []
    # A program may be called without any, and set its arguments itself.
    assert switched_off([], {"bf16": False}) == []


def test_a_batch_that_is_looked_at_early_is_taken_once_and_in_order():
    taken = []
    batches = _Batches(map(batch, range(3)), lambda each: taken.append(int(each["tokens"][0, 0])))
    assert batches.next_tokens().tolist() == [[0] * 4]
    assert batches.next_tokens().tolist() == [[0] * 4]
    assert taken == []
    assert [int(each["tokens"][0, 0]) for each in batches] == taken == [0, 1, 2]


def test_a_batch_without_labels_is_refused_by_what_it_has():
    with pytest.raises(ProbeError, match=r"a batch is \['text'\], and has to be a mapping with"):
        next(_Batches(iter([{"text": torch.zeros(1, 4)}]), None))


def row(dp_rank, digest, *, reads):
    empty = RankRow(*[0.0] * len(RankRow._fields))
    return empty._replace(dp_rank=dp_rank, digest_low=digest, samples=bool(digest), reads=reads)


@pytest.mark.parametrize(
    ("rows", "agrees"),
    [
        ([row(0, 7, reads=True), row(0, 0, reads=False), row(1, 8, reads=True)], True),
        ([row(0, 7, reads=True), row(0, 0, reads=True), row(1, 8, reads=True)], False),
        ([row(0, 7, reads=True), row(0, 9, reads=True), row(1, 8, reads=True)], False),
        ([row(0, 7, reads=True), row(1, 0, reads=False)], False),
    ],
    ids=["one reads for two", "one read nothing", "two read other samples", "nobody read"],
)
def test_only_ranks_that_read_batches_have_to_agree(rows, agrees):
    found = measured(rows, np.zeros((len(rows), 0)), [], [], logits_optional=True)
    assert found["batch_agrees"] is agrees


def test_a_rank_without_parameters_is_refused():
    empty, layer = torch.nn.Module(), torch.nn.Linear(1, 1)
    assert _device_of([empty, layer]) == torch.device("cpu")
    with pytest.raises(ProbeError, match="this rank has no parameters"):
        _device_of([empty, empty])


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("use_mup", False, True),
        ("fp16", False, True),
        ("gtp_weight_remat_size", 1, 2),
        ("mtp_num_layers", None, 1),
    ],
)
def test_models_whose_entries_nobody_knows_are_refused(key, off, on):
    optimizer = SimpleNamespace(chained_optimizers=[])

    def gpt(value):
        config = SimpleNamespace(**{key: value})
        return SimpleNamespace(decoder=None, pre_process=True, vocab_size=8, config=config)

    with pytest.raises(ProbeError, match=key):
        _require_readable([gpt(on)], optimizer)
    _require_readable([gpt(off)], optimizer)
