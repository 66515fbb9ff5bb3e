"""From a judged matrix to a night, and what the command line says of nights."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from history_samples import START, VERSIONS, deviation, night, nights_with_a_step, result
from rich.console import Console

from converge_harness.cli.main import main
from converge_harness.cli.verdicts import add_night
from converge_harness.history import Filter, History, night_of
from converge_harness.model import (
    CauseClass,
    Check,
    Experiment,
    Job,
    Judgement,
    Limit,
    Outcome,
    Parallelism,
    Plan,
    Precision,
    Role,
    RunRecord,
    RunStatus,
    SetSpec,
    Surroundings,
    Tier,
    Toolchain,
    TrainConfig,
    Verdict,
)
from converge_harness.trainers.torchtitan import TORCHTITAN

TOOLCHAIN = Toolchain("torchtitan-0.3.0", Path("python"), "titan_0_3", {"torch": "2.13.0"})
CHECKS = (
    Check("loss-envelope", "", Tier.ENVELOPE, Outcome.FAIL, 0.5, Limit(1e-6, "floor"), "relative"),
    Check("finite", "", Tier.INTEGRITY, Outcome.PASS),
    Check("loss-equivalent", "", Tier.EQUIVALENCE, Outcome.SKIPPED),
)
VERDICT = Verdict(
    *("tp2", "fsdp2", Judgement.FAIL, "Gradients are halved.", CauseClass.GRADIENT_SCALE),
    onset_step=3,
    checks=CHECKS,
)


def job(name, *, note="", tolerances=None, **degrees):
    config = TrainConfig("t.toml", {"training": {"seq_len": 64}})
    spec = SetSpec(
        name,
        Parallelism(**degrees),
        config,
        TOOLCHAIN.name,
        note=note,
        tolerances=tolerances or {},
        control=None if name == "fsdp2" else "fsdp2",
        trainer=TORCHTITAN,
    )
    role = Role.CONTROL if name == "fsdp2" else Role.TEST
    return Job(name, role, spec, TOOLCHAIN, 1, 20, 2, 4, 64, Precision.FP32, identity=name * 9)


def plan_of(*jobs):
    specs = [each.spec for each in jobs]
    return Plan(Experiment("nightly", Path("nightly.toml"), (specs[0],), tuple(specs[1:])), jobs)


def record(one, status=RunStatus.FINISHED, wall_s=12.5, *, reused=False):
    folder = Path("runs") / one.name
    return RunRecord(one.name, one.identity, folder, status, wall_s, (), reused=reused)


def recorded(plan, records=None):
    return night_of(
        plan,
        records or [record(each) for each in plan.jobs],
        [VERDICT],
        finished=START,
        source="/lab/nightly.toml",
        report="/lab/reports",
        circumstances={"torch": "2.13.0", "driver": ""},
        wall_s=60.0,
    )


PLAN = plan_of(job("fsdp2", dp_shard=2), job("tp2", dp_shard=2, tp=2))


def test_a_night_keeps_verdict_cause_onset_time_and_every_answered_check():
    kept = recorded(PLAN)
    assert kept.circumstances == {"torch": "2.13.0"}  # what is not known is left out
    (one,) = kept.results
    assert (one.test_set, one.control, one.verdict) == ("tp2", "fsdp2", Judgement.FAIL)
    assert (one.cause_class, one.cause) == (CauseClass.GRADIENT_SCALE, "Gradients are halved.")
    assert (one.onset, one.wall_s, one.reused) == (3, 12.5, False)
    assert [(each.check, each.outcome) for each in one.measurements] == [
        ("loss-envelope", Outcome.FAIL),
        ("finite", Outcome.PASS),
    ]
    assert (one.measurements[0].measured, one.measurements[0].limit) == (0.5, 1e-6)


@pytest.mark.parametrize(
    ("control", "test", "same"),
    [
        (job("fsdp2", dp_shard=2, note="x"), job("tp2", dp_shard=2, tp=2), True),
        (
            *(job("fsdp2", dp_shard=2), job("tp2", dp_shard=2, tp=2, tolerances={"loss": 1.0})),
            True,
        ),
        (job("fsdp2", dp_shard=4), job("tp2", dp_shard=2, tp=2), False),
        (job("fsdp2", dp_shard=2), replace(job("tp2", dp_shard=2, tp=2), steps=40), False),
    ],
    ids=["note", "tolerance", "other control", "other steps"],
)
def test_a_definition_changes_with_what_the_file_asks_for(control, test, same):
    (one,), (other,) = recorded(PLAN).results, recorded(plan_of(control, test)).results
    assert (one.definition == other.definition) is same


def test_content_changes_when_a_job_ran_again_and_not_when_runs_are_reused():
    first = recorded(PLAN)
    reused = recorded(PLAN, [record(each, reused=True) for each in PLAN.jobs])
    again = recorded(PLAN, [record(PLAN.jobs[0], wall_s=12.6), record(PLAN.jobs[1])])
    assert first.content == reused.content
    assert first.content != again.content


@pytest.mark.parametrize("damaged", [True, False])
def test_a_damaged_history_only_warns(tmp_path, damaged):
    path = tmp_path / "history.sqlite"
    if damaged:
        path.write_bytes(b"no database, " * 1000)
    console = Console(record=True, width=200)
    add_night(
        console,
        History(path),
        replace(PLAN, surroundings=Surroundings("cpu-x86_64", "f" * 64)),
        [record(each) for each in PLAN.jobs],
        [VERDICT],
        folder=tmp_path / "report",
        wall_s=1.0,
    )
    said = console.export_text()
    assert ("warning: this night is missing from the history" in said) is damaged
    assert str(path) in said
    if damaged:
        assert path.read_bytes().startswith(b"no database")  # left for a person to look at
    else:
        assert len(History(path).listing(Filter(experiment="nightly"))) == 1


# ------------------------------------------------------------------ command line


@pytest.fixture
def history(tmp_path, monkeypatch):
    path = tmp_path / "history.sqlite"
    monkeypatch.setenv("CONVERGE_HISTORY", str(path))
    History(path).append_all(nights_with_a_step(10, at=8))
    return History(path)


def test_it_lists_by_name_or_file_and_filters(history, capsys):
    assert main(["history", "/lab/experiments/nightly.toml", "--verdict", "fail"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if "tp2" in line]
    assert len(found) == 2
    assert "update" in found[0]
    assert main(["history", "nightly", "--test", "tp2", "--limit", "3"]) == 0
    assert "the newest 3; more with --limit N" in capsys.readouterr().out


def test_json_has_checks_circumstances_and_the_verdict_before(history, capsys):
    history.append(night(20, result(measurements=(deviation("loss-envelope", float("nan")),))))
    assert main(["history", "--json", "--limit", "2"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["schema"] == 1
    newest, before = document["results"]
    assert (newest["verdict"], newest["previous_verdict"]) == ("PASS", "FAIL")
    assert newest["checks"][0]["measured"] == "nan"
    assert newest["circumstances"] == VERSIONS
    assert before["finished"] == "2026-03-10T03:00:00+00:00"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nightli"], "no night of 'nightli' (did you mean 'nightly'?"),
        (["--test", "tp"], "no night of 'tp' (did you mean 'tp2'?"),
        (["--html", "x.html", "--verdict", "FAIL"], "--verdict: says nothing with --html"),
        (["--history", "nowhere.sqlite"], "nowhere.sqlite: no history yet"),
    ],
)
def test_a_mistake_is_reported_in_a_line(history, arguments, message, capsys):
    assert main(["history", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--since", "yesterday"], ["--verdict", "BAD"], ["--json", "--html", "x"]]
)
def test_a_wrong_option_is_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["history", *arguments])
    assert "converge history: error: argument" in capsys.readouterr().err


def test_the_page_is_written_whole(history, tmp_path, capsys):
    page = tmp_path / "deep" / "history.html"
    assert main(["history", "nightly", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8").endswith("</html>")


def test_a_damaged_history_cannot_be_listed(history, capsys):
    with closing(sqlite3.connect(history.path)) as connection:
        connection.execute("DROP TABLE results")
    assert main(["history"]) == 2
    assert "no such table: results" in capsys.readouterr().err
