"""docs/extension.md applied to a copy of the package, as its reader would do it by hand."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from converge_harness.run_folder.metrics import progress_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extension.md"
FOLDER, PACKAGE = "harness", progress_of.__module__.partition(".")[0]
TINY = "tests/trainers/tiny/__init__.py"


class Block(NamedTuple):
    """A fenced block: ``language``, the rest of its first fence, and its lines."""

    language: str
    title: str
    text: str


class Command(NamedTuple):
    line: str
    output: str
    """Of it, with a line of ``…`` where some were left out."""


SHELL = """
import shlex, subprocess, sys
from {package}.cli.main import main
for line in sys.argv[1:]:
    words = shlex.split(line)
    code = main(words[1:]) if words[0] == "converge" else subprocess.call(words)
    print(f"\\0{{code}}", flush=True)
"""
"""Runs commands in one process: starting Python takes longer than most of them."""


def blocks(*languages):
    found = re.findall(r"^```(\w+) ?(.*)\n((?:.*\n)*?)```$", PAGE.read_text(), re.MULTILINE)
    return [block for each in found if (block := Block(*each)).language in languages]


def commands():
    parts = [part for each in blocks("console") for part in f"\n{each.text}".split("\n$ ")[1:]]
    return [Command(*part.rstrip().partition("\n")[::2]) for part in parts]


def changes():
    """The blocks that name a file in their first line, which is taken off: path to block."""
    named = [(each.text.partition("\n"), each) for each in blocks("python", "diff")]
    return [(first[0].removeprefix("# "), each._replace(text=first[2])) for first, each in named]


def applied(folder):
    """Make the copy in ``folder``, with what the page adds to it."""
    shutil.copytree(ROOT / FOLDER, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for path, block in changes():
        inside = path.replace(f"{FOLDER}/", f"{PACKAGE}/", 1) if path.startswith(FOLDER) else path
        if path != TINY:
            _apply(folder / inside, block)
    for block in blocks("csv", "text", "toml"):
        if block.title:
            (folder / block.title).write_text(block.text)
    _install(folder)
    return folder


def _apply(file, block):
    if block.language == "diff":
        text = file.read_text()
        for hunk in re.split(r"^@@\n", block.text, flags=re.MULTILINE):
            old, new = _side(hunk, "-"), _side(hunk, "+")
            assert text.count(old) == 1, f"{file}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
    elif file.exists():
        # A function that a list below names stands above it.
        above, table, below = file.read_text().partition("CHECKS: tuple")
        text = f"{above}{block.text}\n\n{table}{below}" if table else f"{above}\n\n{block.text}"
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = block.text
    file.write_text(text)


def _side(hunk, sign):
    lines = hunk.splitlines(keepends=True)
    return "".join(line[1:] for line in lines if line[0] in f" {sign}")


def _install(folder):
    """The tiny trainer, by the metadata that pip would make of the page's pyproject.toml."""
    shutil.copytree(ROOT / "tests" / "trainers" / "tiny", folder / "tiny")
    (block,) = (each for each in blocks("toml") if not each.title)
    ((group, found),) = tomllib.loads(block.text)["project"]["entry-points"].items()
    metadata = folder / "tiny-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {module}" for name, module in found.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def outputs(folder):
    """What the page's commands print, and their exit codes, in the order of the page."""
    done = python(folder, "-c", SHELL.format(package=PACKAGE), *(each.line for each in commands()))
    parts = done.stdout.split("\0")
    assert len(parts) == len(commands()) + 1, done.stderr
    ends = [part.partition("\n") for part in parts[1:]]
    texts = (parts[0], *(text for _, _, text in ends))
    return [(text, int(code)) for text, (code, _, _) in zip(texts, ends, strict=False)]


def run_tests(folder, *paths):
    """The page's tests in these folders."""
    options = ("-q", "-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider")
    return python(folder, "-m", "pytest", *options, *paths)


def python(folder, *words):
    """Python in ``folder``, with the copy in front of the installed package."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT / "tests" / "judge"))),
            "COLUMNS": "100",
            "CONVERGE_STORE": str(folder / "store"),
            "CONVERGE_HISTORY": str(folder / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
