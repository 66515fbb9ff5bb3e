import json
import os

import pytest

from converge_harness.launch.progress import MetricsTail
from converge_harness.model import RankError
from converge_harness.trainers.failure import is_infrastructure_fault, log_tail, rank_error


def tail_in(folder):
    return MetricsTail(folder)


def line(step, loss):
    return json.dumps({"kind": "step", "step": step, "loss": loss}) + "\n"


def test_every_step_is_reported_once_also_over_the_renaming(tmp_path):
    tail = tail_in(tmp_path)
    part = tmp_path / "metrics.jsonl.part"
    assert tail.new_steps() == ()
    part.write_text('{"schema": 1, "kind": "header"}\n' + line(1, 6.5))
    assert [(step.step, step.loss) for step in tail.new_steps()] == [(1, 6.5)]
    assert tail.new_steps() == ()
    with part.open("a") as stream:
        stream.write(line(2, "nan"))
    part.rename(tmp_path / "metrics.jsonl")
    (step,) = tail.new_steps()
    assert step.step == 2
    assert step.loss != step.loss


def test_half_a_line_waits_for_its_end(tmp_path):
    tail = tail_in(tmp_path)
    part = tmp_path / "metrics.jsonl.part"
    whole = line(1, 6.5)
    part.write_text(whole[:10])
    assert tail.new_steps() == ()
    part.write_text(whole)
    assert [step.step for step in tail.new_steps()] == [1]


def test_damaged_lines_are_no_steps(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('nonsense\n[]\n{"kind": "step"}\n' + line(3, None))
    assert [(step.step, step.loss) for step in tail_in(tmp_path).new_steps()] == [(3, None)]


def write_error(folder, rank, message, *, seconds, callstack=""):
    path = folder / "logs" / "id_x" / "attempt_0" / str(rank) / "error.json"
    path.parent.mkdir(parents=True)
    told = {"message": message, "extraInfo": {"py_callstack": callstack, "timestamp": "100"}}
    path.write_text(json.dumps({"message": told}))
    os.utime(path, (seconds, seconds))
    return path


def write_failures(folder, *failures):
    (folder / "logs").mkdir(exist_ok=True)
    listed = [
        {"rank": rank, "exitcode": code, "timestamp": 100, "error_file": str(path)}
        for rank, code, path in failures
    ]
    (folder / "logs" / "failures.json").write_text(json.dumps({"failures": listed}))


def test_the_rank_that_failed_first_speaks(tmp_path):
    late = write_error(tmp_path, 0, "ValueError: late", seconds=100.9)
    early = write_error(tmp_path, 1, "ValueError: early", seconds=100.1, callstack="Traceback …")
    write_failures(tmp_path, (0, 1, late), (1, 1, early))
    assert rank_error(tmp_path / "logs") == RankError(1, "ValueError: early", "Traceback …")


def test_a_killed_rank_outranks_those_that_lost_it(tmp_path):
    lost = write_error(
        tmp_path, 0, "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1", seconds=99.0
    )
    write_failures(tmp_path, (0, 1, lost), (1, -9, "<N/A>"), (2, -15, "<N/A>"))
    error = rank_error(tmp_path / "logs")
    assert (error.rank, error.message) == (1, "killed by SIGKILL")


def test_without_the_agents_word_the_ranks_own_files_serve(tmp_path):
    write_error(tmp_path, 3, "KeyError: 'x'\nmore", seconds=1.0)
    error = rank_error(tmp_path / "logs")
    assert (error.rank, error.message) == (3, "KeyError: 'x'")


def test_a_truncated_error_file_falls_back_to_the_log(tmp_path):
    path = write_error(tmp_path, 0, "gone", seconds=1.0)
    path.write_text("")
    (path.parent / "stderr.log").write_text("OSError: [Errno 28] No space left on device\n")
    write_failures(tmp_path, (0, 1, path))
    assert "No space left" in rank_error(tmp_path / "logs").message


def torchrun_fails(folder, last):
    log = 'Traceback (most recent call last):\n  File "api.py", line 5, in next_rendezvous\n'
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "torchrun.log").write_text(f"E1128 failed (exitcode: -9)\n{log}{last}\n")


@pytest.mark.parametrize("message", ["", "RuntimeError: [gloo] Connection closed by peer"])
def test_an_error_of_torchrun_itself_outranks_those_of_ranks_that_it_took_along(tmp_path, message):
    path = write_error(tmp_path, 0, message, seconds=1.0)
    if not message:
        path.write_text("")  # killed while it wrote it
    (path.parent / "stderr.log").write_text("  a line of a warning\n")
    torchrun_fails(tmp_path, "DistStoreError: no such store")
    error = rank_error(tmp_path / "logs")
    assert (error.rank, error.message) == (
        None,
        "torchrun itself failed: DistStoreError: no such store",
    )


def test_a_rank_that_failed_before_torchrun_did_outranks_it(tmp_path):
    write_error(tmp_path, 1, "ValueError: early", seconds=1.0)
    torchrun_fails(tmp_path, "DistStoreError: no such store")
    assert rank_error(tmp_path / "logs").message == "ValueError: early"


def test_a_signal_to_torchrun_is_no_error_of_its_own(tmp_path):
    write_error(tmp_path, 1, "RuntimeError: Connection closed by peer", seconds=1.0)
    last = (
        "torch.….SignalException: Process 7 got signal: 15\nresource_tracker.py:1: UserWarning: x"
    )
    torchrun_fails(tmp_path, f"{last}\n  warnings.warn(x)")
    assert rank_error(tmp_path / "logs").message == "RuntimeError: Connection closed by peer"


def test_the_log_of_a_rank_whose_error_file_is_torn_is_read_if_torchrun_says_nothing(tmp_path):
    path = write_error(tmp_path, 0, "gone", seconds=1.0)
    path.write_text("")
    (path.parent / "stderr.log").write_text("Traceback …\nValueError: the reason\n")
    (tmp_path / "logs" / "torchrun.log").write_text("W1128 OMP_NUM_THREADS is set to 1\n")
    assert "ValueError: the reason" in rank_error(tmp_path / "logs").message


def test_a_rank_that_says_no_error_is_said_to_have_said_none(tmp_path):
    log = tmp_path / "logs" / "id_x" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("UserWarning: it may be\n  if not random:\n")
    write_failures(tmp_path, (0, 7, "<N/A>"))
    message = "ended with exit code 7; last output: if not random:"
    assert rank_error(tmp_path / "logs").message == message


def test_nothing_at_all_is_said_so(tmp_path):
    assert rank_error(tmp_path / "logs").message == "ended without output"


def test_log_tail_is_bounded(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 200_000 + b"\nlast \xff\n")
    assert log_tail(log).endswith("last \ufffd")
    assert len(log_tail(log)) < 70_000


def test_only_faults_of_the_machine_are_tried_again():
    assert is_infrastructure_fault(RankError(0, "bind: Address already in use"))
    assert is_infrastructure_fault(RankError(0, "x", "RendezvousConnectionError: …"))
    assert not is_infrastructure_fault(RankError(0, "ValueError: loss is nan"))
