import pytest

from converge_harness.cli.exit_codes import ExitCode, exit_code
from converge_harness.model import Judgement, Verdict


@pytest.mark.parametrize(
    ("judgements", "expected"),
    [
        (["PASS", "PASS"], ExitCode.PASS),
        (["PASS", "FAIL", "ERROR"], ExitCode.FAIL),
        (["PASS", "INVALID"], ExitCode.UNDECIDED),
        (["PASS", "INCONCLUSIVE"], ExitCode.UNDECIDED),
        (["ERROR"], ExitCode.UNDECIDED),
        ([], ExitCode.UNDECIDED),
    ],
)
def test_worst_verdict_decides(judgements, expected):
    verdicts = [
        Verdict(name=str(i), control="control", judgement=Judgement(word))
        for i, word in enumerate(judgements)
    ]
    assert exit_code(verdicts) is expected
