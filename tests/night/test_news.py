"""A bad night is told of once; the next ones are told of when something else went wrong."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from converge_harness.cli import main
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.history import Entry, Filter, History, Night, Result
from converge_harness.model import CauseClass, Judgement
from converge_harness.night import body, night

START = datetime(2026, 11, 1, 3, tzinfo=UTC)
WORDS = {
    "pass": (Judgement.PASS, None),
    "fail": (Judgement.FAIL, CauseClass.GRADIENT_SCALE),
    "other": (Judgement.FAIL, CauseClass.DATA),
    "error": (Judgement.ERROR, None),
    "undecided": (Judgement.INCONCLUSIVE, None),
}


def remembered(history, number, torch="2.13.0", report="/reports/smoke", **sets):
    """One night, and what became of its sets; returns what the history then lists."""
    results = tuple(
        Result(
            test_set=name,
            control="fsdp2",
            verdict=WORDS[word][0],
            cause_class=WORDS[word][1],
            cause="" if word == "pass" else f"the cause of *{word}* @{name}",
            onset=None if word == "pass" else 7,
            wall_s=1.0,
            reused=False,
            definition="same",
            measurements=(),
        )
        for name, word in sets.items()
    )
    finished = START + timedelta(days=number)
    circumstances = {"torch": torch, "hardware": "one"}
    history.append(Night("smoke", "/smoke.toml", finished, circumstances, 3, 1.0, report, results))
    return history.listing(Filter(experiment="smoke"))


def told(history) -> list[list[str]]:
    """Sets in the news, night by night."""
    entries: tuple[Entry, ...] = history.listing(Filter())
    numbers = sorted({entry.night for entry in entries})
    return [[each.entry.test_set for each in night(entries, number).news] for number in numbers]


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "history.sqlite")


@pytest.mark.parametrize(
    ("words", "nights_with_news"),
    [
        ("pass pass pass", []),
        ("pass fail fail fail", [1]),
        ("fail fail", [0]),
        ("pass fail pass fail", [1, 3]),
        ("pass fail other fail other", [1, 2]),
        ("pass fail error fail error", [1, 2]),
        ("undecided undecided pass", [0]),
    ],
)
def test_the_first_bad_night_is_reported_once(history, words, nights_with_news):
    for number, word in enumerate(words.split()):
        remembered(history, number, tp2=word)
    assert [number for number, news in enumerate(told(history)) if news] == nights_with_news


def test_each_set_has_a_memory_of_its_own(history):
    remembered(history, 0, tp2="pass", pp2="pass")
    remembered(history, 1, tp2="fail", pp2="pass")
    remembered(history, 2, tp2="fail")  # a night of `--only tp2`
    remembered(history, 3, tp2="fail", pp2="fail", new="error")
    assert told(history) == [[], ["tp2"], [], ["pp2", "new"]]


def test_the_body_says_what_changed_since_it_last_passed(history):
    remembered(history, 0, tp2="pass", pp2="fail", cp2="fail")
    entries = remembered(history, 1, torch="2.14.0", tp2="fail", pp2="fail", cp2="pass")
    text = body(night(entries, entries[0].night))
    assert "**smoke: 1 test set is bad for the first time** (2026-11-02 03:00 UTC)" in text
    assert "### FAIL: tp2 (gradient scale), from step 7" in text
    assert "It passed last on 2026-11-01." in text
    assert "- torch: 2.13.0 → 2.14.0" in text
    assert "hardware" not in text
    assert "Still bad, already reported: pp2 (FAIL)." in text
    assert "Good again: cp2 (PASS)." in text
    assert "converge report /reports/smoke" in text


def test_names_and_causes_open_no_markup_and_call_nobody(history):
    entries = remembered(history, 0, **{"<b>@all": "fail"})
    text = body(night(entries, entries[0].night))
    assert not {"<b>", "@all", "*fail*"} & set(text.split())
    assert "@" not in text


# ---------------------------------------------------------------- converge notify


def notify(history, report, message):
    return main(["notify", str(report), "--history", str(history.path), "--body", str(message)])


def test_a_message_is_written_on_the_first_bad_night_and_removed_on_the_next(
    history, tmp_path, capsys
):
    message = tmp_path / "message.md"
    for number, (word, is_told) in enumerate(
        [("pass", False), ("fail", True), ("fail", False), ("pass", False)]
    ):
        report = tmp_path / str(number)
        remembered(history, number, report=str(report), tp2=word)
        assert notify(history, report, message) == ExitCode.PASS
        assert message.is_file() is is_told
    assert "1 still bad, already reported" in capsys.readouterr().out


def test_a_night_is_reported_as_it_was_then(history, tmp_path):
    for number, word in enumerate(["pass", "fail", "fail"]):
        remembered(history, number, report=str(tmp_path / str(number)), tp2=word)
    notify(history, tmp_path / "1", tmp_path / "message.md")
    assert "(2026-11-02 03:00 UTC)" in (tmp_path / "message.md").read_text()


def test_a_report_that_no_night_has_is_refused(history, tmp_path, capsys):
    remembered(history, 0, tp2="fail")
    assert notify(history, tmp_path / "elsewhere", tmp_path / "message.md") == ExitCode.USAGE
    told = capsys.readouterr().err
    assert str(tmp_path / "elsewhere") in told
    assert "--history" in told


# ------------------------------------------- nights that the history does not know


class Nightly:
    """What a workflow does after every night: reports lie in folders of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.history = History(folder / "history.sqlite")
        self.experiment = folder / "smoke.toml"
        self.experiment.write_text('name = "smoke"\n')
        self.message = folder / "message.md"
        self.number = 0

    def night(self, word, *, is_remembered=True):
        """The message of one night; None when there is none. ``silent``: nothing was launched."""
        self.number += 1
        report = self.folder / str(self.number)
        if word != "silent":
            self.write_report(report, word)
            if is_remembered:
                remembered(self.history, self.number, report=str(report), tp2=word)
        return self.notify(report)

    def notify(self, report):
        log = self.folder / "run.log"
        log.write_text("loading\n1 problem, nothing was launched:\n```<b>@all</b>\n")
        options = ["--experiment", str(self.experiment), "--log", str(log)]
        options += ["--history", str(self.history.path), "--body", str(self.message)]
        assert main(["notify", str(report), *options]) == ExitCode.PASS
        return self.message.read_text() if self.message.exists() else None

    def write_report(self, report, word):
        verdict, cause_class = WORDS[word]
        test = {"name": "tp2", "control": "fsdp2", "verdict": verdict, "cause": "a cause"}
        test |= {"cause_class": cause_class, "onset_step": 7, "wall_s": 1.0, "reused": False}
        report.mkdir()
        document = {"experiment": "smoke", "source": "smoke.toml", "versions": {"torch": "2.14.0"}}
        document |= {"generated": "2026-11-22 03:00 UTC", "tests": [test]}
        (report / "report.json").write_text(json.dumps(document))


