"""JSONL, CSV and texts of steps and losses: what they give, and what they refuse."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_curves, read_spec
from converge_harness.readers.foreign import csv_table
from converge_harness.readers.foreign.in_memory import read_table

# -------------------------------------------------------------------- JSONL


def test_jsonl_with_the_names_of_other_tools(tmp_path):
    text = (
        '{"train/loss": 8.0, "train/grad_norm": 0.9, "train/global_step": 1}\n'
        "\n"
        '{"train/loss": NaN, "train/grad_norm": null, "train/global_step": 2}\n'
        '{"eval/loss": 7.9, "train/global_step": 2}\n'
    )
    evidence = read_curves(file(tmp_path, "wandb.jsonl", text))
    assert evidence.name == "wandb"
    assert evidence.steps.tolist() == [1, 2]
    assert math.isnan(evidence.signals["loss"][1])
    assert evidence.signals["grad_norm"] == (0.9, None)
    assert evidence.replayed == ()
    assert read_spec(tmp_path / "wandb.jsonl") is None


@pytest.mark.parametrize("name", ["curve", "curve.json"])
def test_jsonl_is_recognised_by_its_content(tmp_path, name):
    text = '{"step": 1, "loss": "inf"}\n{"step": 2, "loss": 1}\n'
    assert read_curves(file(tmp_path, name, text)).signals["loss"] == (math.inf, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"step": 1, "loss": 1}\n{"step": 2, "loss"\n', r"a\.jsonl:2: not JSON"),
        ('{"step": 1, "loss": 1}\n3\n', r"a\.jsonl:2: a int, not a JSON object"),
        ('{"step": 1e19, "loss": 1}\n', r"a\.jsonl:1: step is 1e\+19, which is not a step number"),
        ('{"step": -1, "loss": 1}\n', r"a\.jsonl:1: step is -1, which is not a step number"),
        ('{"step": 1, "loss": "low"}\n', r"a\.jsonl:1: loss is 'low', which is not a number"),
        ('{"step": 1, "loss": [1]}\n', r"a\.jsonl:1: loss is \[1\], which is not a number"),
        ('{"step": 1, "los": 1}\n', "no loss among 'step', 'los'; known names of it are loss"),
        ('{"epoch": 1, "loss": 1}\n', "no step among 'epoch', 'loss'"),
        ('{"step": 1, "loss": 1}\n{"loss": 1}\n', r"a\.jsonl:2: step is None"),
        ('{"step": 1, "loss": 1, "loss": 2}\n', r"a\.jsonl:1: .*key 'loss' occurs twice"),
    ],
)
def test_jsonl_that_cannot_be_understood(tmp_path, text, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.jsonl", text))


# ---------------------------------------------------------------------- CSV


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv(tmp_path, separator):
    text = "\ufeffstep,loss, lm,grad_norm\n1,8.0,x,nan\n2,,x,-inf\n\n3,7e0,x,0.5\n"
    evidence = read_curves(file(tmp_path, "a.csv", text.replace(",", separator)))
    assert evidence.steps.tolist() == [1, 2, 3]
    assert evidence.signals["loss"] == (8.0, None, 7.0)
    assert math.isnan(evidence.signals["grad_norm"][0])
    assert evidence.signals["grad_norm"][1:] == (-math.inf, 0.5)


CSV_ERRORS = [
    ("step,loss\n1,8.0\n2,high\n", r"a\.csv:3: loss is 'high'"),
    ("step,loss\n1,8.0\n2,8_0\n", r"a\.csv:3: loss is '8_0', which is not a number$"),
    ("step;loss\n1;8,25\n", r"a\.csv:2: loss is '8,25', .*: write decimal points, not commas"),
    ('step,loss\n1,"8,25e-1"\n', "loss is '8,25e-1', .*: write decimal points, not commas"),
    ("step;loss\n1;1.234,5\n", "loss is '1.234,5', .*: write decimal points, not commas"),
    ("step;loss\n1;no, nan\n", "loss is 'no, nan', which is not a number$"),
    ("step,loss\n1,8.0\n2,8\x000\n", r"a\.csv:3: loss is '8\\x000'"),  # at which pandas ends a cell
    ("step,loss\n1,8.0\n\nfive,1\n", r"a\.csv:4: step is 'five'"),
    ("step,loss\n1,8.0\n1.5,1\n", r"a\.csv:3: step is '1\.5'"),
    ("step,loss,lr\n1,8.0\n", r"a\.csv:2: 2 cells, where the header has 3"),
    ("step,loss\n1,2\n1,2,3\n", r"a\.csv:3: 3 cells, where the header has 2"),
    ("\n\nstep,loss\n1,2\n1,x\n", r"a\.csv:5: loss is 'x'"),
    ("step,loss\n", "has no row"),
    ("", "is empty"),
    ("step,loss,loss\n1,2,3\n", r"a\.csv:1: two columns have the name 'loss'"),
    ("step,accuracy\n1,2\n", "no loss among"),
    ('step,"loss\n1,8.0\n', r"a\.csv:1: not a table: unexpected end of data"),
    ('step,loss\n1,"8.0\n', r"a\.csv:2: not a table: unexpected end of data"),
    (b"step,loss\n1,2\n2,\xff\n", "is not UTF-8 text "),
]


@pytest.mark.parametrize(("text", "words"), CSV_ERRORS)
@pytest.mark.parametrize("fast_from", [csv_table.FAST_FROM, 0])
def test_csv_that_cannot_be_understood(tmp_path, monkeypatch, text, words, fast_from):
    monkeypatch.setattr(csv_table, "FAST_FROM", fast_from)
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.csv", text))


def plain_rows(count: int) -> list[str]:
    generator = np.random.default_rng(1)
    values = generator.lognormal(0, 9, size=(count, 2))
    rows = [f"{step},word,{a!r},{b!r}" for step, (a, b) in enumerate(values.tolist(), 1)]
    rows[7] = "8,word,nan,-Infinity"
    return rows


def unlike(text: str) -> list[str]:
    """The same table with something in it that the fast way leaves to the precise one."""
    return [
        text.replace("9,word", '9,"word"'),
        text.replace("9,word", "9,wörd"),
        text.replace("\n9,", "\n\n9,"),
        text.replace("\n9,word", "\n9.0,word"),
    ]


def read_both_ways(path: Path, monkeypatch):
    """Evidence of the fast way and of the precise one, with blocks that end within the file."""
    monkeypatch.setattr(csv_table, "BLOCK", 1000)
    monkeypatch.setattr(csv_table, "ROWS", 7)
    for fast_from in (0, 1 << 30):
        monkeypatch.setattr(csv_table, "FAST_FROM", fast_from)
        yield read_curves(path)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["\n", ""])
def test_both_ways_to_read_a_csv_give_the_same_bits(tmp_path, monkeypatch, newline, end):
    text = "\n".join(["step,text,loss,grad_norm", *plain_rows(200)]) + end
    for number, changed in enumerate([text, *unlike(text)]):
        path = file(tmp_path, f"{number}.csv", changed.replace("\n", newline))
        fast, precise = read_both_ways(path, monkeypatch)
        assert fast.steps.tolist() == precise.steps.tolist() == list(range(1, 201))
        for signal in ("loss", "grad_norm"):
            some, other = fast.signals[signal], precise.signals[signal]
            assert some.values.tobytes() == other.values.tobytes()
            assert some.present.all()
            assert other.present.all()


def test_a_large_plain_csv_is_read_the_fast_way(tmp_path, monkeypatch):
    path = file(tmp_path, "a.csv", "\n".join(["step,text,loss,grad_norm", *plain_rows(20)]))
    monkeypatch.setattr(csv_table, "FAST_FROM", 0)
    monkeypatch.delattr(csv_table, "_read_precisely")
    assert len(read_curves(path).steps) == 20


def test_pandas_is_imported_for_large_files_only(tmp_path, monkeypatch):
    path = file(tmp_path, "a.csv", "\n".join(["step,text,loss,grad_norm", *plain_rows(20)]))
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert len(read_curves(path).steps) == 20
    monkeypatch.setattr(csv_table, "FAST_FROM", 0)
    with pytest.raises(ImportError):
        read_curves(path)


@pytest.mark.parametrize("row", ["5,word,1.0", "5,word,1.0,2.0,3.0", "5,word,,2.0"])
def test_a_row_that_is_not_whole_is_seen_in_a_large_csv_too(tmp_path, monkeypatch, row):
    rows = plain_rows(200)
    rows[100] = row
    path = file(tmp_path, "a.csv", "\n".join(["step,text,loss,grad_norm", *rows]))
    if row.count(",") == 3:
        for evidence in read_both_ways(path, monkeypatch):
            assert evidence.signals["loss"][4] is not None  # the replay has none, the first had
            assert evidence.replayed == (5,)
    else:
        with pytest.raises(EvidenceError, match=r"a\.csv:102: . cells, where the header has 4"):
            list(read_both_ways(path, monkeypatch))


# --------------------------------------------------------------- column mapping


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "it,loss,ce\n1,9,8.0\n2,9,7.5\n"),
        ("a.jsonl", '{"it": 1, "loss": 9, "ce": 8.0}\n{"it": 2, "loss": 9, "ce": 7.5}\n'),
        ("a.txt", "# step it loss ce\n7 1 9 8.0\n8 2 9 7.5\n"),
    ],
)
def test_the_user_says_which_column_is_what(tmp_path, name, text):
    path = file(tmp_path, name, text)
    evidence = read_curves(path, {"loss": "ce", "step": "it"})
    assert evidence.steps.tolist() == [1, 2]
    assert evidence.signals["loss"] == (8.0, 7.5)
    with pytest.raises(EvidenceError, match=r"has no 'cee' for loss; it has .*'it', 'loss', "):
        read_curves(path, {"loss": "cee", "step": "it"})
    with pytest.raises(EvidenceError, match=r"has no 'cee' for step; it has "):
        read_curves(path, {"loss": "ce", "step": "cee"})
    with pytest.raises(EvidenceError, match="loss is mapped to 'a', too"):
        read_curves(path, {"loss": "a", "grad_norm": "a"})
    with pytest.raises(EvidenceError, match="'los' is not a signal; did you mean 'loss'"):
        read_curves(path, {"los": "ce"})


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_the_step_number_is_not_also_taken_for_the_loss(tmp_path, name):
    text = '{"step": 1, "loss": 2.0}\n' if name == "a.jsonl" else "step,loss\n1,2.0\n"
    with pytest.raises(EvidenceError, match="no step among 'step', 'loss'"):
        read_curves(file(tmp_path, name, text), {"loss": "step"})


def test_a_table_that_tensorboards_page_exports(tmp_path):
    text = "Wall time,Step,Value\n1761991200.5,1,8.5\n1761991201.5,2,7.25\n"
    evidence = read_curves(file(tmp_path, "run-tag-loss.csv", text), {"loss": "Value"})
    assert evidence.steps.tolist() == [1, 2]
    assert evidence.signals["loss"] == (8.5, 7.25)


# ------------------------------------------------------------- steps and losses

LLAMA3_PP = """\
# config: llama3_debugmodel_fsdp2_tp2_pp2
# ngpu: 8
# parallelism: FSDP=2, TP=2, PP=2
# step loss grad_norm
1 8.009735107421875 1.4477715492248535
2 7.683964729309082 1.553511381149292
3 7.141985893249512 1.555683970451355
"""


def test_a_golden_file_of_torchtitans_tests(tmp_path):
    evidence = read_curves(file(tmp_path, "llama3_pp.txt", LLAMA3_PP))
    assert evidence.steps.tolist() == [1, 2, 3]
    assert evidence.signals["loss"][0] == 8.009735107421875
    assert evidence.signals["grad_norm"][2] == 1.555683970451355
    assert not evidence.rounding


def test_steps_and_losses_without_any_comment(tmp_path):
    text = "1 -0.0013786826748400927\n2 7.676315726712346e-05\n\n3 nan\n"
    evidence = read_curves(file(tmp_path, "rl_grpo_cuda.txt", text))
    assert evidence.signals["loss"][:2] == (-0.0013786826748400927, 7.676315726712346e-05)
    assert math.isnan(evidence.signals["loss"][2])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{LLAMA3_PP}4 6.18\n", r"a\.txt:8: 2 values, where step loss grad_norm should be"),
        ("1 8.0\n2 7.9 1.0\n", r"a\.txt:2: 3 values, where step loss should be"),
        ("1 8.0\n2 7.9x\n", r"a\.txt:2: loss is '7\.9x'"),
        ("1 8.0\n2\n", r"a\.txt:2: 1 values"),
        ("1 8.0\n2.5 7\n", r"a\.txt:2: step is '2\.5'"),
        ("1 8.0 1.0 5\n", r"a\.txt:1: 4 values, where step loss grad_norm should be"),
        ("# step loss loss\n1 8.0 7.0\n", r"a\.txt:1: two columns have the name 'loss'"),
        ("# step loss\n", "write any other as CSV with the header step,loss,grad_norm"),
    ],
)
def test_a_text_of_losses_that_cannot_be_understood(tmp_path, text, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.txt", text))


# ------------------------------------------------- columns that look like a signal

LIKE = {
    "a norm": ("gnorm", {"grad_norm": ("gnorm",)}),
    "camel case": ("gradNorm", {"grad_norm": ("gradNorm",)}),
    "Composer's": ("l2_norm/grad/global", {"grad_norm": ("l2_norm/grad/global",)}),
    "torch's": ("total_norm", {"grad_norm": ("total_norm",)}),
    "one of a layer": ("embedding_norm", {}),
    "of weights": ("weight norm", {}),
    "another loss": ("train_loss", {"loss": ("train_loss",)}),
    "an auxiliary loss": ("moe/aux_loss", {"loss": ("moe/aux_loss",)}),
    "an evaluation": ("eval/loss", {}),
    "of validation": ("val_loss", {}),
    "a scale": ("loss_scale", {}),
    "the largest of all ranks": ("global_max_loss", {}),
    "time": ("tokens_per_second", {}),
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "frame"])
@pytest.mark.parametrize("case", LIKE)
def test_columns_that_look_like_a_judged_signal_are_named(tmp_path, kind, case):
    name, found = LIKE[case]
    rows = [{"step": step, "loss": 9.0 - step, name: 1.5} for step in (1, 2, 3)]
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        evidence = read_curves(file(tmp_path, "a.csv", "\n".join(lines) + "\n"))
    elif kind == "jsonl":
        evidence = read_curves(file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    else:
        evidence = read_table("a", {key: [row[key] for row in rows] for key in rows[0]}, {})
    assert evidence.overlooked == found
    assert evidence.signals["loss"] == (8.0, 7.0, 6.0)
    assert not evidence.without(["loss", "grad_norm"]).overlooked


@pytest.mark.parametrize("large", [False, True])
def test_what_is_read_or_no_number_is_not_overlooked(tmp_path, monkeypatch, large):
    if large:
        monkeypatch.setattr(csv_table, "FAST_FROM", 0)
    head = "" if large else "\n\n"  # pandas reads no table after blank lines
    text = f"{head}step,loss,loss_kind,grad_norm,gnorm,aux_loss\n1,8.0,ce,1.0,2.0,0.1\n"
    assert read_curves(file(tmp_path, "a.csv", text)).overlooked == {"loss": ("aux_loss",)}
    evidence = read_curves(file(tmp_path, "a.csv", text), {"grad_norm": "gnorm"})
    assert evidence.signals["grad_norm"] == (2.0,)
    assert evidence.overlooked == {"loss": ("aux_loss",)}


def test_a_summary_at_the_end_of_a_log_is_not_overlooked(tmp_path):
    rows = [{"step": step, "loss": 9.0} for step in (1, 2, 3)] + [{"step": 3, "train_loss": 9.0}]
    assert not read_curves(file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))).overlooked


def test_a_column_of_a_signal_that_is_left_out_may_be_missing(tmp_path):
    path = file(tmp_path, "a.csv", "step,loss\n1,8.0\n")
    columns = {"grad_norm": "gnorm"}
    assert set(read_curves(path, columns, without=["grad_norm"]).signals) == {"loss"}
    with pytest.raises(EvidenceError, match="has no 'gnorm' for grad_norm"):
        read_curves(path, columns)
    with pytest.raises(EvidenceError, match="has no 'gnorm' for grad_norm"):
        read_curves(path, columns, without=["lr"])
    both = file(tmp_path, "b.csv", "step,loss,gnorm\n1,8.0,2.0\n")
    assert read_curves(both, columns, without=["grad_norm"]).unread == ("grad_norm",)


# --------------------------------------------------------------- steps from 0


def test_steps_from_0_are_counted_from_1_before_any_are_left_out(tmp_path):
    text = "step,loss\n0,9.0\n1,8.0\n1,8.5\n2,7.0\n"
    path = file(tmp_path, "a.csv", text)
    evidence = read_curves(path, count_from_1=True, since=2)
    assert evidence.steps.tolist() == [2, 3]
    assert evidence.signals["loss"] == (8.5, 7.0)
    assert (evidence.replayed, str(evidence.replay_conflicts[0])) == (
        (2,),
        "step 2: loss 8.0, then 8.5",
    )
    assert evidence.counted_from_1
    assert read_curves(path).steps.tolist() == [0, 1, 2]
    other = read_curves(file(tmp_path, "b.csv", "step,loss\n1,9.0\n2,8.0\n"), count_from_1=True)
    assert (other.steps.tolist(), other.counted_from_1) == ([1, 2], False)
