"""What a person sees while jobs run, on a terminal and in a CI log."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from converge_harness.cli.progress import Display, left
from converge_harness.launch import (
    Ended,
    GoingOn,
    Notice,
    Overview,
    Preparing,
    Queued,
    Retrying,
    Reused,
    Started,
    Step,
    Waiting,
)
from converge_harness.model import (
    Job,
    Parallelism,
    Precision,
    RankError,
    Role,
    RunRecord,
    RunStatus,
    SetSpec,
    Toolchain,
    TrainConfig,
)
from converge_harness.trainers.torchtitan import TORCHTITAN

NAME = "tp2 [bold]<script>[/bold]"


def job() -> Job:
    spec = SetSpec(
        name=NAME,
        parallelism=Parallelism(dp_shard=2, tp=2),
        train_config=TrainConfig(path="t.toml", settings={}),
        toolchain="torchtitan-0.3.0",
        trainer=TORCHTITAN,
    )
    return Job(
        name=NAME,
        role=Role.TEST,
        spec=spec,
        toolchain=Toolchain("torchtitan-0.3.0", Path("python"), "titan_0_3", {}),
        seed=1,
        steps=20,
        local_batch_size=4,
        global_batch_size=8,
        seq_len=256,
        precision=Precision.FP32,
        identity="a" * 64,
    )


def record(status: RunStatus = RunStatus.FINISHED, error: RankError | None = None) -> RunRecord:
    return RunRecord(NAME, "a" * 64, Path("runs/tp2"), status, 12.3, (), error)


def shown(*events: object, terminal: bool = False, quiet: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    with Display(console, quiet=quiet) as display:
        for event in events:
            display(event)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("requeues", "told"),
    [
        (0, "finished in 12 s"),
        (1, "finished in 12 s, in its last start (requeued once)"),
        (2, "finished in 12 s, in its last start (requeued 2 times)"),
    ],
)
def test_the_time_of_a_requeued_job_is_that_of_its_last_start(requeues, told):
    ended = Ended(3.0, job(), replace(record(), requeues=requeues))
    assert shown(ended).strip() == f"{NAME}: {told}"


def test_a_log_has_one_plain_line_per_event():
    started = Started(1.0, job(), (0, 1, 2, 3), ("torchrun",), 1)
    step = Step(2.0, job(), 5, 6.25, 3.0, 10.0)
    overview = Overview(2.0, 1, 3, (NAME,), 60.0)
    output = shown(
        Preparing(0.0, "smoke: 3 jobs"), started, step, overview, Ended(3.0, job(), record())
    )
    assert output.splitlines() == [
        "smoke: 3 jobs",
        f"{NAME}: started on 4 ranks",
        f"{NAME}: finished in 12 s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_search_shows_bars_and_notices_and_nothing_else(terminal):
    begin = (Preparing(0.0, "smoke: 3 jobs"), Started(1.0, job(), (0, 1), ("torchrun",), 1))
    steps = (Step(2.0, job(), 5, 6.25, 3.0, 10.0), Overview(2.0, 1, 3, (NAME,), 60.0))
    end = (Notice(2.5, "a slow disk"), Ended(3.0, job(), record()))
    output = shown(*begin, *steps, *end, terminal=terminal, quiet=True)
    assert "warning: a slow disk" in output
    assert (NAME in output) is terminal  # its bar
    assert "finished in" not in output
    assert "3 jobs" not in output


def test_a_cluster_says_which_job_and_where():
    started = Started(2.0, job(), (), ("sbatch",), 2, "node[1-2]")
    output = shown(Queued(1.0, job(), "1234"), started)
    assert output.splitlines() == [
        f"{NAME}: submitted as job 1234",
        f"{NAME}: started on 4 ranks of node[1-2], attempt 2",
    ]


def test_a_terminal_shows_what_waits_in_a_queue():
    overview = Overview(2.0, 1, 20, ("a", "b"), None, queued=17, reason="Priority")
    assert "2 running, 17 waiting (Priority)" in shown(overview, terminal=True)


def test_a_terminal_shows_step_loss_and_time_left():
    started = Started(1.0, job(), (0, 1, 2, 3), ("torchrun",), 1)
    step = Step(2.0, job(), 5, 6.25, 3.0, 10.0)
    output = shown(started, step, Overview(2.0, 1, 3, (NAME,), 60.0), terminal=True)
    for text in ("5/20", "loss 6.2500", "about 10 s left", "<script>", "1/3"):
        assert text in output


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Reused(1.0, job(), record()), ["reused", "runs/tp2"]),
        (Notice(1.0, "the warm server died"), ["warning: the warm server died"]),
        (GoingOn(1.0, job(), "segment 2 of 3", ()), ["continues: segment 2 of 3"]),
        (Waiting(1.0, job(), 64), ["waits after step 64 for the runs it is compared with"]),
        (Retrying(1.0, job(), "the port was taken"), ["starting again", "the port was taken"]),
        (
            Ended(1.0, job(), record(RunStatus.CRASHED, RankError(1, "ValueError: [red] no"))),
            ["crashed in 12 s", "ValueError: [red] no", "logs in runs/tp2/logs"],
        ),
        (
            Ended(1.0, job(), record(RunStatus.REFUSED, RankError(None, "no such partition"))),
            [": refused: no such partition (as requested in runs/tp2/job.sh)"],
        ),
        (
            Ended(1.0, job(), record(RunStatus.SKIPPED, RankError(0, "its seed did not finish"))),
            ["skipped", "its seed did not finish"],
        ),
    ],
)
def test_each_event_says_what_a_person_asks(event, words):
    output = shown(event)
    assert all(word in output for word in words)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.2, "about 1 s left"), (89, "about 89 s left"), (91, "about 2 min left")],
)
def test_time_left(seconds, text):
    assert left(seconds) == text