@pytest.fixture
def nightly(tmp_path):
    return Nightly(tmp_path)


@pytest.mark.parametrize(
    ("words", "nights_with_messages"),
    [
        ("silent silent", [0]),
        ("pass silent silent pass silent", [1, 4]),
        ("pass fail silent fail silent silent", [1, 2, 4]),
        ("silent fail fail", [0, 1]),
    ],
)
def test_nights_that_judge_nothing_are_reported_once_in_a_row(nightly, words, nights_with_messages):
    told = [nightly.night(word) is not None for word in words.split()]
    assert [number for number, message in enumerate(told) if message] == nights_with_messages


def test_the_message_of_a_silent_night_quotes_what_was_said(nightly):
    nightly.night("pass")
    message = nightly.night("silent")
    assert "**smoke: nothing was judged**" in message
    assert "The last night that judged something was 2026-11-02." in message
    assert "\n````\nloading\n1 problem, nothing was launched:\n```<b>@all</b>\n````\n" in message
    again = nightly.notify(nightly.folder / "2")
    assert again == message


def test_a_silent_night_is_one_of_the_experiment_though_its_file_is_what_is_wrong(nightly):
    nightly.night("silent")
    nightly.experiment.write_text("name = [")
    assert nightly.night("silent") is None


@pytest.mark.parametrize("word", ["silent", "fail"])
def test_a_night_is_reported_when_the_history_is_damaged(nightly, word):
    nightly.night("pass")
    nightly.history.path.write_bytes(b"no database at all" * 100)
    message = nightly.night(word, is_remembered=False)
    assert "reported before: " in message
    assert "damaged" in message


def test_a_night_that_is_not_in_the_history_is_reported_by_its_report(nightly):
    nightly.night("pass")
    message = nightly.night("fail", is_remembered=False)
    assert "### FAIL: tp2 (gradient scale), from step 7" in message
    assert "This night is missing from the history" in message
    assert "- torch: 2.13.0 → 2.14.0" in message
    assert nightly.night("pass", is_remembered=False) is None


def test_names_that_reports_write_otherwise_are_the_same_sets(nightly):
    report = nightly.folder / "1"
    nightly.write_report(report, "fail")  # of a set that the file calls "tp2\t"
    remembered(nightly.history, 0, report="/before", **{"tp2\t": "fail"})
    remembered(nightly.history, 1, report=str(report), **{"tp2\t": "fail"})
    assert nightly.notify(report) is None


def test_a_report_of_a_later_night_in_the_same_folder_is_not_taken_for_the_old_one(nightly):
    nightly.night("fail")
    report = nightly.folder / "1"
    (report / "report.json").unlink()
    report.rmdir()
    nightly.write_report(report, "other")
    assert "### FAIL: tp2 (data" in nightly.notify(report)


def test_a_message_of_many_sets_fits_into_an_issue(history):
    entries = remembered(history, 0, **{f"set_{index}_{'x' * 60}": "fail" for index in range(2000)})
    text = body(night(entries, entries[0].night))
    assert len(text) < 65_000
    assert "2000 test sets are bad for the first time" in text
    assert "and " in text.split("No room for details of ")[1]
