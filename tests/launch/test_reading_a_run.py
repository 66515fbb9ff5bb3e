import json
import os

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
