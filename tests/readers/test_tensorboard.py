"""TensorBoard folders, written by TensorBoard's own writer."""

import struct
import sys

import numpy as np
import pytest
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.model import ReplayConflict
from converge_harness.readers import read_curves
from converge_harness.readers.foreign import tensorboard
from converge_harness.readers.foreign.crc32c import masked_crc32c

pytest.importorskip("tensorboard")


def write_events(folder, scalars, suffix="", summary_of=None):
    """Write scalars as TensorBoard stores them: tag to pairs of step and value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for tag, points in scalars.items():
        for step, value in points:
            content = summary_of(value) if summary_of else {"simple_value": value}
            summary = Summary(value=[Summary.Value(tag=tag, **content)])
            writer.add_event(Event(wall_time=100.0 + step, step=step, summary=summary))
    writer.close()
    return folder


def only_file(folder):
    (event_file,) = folder.iterdir()
    return event_file


def test_a_tensorboard_folder_keeps_every_step(tmp_path):
    count = 12_000  # the accumulator's own default would keep 10,000
    tags = {
        "loss_metrics/global_avg_loss": [(step, 8 / step) for step in range(1, count + 1)],
        "grad_norm": [(step, 0.5) for step in range(1, count + 1)],
        "lr/AdamW": [(1, 1e-3)],
        "validation_metrics/loss": [(count + 7, 1.0)],
    }
    write_events(tmp_path / "outputs" / "tb" / "20261101-1000", tags)
    evidence = read_curves(tmp_path / "outputs")
    assert evidence.name == "outputs"
    assert evidence.steps.tolist() == list(range(1, count + 1))
    assert evidence.signals["loss"][2] == pytest.approx(8 / 3)
    assert evidence.signals["grad_norm"] == (0.5,) * count
    assert evidence.signals["lr"][0] == pytest.approx(1e-3)
    assert evidence.signals["lr"][1] is None
    assert evidence.signals["seconds"][-1] == count - 1
    assert evidence.complete


def test_megatron_lms_tags_of_iterations_are_read_and_those_of_samples_are_not(tmp_path):
    tags = {"lm loss": [(1, 10.5), (2, 9.5)], "grad-norm": [(1, 3.0), (2, 2.5)]}
    tags["learning-rate"] = [(1, 1e-3), (2, 2e-3)]
    of_samples = {f"{tag} vs samples": [(32, 1.0), (64, 1.0)] for tag in tags}
    evidence = read_curves(write_events(tmp_path, tags | of_samples))
    assert evidence.steps.tolist() == [1, 2]
    assert evidence.signals["loss"] == (10.5, 9.5)
    assert evidence.signals["grad_norm"] == (3.0, 2.5)
    assert evidence.signals["lr"].values.tolist() == pytest.approx([1e-3, 2e-3])


def test_a_restart_that_replays_into_a_second_file(tmp_path):
    write_events(tmp_path, {"loss": [(1, 8.0), (2, 7.0), (3, 6.0)]}, suffix=".0")
    write_events(tmp_path, {"loss": [(2, 7.0), (3, 6.5), (4, 5.0)]}, suffix=".1")
    evidence = read_curves(tmp_path)
    assert evidence.steps.tolist() == [1, 2, 3, 4]
    assert evidence.signals["loss"] == (8.0, 7.0, 6.5, 5.0)
    assert evidence.replayed == (2, 3)
    assert evidence.replay_conflicts == (ReplayConflict(3, "loss 6.0, then 6.5"),)


def test_numbers_that_are_kept_as_tensors(tmp_path):
    from tensorboard.util.tensor_util import make_tensor_proto

    def tensor(value):
        return {"tensor": make_tensor_proto(value)}

    tags = {
        "loss": [(1, np.float32(8.5)), (2, np.float64(7.1))],
        "image": [(1, np.ones((2, 2), np.float32))],
        "note": [(1, "words")],
    }
    write_events(tmp_path, tags, summary_of=tensor)
    assert read_curves(tmp_path).signals["loss"] == (8.5, 7.1)
    with pytest.raises(EvidenceError, match=r"has no 'note' for grad_norm; it has 'loss'$"):
        read_curves(tmp_path, {"grad_norm": "note"})


def test_several_tensorboard_runs_are_ambiguous(tmp_path):
    for name in ("a", "b"):
        write_events(tmp_path / name, {"loss": [(1, 8.0)]})
    with pytest.raises(EvidenceError, match=r"it has 2 runs; give one: .*a, .*b"):
        read_curves(tmp_path)


def test_the_user_says_which_tag_is_the_loss(tmp_path):
    write_events(tmp_path, {"ce": [(1, 8.0)], "accuracy": [(1, 0.5)]})
    with pytest.raises(EvidenceError, match="no loss among 'ce', 'accuracy'"):
        read_curves(tmp_path)
    assert read_curves(tmp_path, {"loss": "ce"}).signals["loss"] == (8.0,)
    with pytest.raises(EvidenceError, match="has no 'cee' for loss; it has 'ce', 'accuracy'"):
        read_curves(tmp_path, {"loss": "cee"})


def test_a_file_that_a_killed_run_cut_is_incomplete(tmp_path):
    event_file = only_file(write_events(tmp_path, {"loss": [(1, 8.0), (2, 7.0), (3, 6.0)]}))
    event_file.write_bytes(event_file.read_bytes()[:-5])
    evidence = read_curves(tmp_path)
    assert evidence.steps.tolist() == [1, 2]
    assert not evidence.complete


def test_a_damaged_record_does_not_end_the_curve_unnoticed(tmp_path):
    event_file = only_file(write_events(tmp_path, {"loss": [(1, 8.0), (2, 7.0), (3, 6.0)]}))
    content = bytearray(event_file.read_bytes())
    content[-60] ^= 1
    event_file.write_bytes(bytes(content))
    with pytest.raises(EvidenceError, match=r"record 3 of 4 is damaged"):
        read_curves(event_file)


@pytest.mark.parametrize("record", [1, 2, 4], ids=["first", "second", "last"])
@pytest.mark.parametrize(("byte", "bit"), [(0, 1), (4, 1), (7, 128), (8, 1), (11, 128)])
def test_a_damaged_length_is_damage_and_no_killed_run(tmp_path, record, byte, bit):
    """Its own checksum tells, wherever the length points to."""
    event_file = only_file(write_events(tmp_path, {"loss": [(1, 8.0), (2, 7.0), (3, 6.0)]}))
    content = bytearray(event_file.read_bytes())
    at = 0
    for _ in range(record - 1):
        at += 16 + struct.unpack_from("<Q", content, at)[0]
    content[at + byte] ^= bit
    event_file.write_bytes(bytes(content))
    with pytest.raises(EvidenceError, match="is damaged"):
        read_curves(event_file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no loss among nothing"),
        (b"no events at all, but text of some length", "the record at byte 0 is damaged"),
    ],
)
def test_a_file_without_events_is_refused(tmp_path, content, said):
    with pytest.raises(EvidenceError, match=said):
        read_curves(file(tmp_path, "events.out.tfevents.1", content))


def test_without_tensorboard_the_message_says_what_to_install(tmp_path, monkeypatch):
    file(tmp_path, "events.out.tfevents.1", b"")
    module = "tensorboard.compat.proto.event_pb2"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EvidenceError, match=r"-m pip install 'converge-harness\[tensorboard\]'"):
        read_curves(tmp_path)


def by_tensorboard(event_file):
    """Tag to points of step, value and time, by TensorBoard's own loader."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    points = {}
    for event in LegacyEventFileLoader(str(event_file)).Load():
        for value in event.summary.value:
            kept = value.simple_value
            if value.HasField("tensor"):
                kept = float(make_ndarray(value.tensor))
            points.setdefault(value.tag, []).append((event.step, kept, event.wall_time))
    return points


