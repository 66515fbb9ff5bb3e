"""Runs in several passes: each by itself, and the one curve that they make."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pass_files import JOB, STEPS, step, write_job, write_pass, write_state
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.model import (
    Fault,
    FaultKind,
    Kind,
    Loader,
    Pass,
    Recovery,
    RestartOwner,
    Struck,
)
from converge_harness.readers import read_curves, read_run, read_spec
from converge_harness.readers.points import last_values
from converge_harness.readers.run_folder.arrays import read_state
from converge_harness.readers.run_folder.metrics import Metrics
from converge_harness.readers.run_folder.passes import PassEvidence, merge


@pytest.fixture
def killed(tmp_path):
    """Killed in step 7, resumed from step 4; a pass in between died before it had loaded."""
    folder = write_job(tmp_path / "resized-abc")
    first = write_pass(folder, 1, 0, [step(n, loss=5.0 if n > 4 else 6.0) for n in range(1, 7)])
    write_state(first, "saved", 4)
    file(first / "state", "saved-step-00000004.json", '{"schema": 1, "files": {}}')
    write_pass(folder, 2, None, [])
    last = write_pass(folder, 3, 4, [step(n, loss=7.0) for n in range(5, STEPS + 1)], end=STEPS)
    write_state(last, "loaded", 4)
    write_state(last, "saved", 8)
    fault = {"index": 0, "kind": "kill", "step": 7, "at": 1006.5, "pass": 1, "torn": False}
    file(folder / "faults", "0.json", json.dumps({"schema": 1, **fault, "rank": 1}))
    file(folder / "faults", "0.over.json", "{}")
    return folder


def test_passes_are_kept_apart(killed):
    first, early, last = read_run(killed).passes
    assert (first.loaded_step, first.steps.tolist(), first.ended) == (0, [1, 2, 3, 4, 5, 6], False)
    assert (early.loaded_step, early.started, early.steps.size, early.ended) == (
        None,
        None,
        0,
        False,
    )
    assert (last.loaded_step, last.started, last.ended) == (4, 1000.0, True)
    assert [each.number for each in (first, early, last)] == [1, 2, 3]
    assert last.signals["at"][0] == 1005.0
    assert first.loaded is None
    assert [sample.step for sample in first.saved] == [4]
    assert (first.whole, last.whole) == ((4,), ())
    assert last.loaded is not None
    assert last.loaded.lr == 1e-3
    assert (last.loaded.tokens_seen, last.loaded.samples_consumed) == (4096, None)
    assert last.loaded.state_sketch.shape == (2, 1, 64)


def test_passes_make_one_curve_of_what_the_last_that_trained_a_step_left(killed):
    evidence = read_run(killed)
    assert evidence.steps.tolist() == list(range(1, STEPS + 1))
    assert evidence.signals["loss"] == (6.0,) * 4 + (7.0,) * 8
    assert evidence.batch_digests == tuple(f"{n:016x}" for n in range(1, STEPS + 1))
    assert evidence.batch_agrees == (True,) * STEPS
    assert evidence.replayed == (5, 6)
    assert evidence.replay_conflicts == ()
    assert (evidence.complete, evidence.expected_steps) == (True, STEPS)
    assert evidence.struck == (Struck(0, "kill", 7, 1006.5, 1, rank=1),)
    assert read_curves(killed).steps.tolist() == evidence.steps.tolist()


def masks_of(rank_0):
    return {"dropout_masks": {"units": [64], "kept": [32], "sums": [rank_0], "shared": None}}


def test_what_is_drawn_is_of_the_pass_that_counts(tmp_path):
    folder = write_job(tmp_path)
    drew = {"random_shared": False}
    first = [step(n, random_state=f"{n}", **drew, **masks_of("first")) for n in range(1, 4)]
    write_pass(folder, 1, 0, first)
    shuffled = {"python_random_state": "p"}
    lines = [step(3, random_state="3 b", **drew, **shuffled)]
    lines += [step(4, random_state="4 b", **drew, **shuffled, **masks_of("second"))]
    second = write_pass(folder, 2, 2, lines)
    write_pass(folder, 3, 4, [step(5)])  # as by an older version
    write_state(second, "loaded", 2, random_states=np.array(["aa", "bb"]))
    evidence = read_run(folder)
    assert evidence.random_states == ("1", "2", "3 b", "4 b", None)
    assert evidence.random_shared == (False, False, False, False, None)
    assert evidence.global_random_states == {"python": (None, None, "p", "p", None)}
    assert [(each.step, *each.sums) for each in evidence.masks] == [
        (1, "first"),
        (2, "first"),
        (4, "second"),
    ]
    assert [each.random_states for each in evidence.passes] == [
        ("1", "2", "3"),
        ("3 b", "4 b"),
        (),
    ]
    loaded = evidence.passes[1].loaded
    assert loaded is not None
    assert loaded.random_states == ("aa", "bb")


def test_steps_that_a_resume_went_back_behind_are_no_part_of_the_curve(tmp_path):
    folder = write_job(tmp_path)
    write_pass(folder, 1, 0, [step(n, problems=["odd"]) for n in range(1, 10)])
    write_pass(folder, 2, 4, [step(5, grads_missing_names=["norm.weight"])])
    evidence = read_run(folder)
    assert evidence.steps.tolist() == [1, 2, 3, 4, 5]
    assert not evidence.complete
    assert evidence.grads_missing == ("norm.weight",)
    assert evidence.problems == tuple(f"step {n}: odd" for n in (1, 2, 3, 4))
    assert evidence.replayed == (5,)


def test_replicas_and_what_ran_are_those_of_the_passes_that_count(tmp_path):
    def replicas(number, count):
        one = {"kind": "parameter", "tensor": "norm.weight", "mesh_dims": [], "groups": [[0], [1]]}
        listed = [one] * count
        line = {"kind": "replicas", "step": number, "compared": {"parameter": 2}}
        return {**line, "count": count, "disagreements": listed}

    folder = write_job(tmp_path)
    lines = [
        replicas(0, 0),
        step(1),
        replicas(1, 0),
        *(step(n) for n in (2, 3, 4, 5)),
        replicas(5, 1),
    ]
    first = write_pass(folder, 1, 0, lines)
    file(first, "in_force.json", '{"schema": 1, "param_dtype": "float32"}')
    second = write_pass(folder, 2, 4, [replicas(4, 1), step(5), replicas(5, 0)])
    file(second, "in_force.json", '{"schema": 1, "param_dtype": "bfloat16"}')
    evidence = read_run(folder)
    assert [(sample.step, sample.count) for sample in evidence.replicas] == [(0, 0), (1, 0), (5, 0)]
    assert evidence.in_force.param_dtype == "float32"
    assert evidence.passes[1].in_force.param_dtype == "bfloat16"


def test_a_run_is_complete_when_its_last_pass_was_meant_to_end_it(tmp_path):
    folder = write_job(tmp_path)
    write_pass(folder, 1, 0, [step(n) for n in range(1, 5)], end=4)
    assert not read_run(folder).complete
    write_pass(folder, 2, 4, [step(n) for n in range(5, STEPS + 1)], end=STEPS)
    assert read_run(folder).complete


def test_a_pass_that_died_before_its_header_is_left_out(tmp_path):
    folder = write_job(tmp_path)
    write_pass(folder, 1, 0, [step(1)])
    (folder / "passes" / "002").mkdir()
    file(folder / "passes" / "003", "metrics.jsonl.part", '{"schema": 1, "ki')
    assert [each.number for each in read_run(folder).passes] == [1]


def test_a_step_twice_in_one_pass_is_no_replay(tmp_path):
    folder = write_job(tmp_path)
    write_pass(folder, 1, 0, [step(1), step(1, loss=2.0), step(2), step(2)])
    evidence = read_run(folder)
    assert tuple(map(str, evidence.replay_conflicts)) == (
        "step 1 twice in pass 1: loss 8.875, then 2.0",
        "step 2 twice in pass 1: with equal values",
    )


def test_a_pass_that_loaded_something_else_says_so(tmp_path):
    folder = write_job(tmp_path)
    loaded = {"kind": "loaded", "step": None, "at": 1000.0}
    write_pass(folder, 1, None, [loaded, step(1)])
    (only,) = read_run(folder).passes
    assert (only.loaded_step, only.started, only.steps.tolist()) == (None, 1000.0, [1])


def test_a_job_says_how_its_run_is_to_recover(tmp_path):
    recovery = {
        "checkpoint_every": 3,
        "restarts": "torchrun",
        "max_restarts": 1,
        "within_s": 20.0,
        "nodes": [1, 3],
        "faults": [{"kind": "agent_loss", "step": 7, "rank": 0, "node": 2, "torn": "death"}],
    }
    spec = read_spec(write_job(tmp_path, recovery=recovery))
    fault = Fault(FaultKind.AGENT_LOSS, 7, node=2)
    asked = Recovery((fault,), 3, RestartOwner.TORCHRUN, 1, within_s=20.0, nodes=(1, 3))
    assert (spec.kind, spec.recovery) == (Kind.FAULT, asked)


REQUEUE = {
    "checkpoint_every": 4,
    "restarts": "cluster",
    "max_restarts": 3,
    "within_s": 120.0,
    "nodes": [1, 1],
    "faults": [],
}


def test_a_job_that_a_scheduler_may_requeue_is_no_fault_set(tmp_path):
    folder = write_job(tmp_path, role="control", faults=[], recovery=REQUEUE)
    spec = read_spec(folder)
    assert (spec.kind, spec.segments) == (Kind.PARALLEL, ())
    assert spec.recovery == Recovery((), 4, RestartOwner.CLUSTER)
    write_pass(folder, 1, 0, [step(n) for n in range(1, 7)])
    evidence = read_run(folder)
    assert (evidence.restarts, evidence.interrupted) == (RestartOwner.CLUSTER, False)
    write_pass(folder, 2, 4, [step(n) for n in range(5, STEPS + 1)], end=STEPS)
    evidence = read_run(folder)
    assert evidence.interrupted
    assert evidence.complete
    assert evidence.replayed == (5, 6)


def test_passes_of_a_script_are_not_a_schedulers(killed):
    assert read_run(killed).restarts is None  # older jobs do not say
    write_job(killed, recovery={**REQUEUE, "restarts": "torchrun", "faults": JOB["faults"]})
    evidence = read_run(killed)
    assert (evidence.restarts, evidence.interrupted) == (RestartOwner.TORCHRUN, False)


def test_an_unknown_owner_of_restarts_is_named(tmp_path):
    folder = write_job(tmp_path, recovery={**REQUEUE, "restarts": "luck"})
    for read in (read_run, read_spec):
        with pytest.raises(EvidenceError, match="luck"):
            read(folder)


def test_what_a_job_says_of_segments_faults_and_loader(tmp_path):
    spec = read_spec(write_job(tmp_path / "faults"))
    assert (spec.kind, spec.segments) == (Kind.FAULT, ())
    assert spec.train_config.loader is Loader.TORCHTITAN
    assert [(fault.kind, fault.step, fault.rank) for fault in spec.recovery.faults] == [
        (FaultKind.KILL, 7, 1)
    ]
    assert (spec.recovery.checkpoint_every, spec.recovery.nodes) == (4, (1, 1))
    part = {"until": 12, "parallelism": {"pp": 2}, "local_batch_size": 2}
    segments = [{**part, "pipeline_schedule": "1F1B"}]
    job = {"segments": segments, "checkpoint_every": None, "faults": [], "elastic_nodes": False}
    spec = read_spec(write_job(tmp_path / "elastic", **job))
    assert (spec.kind, spec.recovery) == (Kind.ELASTIC, None)
    assert (spec.segments[0].until, spec.segments[0].parallelism.pp) == (12, 2)
    assert read_spec(write_job(tmp_path / "nodes", elastic_nodes=True)).recovery.nodes == (1, 2)
    nothing = dict.fromkeys(("segments", "checkpoint_every", "faults", "elastic_nodes"))
    assert read_spec(write_job(tmp_path / "plain", **nothing)).kind is Kind.PARALLEL


# ------------------------------------------------------------------- damage


def test_metrics_beside_passes_are_refused(killed):
    file(killed, "metrics.jsonl", "")
    with pytest.raises(EvidenceError, match=r"has metrics\.jsonl and passes/, so two runs"):
        read_run(killed)


def test_passes_without_their_job_are_refused(killed):
    (killed / "job.json").unlink()
    for read in (read_run, read_curves, read_spec):
        with pytest.raises(EvidenceError, match=r"job\.json: is missing"):
            read(killed)
    with pytest.raises(EvidenceError, match="give its whole run folder"):
        read_curves(killed / "passes" / "001" / "metrics.jsonl.part")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"header": {"identity": "xyz"}}, "its metrics are of job xyz"),
        ({"name": "009"}, "its metrics are of pass 2, which is not the folder's name"),
        ({"header": {"pass": None}}, "its metrics are of pass None"),
        ({"header": {"world_size": None}}, "has no world_size"),
        ({"header": {"segment": "one"}}, "segment is 'one', which is not a count"),
        ({"loaded": -4}, "step is -4, which is not a step number"),
    ],
)
def test_a_pass_that_contradicts_its_folder_is_refused(tmp_path, damage, words):
    folder = write_job(tmp_path)
    write_pass(folder, 1, 0, [step(1)])
    write_pass(folder, 2, damage.pop("loaded", 1), [step(2)], **damage)
    with pytest.raises(EvidenceError, match=words):
        read_run(folder)


def test_state_of_another_step_than_the_metrics_say_is_refused(tmp_path):
    folder = write_job(tmp_path)
    where = write_pass(folder, 1, 4, [step(5)])
    write_state(where, "loaded", 8)
    with pytest.raises(EvidenceError, match="loaded at step 8, but its metrics name step 4"):
        read_run(folder)
    write_state(where, "loaded", 4)
    with pytest.raises(EvidenceError, match="but a pass loads once"):
        read_run(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_sketch": np.ones((2, 64))}, "state_sketch: has shape"),
        ({"state_sketch": np.ones((2, 2, 64))}, r"must be \(2, 1, 64\)"),
        ({"state_sketch": np.zeros((2, 1, 64))}, "is zero for a state whose norm is not 0"),
        ({"state_norm": np.array([[-1.0], [0.0]])}, "state_norm: a negative number"),
        ({"lr": None}, "lr: is missing"),
        ({"trainer_step": np.array(-1)}, "trainer_step: is -1, a negative count"),
        ({"tokens_seen": np.array(-2)}, "tokens_seen: is -2"),
        ({"step": np.array(5)}, r"its name should be loaded-step-00000005\.npz"),
        ({"names": np.array(["b", "a"])}, "not unique and sorted"),
        ({"parameters_sketch": np.ones((2, 8))}, "has 8 projections, must be 64"),
        ({"schema": np.array(2)}, "newer converge"),
    ],
)
def test_damaged_state_is_refused_with_file_and_key(tmp_path, changes, words):
    path = write_state(tmp_path, "loaded", 4, **changes)
    with pytest.raises(Exception, match=words) as caught:
        read_state(path, "loaded-step")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"index": 1, "kind": "kill", "step": 7, "at": 1.0}, "index is 1"),
        ({"index": 0, "kind": "kill", "step": 7}, "lacks at"),
        ({"index": 0, "kind": 3, "step": 7, "at": 1.0}, "kind is 3, which is not a string"),
    ],
)
def test_a_fault_that_does_not_say_what_struck_is_refused(killed, fault, words):
    file(killed / "faults", "0.json", json.dumps({"schema": 1, **fault}))
    with pytest.raises(EvidenceError, match=words):
        read_run(killed)


# --------------------------------------------------------------- any cuts at all


def a_pass(number, loaded, last):
    """A pass whose steps come out as they always do."""
    steps = np.arange(loaded + 1, last + 1)
    lines = [step(n) for n in steps.tolist()]
    each = Pass(
        number=number,
        segment=None,
        world_size=2,
        loaded_step=loaded,
        started=0.0,
        steps=steps,
        signals={},
        batch_digests=tuple(line["batch_digest"] for line in lines),
        ended=last == STEPS,
    )
    end = STEPS if last == STEPS else None
    agrees = (True,) * len(lines)
    values = last_values({})
    return PassEvidence(
        each, Metrics("abc", values, each.batch_digests, agrees, (), (), (), end, STEPS), ()
    )


@given(st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(0, STEPS - 1)), max_size=6))
def test_the_curve_does_not_depend_on_where_a_run_was_cut(cuts):
    """Each cut: a pass dies after a step, and the next starts at most there."""
    cut, loaded = [], 0
    for number, (died, back) in enumerate(cuts, start=1):
        last = max(loaded, died)
        cut.append(a_pass(number, loaded, last))
        loaded = min(back, last)
    cut.append(a_pass(len(cut) + 1, loaded, STEPS))
    merged = merge(cut, STEPS, name="r", source="r")
    whole = merge([a_pass(1, 0, STEPS)], STEPS, name="r", source="r")
    assert merged.steps.tolist() == whole.steps.tolist()
    assert merged.batch_digests == whole.batch_digests
    assert (merged.complete, merged.replay_conflicts) == (True, ())
