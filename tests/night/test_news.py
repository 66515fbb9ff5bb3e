"""A bad night is told of once; the next ones are told of when something else went wrong."""

from datetime import UTC, datetime, timedelta

import pytest

from harness.cli import main
from harness.gate import ExitCode
from harness.history import Entry, Filter, History, Night, Result
from harness.model import CauseClass, Judgement
from harness.night import body, night

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
def test_the_first_bad_night_is_told_of_once(history, words, nights_with_news):
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
    assert "Still bad, told of before: pp2 (FAIL)." in text
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
    assert "1 still bad, told of before" in capsys.readouterr().out


def test_a_night_is_told_of_as_it_was_then(history, tmp_path):
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
