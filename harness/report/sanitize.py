"""Makes texts safe to print: names, messages, errors and verdicts come from anywhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from converge_harness.model import Check, Deviation, Limit, RankError, Verdict


def plain(text: str) -> str:
    """Text on one line without control characters: names and messages come from anywhere.

    Log lines hold terminal escapes, names may hold bidirectional overrides that reorder what a
    user reads ("Trojan Source", CVE-2021-42574); XML 1.0 has no form for most of them at all.
    """
    return " ".join("".join(_visible(char) for char in text).split())


def plain_block(text: str) -> str:
    """As :func:`plain`, keeping line breaks and indentation."""
    without_colours = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = without_colours.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4).split("\n")
    return "\n".join("".join(_visible(char) for char in line).rstrip() for line in lines).strip(
        "\n"
    )


def from_here(text: str, here: Path | None) -> str:
    """As :func:`plain`, with paths below the folder ``here`` relative to it.

    A report says where in the checkout a file is, and nothing about the machine.
    """
    if here is None or here == Path(here.anchor):
        return plain(text)
    return plain(re.sub(rf"(?<![^\s='\"]){re.escape(str(here))}/", "", text))


def _visible(char: str) -> str:
    if char.isspace():
        return " "
    return char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"


def plain_error(error: RankError | None) -> RankError | None:
    """An error whose message and traceback are safe to print."""
    if error is None:
        return None
    return RankError(error.rank, plain(error.message), plain_block(error.traceback))


def plain_verdict(verdict: Verdict, here: Path | None) -> Verdict:
    """A verdict whose texts are safe to print; paths below ``here`` are relative to it."""
    return replace(
        verdict,
        name=plain(verdict.name),
        control=plain(verdict.control),
        cause=plain(verdict.cause),
        module=plain(verdict.module),
        first_wrong=plain(verdict.first_wrong),
        look_at=plain(verdict.look_at),
        next_command=from_here(verdict.next_command, here),
        checks=tuple(_plain_check(check) for check in verdict.checks),
    )


def _plain_check(check: Check) -> Check:
    limit = check.limit and Limit(check.limit.value, plain(check.limit.origin))
    return replace(
        check,
        name=plain(check.name),
        title=plain(check.title),
        limit=limit,
        unit=plain(check.unit),
        detail=plain(check.detail),
        deviations=tuple(_plain_deviation(each) for each in check.deviations),
    )


def _plain_deviation(deviation: Deviation) -> Deviation:
    return replace(deviation, tensor=plain(deviation.tensor))
