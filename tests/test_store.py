import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_disks import small_disk_at

from converge_harness import store as store_module
from converge_harness.errors import StoreError
from converge_harness.model import RankError, RunRecord, RunStatus
from converge_harness.store import (
    Store,
    atomic_write,
    default_root,
    folder_name,
    number,
    read_json,
    slug,
    write_json,
)

IDENTITY = "0123456789abcdef" * 4


def record_in(folder, **changes):
    values = {
        "name": "fsdp2",
        "identity": IDENTITY,
        "folder": folder,
        "status": RunStatus.FINISHED,
        "wall_s": 12.5,
        "argv": ("python", "-m", "torch.distributed.run"),
    }
    return RunRecord(**{**values, **changes})


def finish(store, **changes):
    folder = store.run_folder("fsdp2", IDENTITY)
    store.start_run(folder, {"name": "fsdp2"})
    return store.finish_run(record_in(folder, **changes), {"host": "here"})


@given(st.text())
def test_slug_is_a_short_safe_folder_name(name):
    made = slug(name)
    assert 0 < len(made) <= 40
    assert made.isascii()
    assert not set(made) & set("/\\ '\"<>\0")
    assert not made.startswith((".", "-"))


def test_folders_of_one_name_each_are_apart():
    names = ["smoke", "\u5b9f\u9a13", "\u8a66\u9a13", "\u00fcnd", "und", "x" * 41, "x" * 42]
    parts = [("a", "b"), ("a-b",), ("b", "a")]
    made = [folder_name(*each) for each in [*([name] for name in names), *parts]]
    assert len(set(made)) == len(made)
    assert all(len(each) < 60 and each.isascii() for each in made)
    assert made[0] == "smoke"


def test_names_alike_get_folders_apart(tmp_path):
    store = Store(tmp_path)
    first = store.run_folder("a/b", IDENTITY)
    second = store.run_folder("a b", IDENTITY[::-1])
    assert first.name.startswith("a-b-")
    assert first != second


def test_a_key_that_is_there_twice_makes_a_file_of_ours_unreadable(tmp_path):
    path = tmp_path / "job.json"
    path.write_text('{"schema": 1, "steps": 3, "command": {"a": 1}, "steps": 4}')
    with pytest.raises(StoreError, match="the key 'steps' occurs twice in one object"):
        read_json(path)
    path.write_text('{"schema": 1, "command": {"a": 1, "a": 1}}')
    with pytest.raises(StoreError, match="the key 'a' occurs twice in one object"):
        read_json(path)


def test_root_comes_from_the_environment():
    assert default_root({}) == Path(".converge")
    assert default_root({"CONVERGE_STORE": "/elsewhere"}) == Path("/elsewhere")


def test_record_survives_a_round_trip(tmp_path):
    store = Store(tmp_path)
    assert store.record(IDENTITY) is None
    written = finish(store, status=RunStatus.CRASHED, error=RankError(1, "ValueError: no", "trace"))
    assert store.record(IDENTITY) == written


def test_identity_alone_finds_a_run(tmp_path):
    store = Store(tmp_path)
    record = finish(store)
    assert store.run_folder("quite another name", IDENTITY) == record.folder


def test_run_without_a_record_is_unfinished(tmp_path):
    store = Store(tmp_path)
    store.start_run(store.run_folder("fsdp2", IDENTITY), {})
    assert store.record(IDENTITY) is None


def test_start_run_leaves_nothing_of_an_earlier_attempt(tmp_path):
    store = Store(tmp_path)
    record = finish(store)
    (record.folder / "metrics.jsonl").write_text("old")
    store.start_run(record.folder, {"name": "again"})
    assert [path.name for path in record.folder.iterdir()] == ["job.json"]
    assert read_json(record.folder / "job.json") == {"schema": 1, "name": "again"}


def test_not_finite_numbers_are_spelt_out(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": None, "e": 0.1})
    assert "NaN" not in path.read_text()
    read = read_json(path)
    assert read["a"] == "nan"
    assert math.isnan(number(read["a"]))
    assert [number(read["b"][0]), number(read["b"][1]["c"])] == [math.inf, -math.inf]
    assert (number(read["d"]), number(read["e"])) == (None, 0.1)


@pytest.mark.parametrize("value", ["NaN", "1.5", True, [], {}])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="not a number"):
        number(value)


def test_newer_schema_is_refused_by_name(tmp_path):
    path = tmp_path / "value.json"
    path.write_text(json.dumps({"schema": 2}))
    with pytest.raises(StoreError, match=r"schema 2 by a newer converge.*upgrade converge"):
        read_json(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b'{"a": 1}', b'{"schema": true}', b"[" * 99999]
)
def test_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "value.json"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"value\.json"):
        read_json(path)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "record.json")
    with pytest.raises(StoreError, match=r"record\.json: is not a file; delete it"):
        read_json(tmp_path / "record.json")


def test_incomplete_record_is_refused(tmp_path):
    store = Store(tmp_path)
    record = finish(store)
    write_json(record.folder / "record.json", {"name": "fsdp2"})
    with pytest.raises(StoreError, match="incomplete record"):
        store.record(IDENTITY)


@pytest.mark.parametrize("key", ["evidence", "sources"])
@pytest.mark.parametrize("value", [["x"], "x", 5, {"metrics.jsonl": 5}])
def test_a_record_whose_digests_are_none_is_refused(tmp_path, key, value):
    store = Store(tmp_path)
    path = finish(store).folder / "record.json"
    write_json(path, {**json.loads(path.read_text()), key: value})
    with pytest.raises(StoreError, match=r"incomplete record .*digests by path are"):
        store.record(IDENTITY)


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    atomic_write(path, b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def full_disk(tmp_path):
    with small_disk_at(tmp_path / "full", "64k") as folder:
        yield folder


def test_full_disk_loses_no_finished_run(full_disk):
    store = Store(full_disk)
    record = finish(store)
    with pytest.raises(StoreError, match="disk is full"):
        atomic_write(full_disk / "big", bytes(1 << 20))
    assert store.record(IDENTITY) == record
    assert not list(full_disk.glob(".big*"))


def test_store_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        Store(tmp_path / "file").require_writable()


def test_read_only_folder(tmp_path):
    """Root may write anywhere, so this runs as another user when it is root."""
    (tmp_path / "ro").mkdir(mode=0o555)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from converge_harness.errors import StoreError\n"
        "from converge_harness.store import Store\n"
        "if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)\n"
        "try: Store(Path(sys.argv[1])).require_writable()\n"
        "except StoreError as error: print(error)\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    told = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ro" / "store")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no permission" in told.stdout


def test_lock_keeps_another_out_until_released(tmp_path):
    store = Store(tmp_path)
    first, second = store.lock(IDENTITY), store.lock(IDENTITY)
    assert first.acquire()
    assert not second.acquire()
    assert store.lock(IDENTITY[::-1]).acquire()
    first.release()
    assert second.acquire()
    second.release()


def test_files_can_be_read_by_others(tmp_path):
    atomic_write(tmp_path / "report.html", b"x")
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644