def by_us(event_file):
    tags = {}
    assert tensorboard._read(event_file, event_file, tags)
    joined = {tag: tensorboard._joined(parts) for tag, parts in tags.items()}
    return {
        tag: list(zip(each.steps.tolist(), each.values, each.wall_times, strict=True))
        for tag, each in joined.items()
    }


def test_every_point_is_the_one_that_tensorboard_reads(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    generator = np.random.default_rng(1)
    tags = ["loss", "b", "grad_norm", "ünd", "", "x" * 90, "y" * 300, *(f"t{i}" for i in range(90))]
    writer = EventFileWriter(str(tmp_path))
    for step in (0, 1, 2, 127, 128, 2**14, 2**35, 2**55, 2**56 - 1, 2**56, 2**62, -1):
        for tag in tags:
            value = float(generator.normal())
            plain = Summary.Value(tag=tag, simple_value=value)
            tensor = Summary.Value(tag=tag, tensor=make_tensor_proto(np.float32(value)))
            for content in ([plain], [tensor], [plain, tensor, plain], []):
                summary = Summary(value=content)
                writer.add_event(Event(wall_time=1e9 + value, step=step, summary=summary))
    writer.close()
    expected = by_tensorboard(only_file(tmp_path))
    assert set(expected) == set(tags)
    assert by_us(only_file(tmp_path)) == expected
    assert list(by_us(only_file(tmp_path))) == list(expected)


def test_checksums_are_tensorboards_own_at_any_length():
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as expected

    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, 100_000, np.uint8)
    lengths = np.array([0, 1, 3, 4, 63, 64, 65, 255, 256, 257, 319, 320, 321, 1000, 40_000, 50])
    starts = generator.integers(0, 50_000, len(lengths))
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    whole = data.tobytes()
    assert masked_crc32c(data, starts, lengths).tolist() == [
        expected(whole[start : start + length]) for start, length in pairs
    ]


def test_a_record_that_is_no_event_is_named(tmp_path):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as checksum

    content = b"\xff" * 20
    length = struct.pack("<Q", len(content))
    record = length + struct.pack("<I", checksum(length)) + content
    record += struct.pack("<I", checksum(content))
    event_file = file(tmp_path, "events.out.tfevents.1", record)
    with pytest.raises(EvidenceError, match="cannot be read: a record is not an event"):
        read_curves(event_file)
